"""Choosing a token: what is masked, what never is, and which settings are refused by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from razor_dist.config.errors import RequestError
from razor_dist.engine.sampler import Adjusted, Draw, Sampled, likeliest, sample
from razor_dist.protocol.messages import HEADER_SIZE, decoder, encode
from razor_dist.protocol.sampling_params import SamplingParams


def draws(logits: list[float], count: int = 200, **settings: Any) -> Counter[int | None]:
    """Draw ``count`` times; count the tokens that were chosen."""
    drawn = [Draw(0, place) for place in range(count)]
    found = sample(torch.tensor([logits] * count), [SamplingParams(**settings)] * count, drawn)
    return Counter(None if one is None else one.token for one in found)


def seeded(logits: Tensor, params: Sequence[SamplingParams]) -> list[Sampled | None]:
    """Draw a token for each row with the seeds of ``params``."""
    return sample(logits, params, [Draw(p.seed or 0, 7) for p in params])


def numbers(seed: int, place: int, count: int) -> list[float]:
    """Return the exponential numbers of a draw, by Python's integers."""
    size = 2**64

    def mixed(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % size
        value = (value ^ value >> 27) * 0x94D049BB133111EB % size
        return value ^ value >> 31

    key = mixed((mixed(seed % size) + place) % size)
    hashed = [mixed((key + token * 0x9E3779B97F4A7C15) % size) for token in range(count)]
    return [-math.log(((value >> 11) + 0.5) / 2**53) for value in hashed]


def behind(logits: list[float], params: SamplingParams, drawn: int) -> float:
    """Return by how much a drawn token's ratio exceeds the winner's, relatively, in float64."""
    p = np.exp(np.array(logits) / params.temperature - max(logits) / params.temperature)
    if 0 < params.top_k < len(p):
        p[p < sorted(p, reverse=True)[params.top_k - 1]] = 0
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    kept, mass = [], 0.0
    for token in sorted(range(len(p)), key=lambda token: -p[token]):
        if mass < params.top_p or not kept:
            kept.append(token)
        mass += p[token]
    assert drawn in kept
    race = numbers(params.seed or 0, 7, len(p))
    return race[drawn] / p[drawn] / min(race[token] / p[token] for token in kept if p[token]) - 1


# Apart from the borders of top_p that such few equal logits have.
TOP_P = st.sampled_from([1.0, 0.9137, 0.5071, 0.1313, 1e-9])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SamplingParams]]:
    size = draw(st.integers(2, 12))
    logit = st.sampled_from([-torch.inf, -9.0, -2.5, 0.0, 0.3, 1.0, 7.75])
    row = st.lists(logit, min_size=size, max_size=size).filter(lambda r: max(r) > -torch.inf)
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 0.4, 1, 1.7]),
        top_k=st.integers(-1, size + 1),
        top_p=TOP_P,
        min_p=st.sampled_from([0.0, 0.0, 0.11, 0.77, 1.0]),
        seed=st.integers(0, 2**40),
        logprobs=st.none() | st.integers(0, 2),
    )
    rows = draw(st.lists(st.tuples(row, params), min_size=1, max_size=6))
    return [logits for logits, _ in rows], [params for _, params in rows]


@hypothesis_settings(deadline=None)
@given(batch=batches(), few=st.integers(1, 4))
def test_every_row_is_drawn_as_if_alone_and_literally(
    batch: tuple[list[list[float]], list[SamplingParams]], few: int
) -> None:
    rows, params = batch
    together = seeded(torch.tensor(rows), params)
    with mock.patch("razor_dist.engine.sampler._FEW", few):
        assert seeded(torch.tensor(rows), params) == together
    for logits, own, sampled in zip(rows, params, together, strict=True):
        assert seeded(torch.tensor([logits]), [own]) == [sampled]
        assert sampled is not None
        if own.temperature == 0:
            assert sampled.token == logits.index(max(logits))
        else:
            assert behind(logits, own, sampled.token) < 1e-5
        assert (sampled.logprob is None) == (own.logprobs is None)
        assert len(sampled.top) == (own.logprobs or 0)


def test_a_vocabulary_of_a_real_size_alone_and_in_company() -> None:
    """Equal to the last bit alone and beside other rows: flat ones and peaked ones, all filters."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 3.0]).repeat(4).unsqueeze(-1)
    logits = torch.randn(12, 49157, generator=generator) * scales
    filters: list[dict[str, Any]] = [
        {},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.95, "temperature": 0.6},
        {"logprobs": 5, "top_k": 3},
        {"temperature": 0, "logprobs": 1},
        {"min_p": 0.05},
    ]
    params = [SamplingParams(**filters[i % 6], seed=i) for i in range(12)]
    alone = [seeded(logits[i : i + 1].clone(), params[i : i + 1])[0] for i in range(12)]
    for company in (range(12), range(11, -1, -1), range(3, 12, 2)):
        found = seeded(logits[list(company)], [params[i] for i in company])
        assert found == [alone[i] for i in company]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    likely = torch.tensor([0.05, 0.5, 0.0, 0.3, 0.15])
    counts = draws(likely.log().tolist(), 20_000)
    for token, p in enumerate(likely.tolist()):
        assert abs(counts[token] - 20_000 * p) <= 5 * (20_000 * p * (1 - p)) ** 0.5


def test_the_seed_minus_one_is_none_and_no_answer_gets_it() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert [SamplingParams(seed=-1, n=3).for_answer(i).seed for i in range(3)] == [None] * 3
    assert [SamplingParams(seed=-3, n=4).for_answer(i).seed for i in range(4)] == [-3, -2, 0, 1]
    last = SamplingParams(seed=2**63 - 1, n=2)
    assert [last.for_answer(i).seed for i in range(2)] == [2**63 - 1, -(2**63)]


def test_places_and_seeds_draw_independently() -> None:
    """64 seeds × 64 places, of 50 equal tokens: all are drawn alike, and neighbours by chance."""
    size, kinds = 64, 50
    flat, params = torch.zeros(size * size, kinds), [SamplingParams()] * size**2
    pairs = [Draw(seed, place) for seed in range(size) for place in range(size)]
    tokens = torch.tensor([one.token for one in sample(flat, params, pairs) if one is not None])
    counts = tokens.bincount(minlength=kinds)
    expected = size**2 / kinds
    assert ((counts - expected) ** 2 / expected).sum() < 86  # chi-square of 49, 0.999
    table = tokens.reshape(size, size)
    for one, other in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        alike = (one == other).float().mean().item()
        assert abs(alike - 1 / kinds) < 5 * (1 / kinds / one.numel()) ** 0.5


@pytest.mark.long
def test_logits_that_differ_by_rounding_draw_the_same_tokens() -> None:
    """Ranks and tensor-parallel decode round differently, here by 1e-5 of a flat distribution."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 49157, generator=generator)
    others = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    params = [SamplingParams(seed=i) for i in range(500)]
    assert seeded(others, params) == seeded(logits, params)


def test_greedy_choices_are_all_that_leaves_the_device() -> None:
    """No operation yields as much as a row, so none is copied, whatever the device."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = function(*args, **kwargs or {})
            for tensor in made if isinstance(made, tuple | list) else [made]:
                self.largest = max(self.largest, tensor.numel())
            return made

    logits = torch.randn(4, 1000)
    for temperature, most in ((0.0, 4), (1.0, 4000)):
        params = [SamplingParams(temperature=temperature)] * 4
        with Sizes() as sizes:
            seeded(logits, params)
        assert sizes.largest == most


def test_what_a_step_chose_is_taken_without_its_logits() -> None:
    rows = [[1.0, 3.0, 3.0], [0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3]
    rows.append([-math.inf, -1.0, -math.inf])
    peaks = likeliest(torch.tensor(rows)).tolist()
    assert peaks == [1, -1, -1, -1, 1]
    params = [SamplingParams(temperature=0)] * 4
    nowhere = torch.empty(5, 3, device="meta")
    found = sample(nowhere, params, [Draw(0, 0)] * 4, rows=[4, 1, 0, 4], peaks=peaks)
    assert found == [Sampled(1), None, Sampled(1), Sampled(1)]


def test_adjusted_rows_are_drawn_from_and_the_others_are_left_as_they_were() -> None:
    logits = torch.randn(5, 300)
    params = [
        SamplingParams(seed=i, logprobs=2, temperature=float(i % 3 > 0), top_k=9) for i in range(5)
    ]
    drawn = [Draw(i, 7) for i in range(5)]
    own = torch.randn(3, 300)
    found = sample(logits, params, drawn, Adjusted([0, 1, 4], own))
    plain, chosen = seeded(logits, params), seeded(own, [params[i] for i in (0, 1, 4)])
    assert found[2:4] == plain[2:4]
    logprobs = logits.log_softmax(-1)
    for i, one in zip((0, 1, 4), chosen, strict=True):
        assert found[i] is not None and one is not None
        assert found[i].token == one.token
        # What is told is the model's.
        assert found[i].logprob == logprobs[i, one.token].item()
        assert found[i].top == plain[i].top
    own[1] = -torch.inf
    again = sample(logits, params, drawn, Adjusted([0, 1, 4], own))
    assert [one is None for one in again] == [False, True, False, False, False]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.randn(4, 300)
    params = [SamplingParams(seed=i, logprobs=2, top_p=0.9) for i in range(4)]
    whole = seeded(logits, params)
    logits[2, 7] = torch.nan
    assert seeded(logits, params) == [*whole[:2], None, whole[3]]


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 5e-324])
@pytest.mark.parametrize("logits", [[1.0, 3.0, 2.0], [-1e30, 1e30, 0.0], [0.0, 5.0, 5.0]])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float, logits: list[float]) -> None:
    assert set(draws(logits, temperature=temperature)) == set(draws(logits, temperature=0)) == {1}


@pytest.mark.parametrize("top_p", [1e-50, 5e-324, 1e-7])
def test_the_likeliest_token_is_never_masked(top_p: float) -> None:
    assert set(draws([1.0, 3.0, 2.0], top_p=top_p)) == {1}
    assert set(draws([4.0, 4.0, 4.0, 0.0], top_p=top_p)) == {0}  # of equals, the first
    assert set(draws([0.0] * 1000, top_p=top_p)) == {0}
    assert set(draws([1.0, 3.0, 2.0], top_p=top_p, top_k=2)) == {1}
    assert set(draws([1.0, 3.0, 2.0], top_p=top_p, temperature=1e-40)) == {1}


def test_top_k_keeps_k_tokens_and_their_equals() -> None:
    assert set(draws([1.0, 3.0, 2.9, 2.8], top_k=1)) == {1}
    assert set(draws([1.0, 3.0, 2.9, 2.8], top_k=2)) == {1, 2}
    assert set(draws([3.0, 3.0, 3.0, -9.0], top_k=1)) == {0, 1, 2}
    for everything in (-1, 0, 3, 2**63 - 1):
        assert set(draws([1.0, 1.0, 1.0], top_k=everything)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits", [[0.0, torch.nan], [torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]]
)
def test_what_is_no_distribution_has_no_token(logits: list[float], temperature: float) -> None:
    assert set(draws(logits, temperature=temperature)) == {None}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", 25.0, "max_tokens must be an integer or none, got 25.0"),
        ("max_tokens", True, "max_tokens must be an integer or none, got True"),
        ("max_tokens", "8", "max_tokens must be an integer or none, got '8'"),
        ("max_tokens", np.int64(8), "max_tokens must be an integer or none, got np.int64"),
        (
            "max_tokens",
            2**63,
            "max_tokens must be at most 9223372036854775807, got",
        ),
        ("top_k", 2.0, "top_k must be an integer, got 2.0"),
        ("top_k", None, "top_k must be an integer, got None"),
        ("top_k", 2**63, "top_k must be at most 9223372036854775807"),
        ("seed", 1.5, "seed must be an integer or none, got 1.5"),
        ("seed", False, "seed must be an integer or none, got False"),
        ("seed", 2**64, "seed must be at most 9223372036854775807, got 18446744073709551616"),
        ("seed", -(2**63) - 1, "seed must be at least -9223372036854775808"),
        ("logprobs", True, "logprobs must be an integer or none, got True"),
        ("logprobs", 1.0, "logprobs must be an integer or none, got 1.0"),
        ("prompt_logprobs", "1", "prompt_logprobs must be an integer or none, got '1'"),
        ("temperature", "1", "temperature must be a number, got '1'"),
        ("temperature", None, "temperature must be a number, got None"),
        ("temperature", True, "temperature must be a number, got True"),
        ("temperature", float("nan"), "temperature must be a finite number, got nan"),
        ("top_p", [0.5], r"top_p must be a number, got \[0.5\]"),
        ("top_p", float("nan"), "top_p must be a finite number, got nan"),
        ("top_p", 0, "top_p must be greater than 0, got 0"),
        ("n", 0, "n must be at least 1, got 0"),
        ("n", 2.0, "n must be an integer, got 2.0"),
        ("min_p", 1.5, "min_p must be at most 1, got 1.5"),
        ("min_p", None, "min_p must be a number, got None"),
        ("presence_penalty", -2.1, "presence_penalty must be at least -2, got -2.1"),
        ("frequency_penalty", float("nan"), "frequency_penalty must be a finite number, got nan"),
        ("repetition_penalty", 0.0, "repetition_penalty must be at least 0.01, got 0.0"),
        ("logit_bias", [5], "logit_bias must be a mapping of token ids to numbers"),
        ("logit_bias", {"5": 1}, "a mapping of token ids to numbers, got the key '5'"),
        ("logit_bias", {2**63: 1}, "a mapping of token ids to numbers, got the key 92233720368"),
        ("logit_bias", {5: 1, 7: "1"}, r"logit_bias\[7\] must be a number, got '1'"),
        ("logit_bias", {5: None}, r"logit_bias\[5\] must be a number, got None"),
        ("logit_bias", {5: float("nan")}, r"logit_bias\[5\] must be a finite number, got nan"),
        ("logit_bias", {5: 101}, r"logit_bias\[5\] must be at most 100, got 101"),
        ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
        ("stop", 5, "stop must be a string or a list of strings, got 5"),
        ("stop", ["a", 5], "stop must be a string or a list of strings"),
        ("stop", b"ab", "stop must be a string or a list of strings"),
        ("stop", ["a", "\ud83d"], "stop must be text without a lone surrogate"),
        ("stop", ["a", ""], "stop must be a non-empty string, got ''"),
        ("stop", ["a"] * 65, "stop must be a list of at most 64, got 65"),
        ("stop", "a" * 1001, "stop must be a string of at most 1000 characters, got"),
        ("stop_token_ids", [5] * 1025, "stop_token_ids must be a list of at most 1024, got 1025"),
        ("stop_token_ids", 5, "stop_token_ids must be a list of token ids, got 5"),
        ("stop_token_ids", [5, "6"], r"stop_token_ids\[1\] must be an integer, got '6'"),
        ("stop_token_ids", [1.0], r"stop_token_ids\[0\] must be an integer, got 1.0"),
        ("stop_token_ids", [True], r"stop_token_ids\[0\] must be an integer, got True"),
        ("stop_token_ids", [2**63], r"stop_token_ids\[.\] must be at most 9223372036854775807"),
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
        stop=["a"],
        stop_token_ids=[2**63 - 1],
        logprobs=20,
        n=128,
        logit_bias={5: -100, 2**31: 0.5},
    )
    assert decoder(SamplingParams)(encode(params)[HEADER_SIZE:]) == params


def test_a_token_of_weight_0_is_never_drawn() -> None:
    """With this seed token 7 has the highest of 2**53 numbers, which is rounded to 1."""
    params = SamplingParams(temperature=1.0, top_k=1)
    logits = torch.zeros(1, 50).index_fill(1, torch.tensor([3]), 20.0)
    assert sample(logits, [params], [Draw(2154564929011574057, 0)]) == [Sampled(3)]
