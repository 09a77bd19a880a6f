"""Choosing a token: what is masked, what never is, and which settings are refused by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from razor_dist.config.errors import EngineError, RequestError
from razor_dist.engine.messages import HEADER_SIZE, decode, encode
from razor_dist.engine.sampler import sample
from razor_dist.engine.sampling_params import SamplingParams


def draws(logits: list[float], **settings: Any) -> set[int]:
    """The tokens that 200 draws choose."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(**settings)
    return {sample(torch.tensor(logits), params, generator).token for _ in range(200)}


@pytest.mark.parametrize("settings", [{"temperature": 1e-40}, {"temperature": 1e-6}])
@pytest.mark.parametrize("logits", [[1.0, 3.0, 2.0], [-1e30, 1e30, 0.0], [0.0, 5.0, 5.0]])
def test_a_temperature_next_to_nothing_is_greedy(
    settings: dict[str, float], logits: list[float]
) -> None:
    assert draws(logits, **settings) == draws(logits, temperature=0) == {1}


@pytest.mark.parametrize("top_p", [1e-50, 5e-324, 1e-7])
def test_the_likeliest_token_is_never_masked(top_p: float) -> None:
    assert draws([1.0, 3.0, 2.0], top_p=top_p) == {1}
    assert draws([4.0, 4.0, 4.0, 0.0], top_p=top_p) == {0}  # of equals, the first
    assert draws([0.0] * 1000, top_p=top_p) == {0}
    assert draws([1.0, 3.0, 2.0], top_p=top_p, top_k=2) == {1}
    assert draws([1.0, 3.0, 2.0], top_p=top_p, temperature=1e-40) == {1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log().tolist()
    assert draws(logits, top_p=0.5) == {1}
    assert draws(logits, top_p=0.7) == {1, 2}
    assert draws(logits, top_p=1.0) == {0, 1, 2}


def test_top_k_keeps_so_many_and_their_equals() -> None:
    assert draws([1.0, 3.0, 2.9, 2.8], top_k=1) == {1}
    assert draws([1.0, 3.0, 2.9, 2.8], top_k=2) == {1, 2}
    assert draws([3.0, 3.0, 3.0, -9.0], top_k=1) == {0, 1, 2}
    for everything in (-1, 0, 3, 2**63 - 1):
        assert draws([1.0, 1.0, 1.0], top_k=everything) == {0, 1, 2}


def test_masked_tokens_are_never_drawn() -> None:
    assert draws([-torch.inf, 0.0, 0.0], top_k=3) == {1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits", [[0.0, torch.nan], [torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]]
)
def test_what_is_no_distribution_is_an_error(logits: list[float], temperature: float) -> None:
    with pytest.raises(EngineError, match="not finite"):
        draws(logits, temperature=temperature)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", 25.0, "max_tokens must be an integer, got 25.0"),
        ("max_tokens", True, "max_tokens must be an integer, got True"),
        ("max_tokens", "8", "max_tokens must be an integer, got '8'"),
        ("max_tokens", np.int64(8), "max_tokens must be an integer, got np.int64"),
        ("max_tokens", 2**63, "max_tokens must be a 64-bit integer, got 9223372036854775808"),
        ("top_k", 2.0, "top_k must be an integer, got 2.0"),
        ("top_k", None, "top_k must be an integer, got None"),
        ("top_k", 2**63, "top_k must be a 64-bit integer"),
        ("seed", 1.5, "seed must be an integer, got 1.5"),
        ("seed", False, "seed must be an integer, got False"),
        ("seed", 2**64, "seed must be a 64-bit integer, got 18446744073709551616"),
        ("seed", -(2**63) - 1, "seed must be a 64-bit integer"),
        ("logprobs", True, "logprobs must be an integer, got True"),
        ("logprobs", 1.0, "logprobs must be an integer, got 1.0"),
        ("prompt_logprobs", "1", "prompt_logprobs must be an integer, got '1'"),
        ("temperature", "1", "temperature must be a number, got '1'"),
        ("temperature", None, "temperature must be a number, got None"),
        ("temperature", True, "temperature must be a number, got True"),
        ("temperature", float("nan"), "temperature must be between 0 and 2, got nan"),
        ("top_p", [0.5], r"top_p must be a number, got \[0.5\]"),
        ("top_p", float("nan"), r"top_p must be in \(0, 1\], got nan"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("stop", 5, "stop must hold strings, got 5"),
        ("stop", ["a", 5], "stop must hold strings"),
        ("stop", b"ab", "stop must hold strings"),
        ("stop_token_ids", 5, "stop_token_ids must hold token ids, got 5"),
        ("stop_token_ids", [1.0], "stop_token_ids must hold token ids"),
        ("stop_token_ids", [True], "stop_token_ids must hold token ids"),
        ("stop_token_ids", [2**63], "stop_token_ids must be a 64-bit integer"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_every_valid_setting_reaches_rank_0_as_it_was() -> None:
    params = SamplingParams(
        max_tokens=2**63 - 1,
        temperature=np.float64(0.5),
        top_p=1,
        top_k=2**63 - 1,
        seed=-(2**63),
        stop=["a"],  # type: ignore[arg-type]
        stop_token_ids=[2**63 - 1],  # type: ignore[arg-type]
        logprobs=20,
    )
    assert SamplingParams(**decode(encode(asdict(params))[HEADER_SIZE:])) == params
    for seed in (-(2**63), 2**63 - 1):
        torch.Generator().manual_seed(seed)
