"""Dual chunk attention is its definition, on any number of ranks and however a text is read.

The literal reference gets queries and keys unrotated, because transformers is given position 0 for
every token, and rotates them pair by pair as the definition says. It shares no code with the
package.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from razor_dist import LLM, SamplingParams
from razor_dist.config.errors import ConfigError
from razor_dist.identify.razor import RazorSettings, probe
from razor_dist.kernels.quantized import INT4, INT8
from razor_dist.models.loader import load_model
from tests.cases import Case, logits_of
from tests.engine.test_drafts import in_runs
from tests.engine.test_sources import traced
from tests.literal import window_start
from tests.logits import (
    POLICY,
    assert_any_cut,
    assert_same,
    register,
    split_of,
    stock_logits,
    tokens_of,
)
from tests.prefix.test_logits import TEXTS as HISTORY
from tests.prefix.test_logits import assert_as_fresh
from tests.ranks import Ranks
from tests.test_short_steps import CHUNKS, STEPS, TEXTS, Company, assert_same_as_alone
from tests.tiny_models import Tiny

# Chunks of 40 tokens, the last 8 of which a chunk's first tokens see at their own distance.
SIZE, LOCAL, ORIGINAL = 48, 8, 48
FIELDS = {"chunk_size": SIZE, "local_size": LOCAL, "original_max_position_embeddings": ORIGINAL}
LITERAL = dataclasses.asdict(POLICY)
NAME = "literal_dual_chunk"


@pytest.fixture(scope="module")
def dual(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-1M of small chunks."""
    folder = tmp_path_factory.mktemp("dual") / "model"
    shutil.copytree(tiny("qwen2_1m"), folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["dual_chunk_attention_config"] = FIELDS
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def rotated(x: Tensor, positions: list[int], frequencies: Tensor) -> Tensor:
    """Vectors ``[n, D]`` at n positions, dimension i turned with dimension i + D / 2."""
    a, b = x.chunk(2, -1)
    angles = torch.tensor(positions)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def literal_head(
    q: Tensor, k: Tensor, v: Tensor, scale: float, frequencies: Tensor, literal: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Outputs ``[N, D]``, and weights ``[N, N]`` of a head that sees all; everything float64."""
    chunk, n, sinks = SIZE - LOCAL, len(q), literal["sinks"]
    keys = rotated(k, [j % chunk for j in range(n)], frequencies)
    out, weights = torch.empty_like(q), torch.zeros(n, n, dtype=q.dtype)
    for i in range(n):
        rest, own = i % chunk, i // chunk
        intra, succ, inter = rest, min(rest + chunk, SIZE), min(2 * chunk - 1, SIZE)
        queries = rotated(q[i].expand(3, -1), [intra, succ, inter], frequencies)
        # YaRN's temperature for a context of i + 1 tokens: 1 / t = (0.1 ln s + 1)².
        s = max(1.0, (i + 1) / ORIGINAL)
        times = scale * (0.1 * math.log(s) + 1) ** 2
        start = window_start(i, literal)
        streams = literal["streams"] and start > sinks
        seen = [*range(sinks), *range(start, i + 1)] if streams else [*range(i + 1)]
        of_key = [min(own - j // chunk, 2) for j in seen]
        scores, values = times * (queries[of_key] * keys[seen]).sum(-1), v[seen]
        if streams:
            # The compensation token stands where the sinks do, in the first chunk.
            mean = times * (queries[min(own, 2)] @ keys[sinks:start].mean(0))
            scores = torch.cat([scores, mean[None] + math.log(start - sinks)])
            values = torch.cat([values, v[sinks:start].mean(0)[None]])
        of_seen = torch.softmax(scores, 0)
        out[i] = of_seen @ values
        if not streams:
            weights[i, : i + 1] = of_seen
    return out, weights


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, given: dict[str, Any]) -> Tensor:
    literal, layer = given["literal"], given["layer"]
    of_head = {**LITERAL, "streams": not literal["retrieval"][layer][given["head"]]}
    heads = [literal_head(of_one, k, v, scaling, literal["frequencies"], of_head) for of_one in q]
    outs, weights = zip(*heads, strict=True)
    literal["weights"].setdefault(layer, []).extend(weights)
    return torch.stack(outs)


register(NAME, _attend)


def literal_run(
    path: Path, tokens: tuple[int, ...], retrieval: tuple[tuple[bool, ...], ...]
) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """Logits ``[N, V]``, and by layer and head the weights ``[N, N]`` of retrieval heads."""
    rotary = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb
    literal: dict[str, Any] = {
        "retrieval": retrieval,
        "frequencies": rotary.inv_freq.double(),
        "weights": {},
    }
    unrotated = torch.zeros(1, len(tokens), dtype=torch.int64)
    logits = stock_logits(path, tokens, NAME, position_ids=unrotated, literal=literal)
    return logits, literal["weights"]


EVERY = ((True, True),) * 3
# Where keys are the same bits however a text is read, so that all are rounded alike.
FIRST_LAYER = ((True, True), (False, False), (False, False))


@pytest.mark.long
@pytest.mark.parametrize("heads", ["retrieval", "both"])
def test_it_is_the_definition(heads: str, dual: Path, ranks: Ranks) -> None:
    n, k = 157, 6  # the answer goes on into the fifth chunk
    tokens = tokens_of(n + k, seed=1)
    retrieval = EVERY if heads == "retrieval" else split_of(dual)
    want, _ = literal_run(dual, tokens, retrieval)
    case = Case(str(dual), retrieval, POLICY, tokens[:n], tokens[n:])
    assert_any_cut(ranks, case, want[n - 1 :], (1, 2, 4, 8), (37,))
    assert_any_cut(ranks, case, want[n - 1 :], (4,))


def test_it_is_ordinary_attention_within_a_chunk(dual: Path, tiny: Tiny, ranks: Ranks) -> None:
    tokens = tokens_of(60, seed=2)
    case = Case(str(dual), split_of(dual), POLICY, tokens[:38], tokens[38:])
    got, want = (
        ranks(2).run(logits_of, dataclasses.replace(case, model=str(path)))[0]
        for path in (dual, tiny("qwen2_1m"))
    )
    # The second chunk's first tokens see the one before at its own distance still: up to 48 tokens.
    assert_same(got[:11], want[:11])
    assert (got[-1] - want[-1]).abs().max() > 1e-3 * want.abs().max()


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "worlds"),
    [
        ({}, (1, 2, 4, 8)),
        ({"tensor": True}, (2, 8)),
        ({"exact": True}, (4,)),
        ({"kv_dtype": torch.bfloat16}, (2,)),
        ({"kv_dtype": INT8, "tensor": True, "retrieval": FIRST_LAYER}, (2,)),
        ({"kv_dtype": INT4, "retrieval": FIRST_LAYER}, (2,)),
        ({"windows": ((9, None), (None, 9), (9, 9))}, (1, 2)),
    ],
    ids=["plain", "tensor", "exact", "bfloat16", "int8", "int4", "windows"],
)
def test_what_shares_a_step_changes_nothing(
    settings: dict[str, Any], worlds: tuple[int, ...], dual: Path, ranks: Ranks
) -> None:
    case = dataclasses.replace(Case(str(dual), split_of(dual, 3), POLICY, ()), **settings)
    # A key within rounding of the middle of two stored values may be stored as either.
    tolerance = 3e-3 if "kv_dtype" in settings else 1e-4
    assert_same_as_alone(Company(case, TEXTS, CHUNKS, STEPS), ranks, *worlds, tolerance=tolerance)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "tensor"), [(1, False), (2, False), (4, True), (8, False), (8, True)]
)
def test_a_prefix_hit_is_a_fresh_read(world: int, tensor: bool, dual: Path, ranks: Ranks) -> None:
    case = Case(str(dual), split_of(dual), POLICY, (), page_size=4, tail=30, tensor=tensor)
    assert_as_fresh(ranks, world, case, HISTORY)


@pytest.mark.parametrize("world", [1, 4])
def test_sources_are_the_definitions_weights(world: int, dual: Path, ranks: Ranks) -> None:
    text = tokens_of(130)
    case = Case(str(dual), EVERY, POLICY, text[:125], text[125:128], tail=64)
    heads = [(2, 0), (1, 9)]
    _, weights = literal_run(dual, text[:128], EVERY)
    for row, (positions, found) in enumerate(ranks(world).run(traced, case, heads)[0], 125):
        for head, (layer, of) in enumerate(heads):
            want = weights[layer][of][row].float()
            torch.testing.assert_close(found[head], want.topk(8).values, atol=1e-4, rtol=0)
            torch.testing.assert_close(found[head], want[positions[head]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_drafts_are_verified_as_they_would_be_read(world: int, dual: Path, ranks: Ranks) -> None:
    text = tokens_of(100)
    case = Case(str(dual), split_of(dual), POLICY, text[:70], text[70:], tail=20)
    alone, found = ranks(world).run(in_runs, case, (8, 3, 1, 5))[0]
    torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_answers_go_on_beyond_recorded_steps(dual: Path, tmp_path: Path) -> None:
    """Steps of the first chunk are recorded; a stored prefix continues in another process."""
    ids = list(tokens_of(20, seed=5))
    settings = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {
        "model": str(dual),
        "attention": "full",
        "max_model_len": 100,
        "page_size": 8,
        "prefix_store": str(tmp_path / "store"),
    }
    with LLM(**options) as llm:
        answer = list(llm.generate({"prompt_token_ids": ids}, settings)[0].outputs[0].token_ids)
    logits = literal_run(dual, tuple(ids + answer), EVERY)[0][19:-1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < 1e-4 * logits.abs().max()  # some are nearly alike
    with LLM(**options) as llm:
        longer = {"prompt_token_ids": ids + answer[:60]}
        again = llm.generate(longer, dataclasses.replace(settings, max_tokens=10))[0]
    assert again.num_cached_tokens > 40
    assert list(again.outputs[0].token_ids) == answer[60:]


def test_heads_are_found_within_a_chunk(dual: Path) -> None:
    model = load_model(dual, device=torch.device("cpu"), dtype=torch.float32)
    vocabulary = torch.arange(3, 190)
    assert probe(model, vocabulary, RazorSettings(tokens=10, repeats=4)).tokens == 10
    with pytest.raises(ConfigError, match=r"longer than one chunk .*, 40 tokens"):
        probe(model, vocabulary, RazorSettings(tokens=30, repeats=4))
