"""The project's strongest claim: logits depend on the prompt and the settings alone.

Not on the number of ranks, nor on how the prompt was cut, nor on whether a token came from prefill
or decode. And they are the right ones: stock transformers' with every head a retrieval head, the
literal definition's with streaming heads.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.models.registry import resolve_model
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.zigzag import chunks
from razor_dist.protocol.step_plan import Fork, Open
from tests import tiny_models
from tests.cases import Case, all_full, logits_of, make_runner, model_and_shape, one_chunk
from tests.logits import (
    GROWING,
    POLICY,
    assert_any_cut,
    assert_same,
    literal_logits,
    split_of,
    stock_logits,
    tokens_of,
    windows_of,
)
from tests.ranks import Ranks
from tests.tiny_models import Tiny

WORLDS = (1, 2, 4, 8)
CUTS = (8192, 64, 37)
# Of `tests.tiny_models`: those that are tested on every number of ranks.
FAMILIES = ("llama", "qwen2", "qwen3_moe", "mistral", "glm")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in ("llama", "qwen3_moe") else pytest.mark.long)
        for name in FAMILIES
    ],
)
def test_logits_do_not_depend_on_ranks_cuts_or_phase(family: str, ranks: Ranks, tiny: Tiny) -> None:
    n, tokens, path = 181, tokens_of(188), tiny(family)
    case = Case(str(path), split_of(path), POLICY, tokens[:n], tokens[n:])
    want = ranks(1).run(logits_of, case)[0]
    # Chunks are cut alike for all families: one has them all.
    cuts = CUTS if family == "llama" else (8192, 37)
    assert_any_cut(ranks, case, want, WORLDS, cuts)
    whole = dataclasses.replace(case, prompt=tokens, forced=())
    assert_any_cut(ranks, whole, want[-1:], WORLDS, cuts)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_all_retrieval_is_stock_transformers(family: str, ranks: Ranks, tiny: Tiny) -> None:
    n, tokens, path = 150, tokens_of(155, seed=1), tiny(family)
    case = Case(str(path), all_full(path), POLICY, tokens[:n], tokens[n:], chunked_prefill_size=64)
    stock = [stock_logits(path, tokens, attention)[n - 1 :] for attention in ("sdpa", "eager")]
    for world in (1, 4) if family in FAMILIES else (2,):
        got = ranks(world).run(logits_of, case)[0]
        for want in stock:
            assert_same(got, want)
    assert model_and_shape(str(path))[0].config._attn_implementation == "razor"


@pytest.mark.parametrize(
    ("family", "compensation"),
    [*((name, True) for name in tiny_models.FAMILIES), *((name, False) for name in FAMILIES)],
)
def test_streaming_heads_are_the_literal_definition(
    family: str, compensation: bool, ranks: Ranks, tiny: Tiny
) -> None:
    n, tokens, path = 120, tokens_of(124, seed=2), tiny(family)
    policy = dataclasses.replace(GROWING, compensation=compensation)
    split = split_of(path)
    want = literal_logits(path, tokens, split, policy)[n - 1 :]
    case = Case(str(path), split, policy, tokens[:n], tokens[n:], chunked_prefill_size=50)
    assert_any_cut(ranks, case, want, (1, 2))
    full = dataclasses.replace(case, retrieval=all_full(path))
    assert not torch.allclose(ranks(2).run(logits_of, full)[0], want, rtol=1e-3, atol=1e-3)
    if not compensation:
        compensated = literal_logits(path, tokens, split, GROWING)[n - 1 :]
        assert not torch.allclose(compensated, want, rtol=1e-3, atol=1e-3)


def test_windows_by_head_keep_sinks_and_compensation(ranks: Ranks, tiny: Tiny) -> None:
    n, tokens, path = 120, tokens_of(124, seed=2), tiny("llama")
    split = split_of(path)
    windows = windows_of(split)
    want = literal_logits(path, tokens, split, POLICY, windows)[n - 1 :]
    case = Case(
        str(path), split, POLICY, tokens[:n], tokens[n:], chunked_prefill_size=50, windows=windows
    )
    for tensor in (False, True):
        assert_any_cut(ranks, dataclasses.replace(case, tensor=tensor), want, (1, 2, 4))


def test_exact_prefill_is_full_attention_until_the_prompt_ends(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    tokens = tokens_of(140, seed=4)
    case = Case(str(path), split_of(path), POLICY, tokens, exact=True, chunked_prefill_size=60)
    assert_any_cut(ranks, case, stock_logits(path, tokens)[-1:], (1, 4))


def forked_logits(comm: Communicator, case: Case, ends: tuple[int, ...]) -> torch.Tensor | None:
    """Rank 0's logits of the last prompt token, the prompt read in parts by forks of forks."""
    runner = make_runner(comm, case, sequences=len(ends))
    total, cut = len(case.prompt), case.chunked_prefill_size
    logits = None
    for key, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
        opened = Fork(key, begin, end, total, key - 1) if key else Open(key, end, total, total)
        runner.execute(opened)
        for chunk in chunks(begin, end, cut, comm.size):
            tokens = case.prompt[chunk.begin : chunk.end]
            logits = runner.execute(one_chunk(key, tokens, last=chunk.end == end))
    return None if logits is None else logits.clone()


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "tensor"), [(1, False), (3, False), (5, False), (2, True), (8, True)]
)
def test_a_prompt_read_by_forks_of_forks_is_the_whole_prompt(
    world: int, tensor: bool, ranks: Ranks, tiny: Tiny
) -> None:
    path = tiny("llama")
    base = Case(str(path), split_of(path), POLICY, tokens_of(190, seed=9), page_size=8)
    want = ranks(1).run(logits_of, base)[0]
    case = dataclasses.replace(base, chunked_prefill_size=19, tensor=tensor)
    for ends in ((101, 190), (3, 95, 190), (7, 95, 190), (150, 151, 190)):
        assert_same(ranks(world).run(forked_logits, case, ends)[0], want)


@st.composite
def policies(draw: st.DrawFn) -> StreamingPolicy:
    low = draw(st.integers(1, 24))
    return StreamingPolicy(
        window_min=low,
        window_ratio=draw(st.none() | st.integers(1, 8)),
        window_max=draw(st.none() | st.integers(low, 40)),
        sinks=draw(st.integers(0, 9)),
        block=draw(st.sampled_from([1, 2, 3, 8, 16])),
        compensation=draw(st.booleans()),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[StreamingPolicy, int, int, int, int, bool, int]:
    policy = draw(policies())
    prompt = draw(st.integers(1, 90))
    forced = draw(st.integers(0, 6))
    cut = draw(st.sampled_from([8192, 1, 5, 17, 40]) if prompt < 30 else st.integers(12, 100))
    return (
        policy,
        prompt,
        forced,
        cut,
        draw(st.integers(0, 99)),
        draw(st.booleans()),
        draw(st.sampled_from([2, 3, 8])),
    )


@settings(
    max_examples=45,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(run=runs())
def test_any_settings_any_length_any_cut(
    run: tuple[StreamingPolicy, int, int, int, int, bool, int], ranks: Ranks, tiny: Tiny
) -> None:
    policy, n, k, cut, seed, exact, world = run
    path = tiny("llama")
    tokens = tokens_of(n + k, seed)
    base = Case(
        str(path), split_of(path, seed), policy, tokens[:n], tokens[n:], exact=exact, page_size=3
    )
    want = ranks(1).run(logits_of, base)[0]
    got = ranks(world).run(logits_of, dataclasses.replace(base, chunked_prefill_size=cut))[0]
    assert_same(got, want)


@pytest.mark.long
def test_embedded_model_on_several_ranks(ranks: Ranks) -> None:
    path = str(resolve_model("smollm2"))
    split = HeadMap.load(shipped_head_map("smollm2")).retrieval
    policy = StreamingPolicy(window_min=24, window_ratio=5, sinks=4, block=8)
    generator = torch.Generator().manual_seed(7)
    tokens = tuple(torch.randint(20, 49000, (163,), generator=generator).tolist())
    case = Case(
        path, tuple(map(tuple, split)), policy, tokens[:160], tokens[160:], chunked_prefill_size=57
    )
    want = ranks(1).run(logits_of, dataclasses.replace(case, chunked_prefill_size=8192))[0]
    assert_any_cut(ranks, case, want, (2, 8))
    assert_any_cut(ranks, dataclasses.replace(case, prompt=tokens, forced=()), want[-1:], (2, 8))


def test_embedded_model_with_all_heads_full_is_stock(ranks: Ranks) -> None:
    path = str(resolve_model("smollm2"))
    generator = torch.Generator().manual_seed(8)
    tokens = tuple(torch.randint(20, 49000, (300,), generator=generator).tolist())
    case = Case(path, ((True,) * 3,) * 30, POLICY, tokens[:296], tokens[296:])
    assert_any_cut(ranks, case, stock_logits(path, tokens)[295:], (1, 4))
