"""The weights that sources are made of are the model's own attention, wherever the keys lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from razor_dist.attention.sources import TOP, scores_of
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.heads.sources import strongest_heads
from razor_dist.kernels.quantized import INT4, INT8, quantize
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.step_plan import BatchEntry, Compute, Fork, Open
from tests.cases import Case, make_runner, model_and_shape, one_chunk, prefill
from tests.logits import GROWING, stock_run, tokens_of
from tests.ranks import Ranks
from tests.tiny_models import Tiny

Found = list[tuple[Tensor, Tensor]]


def traced(comm: Communicator, case: Case, heads: list[tuple[int, int]]) -> Found:
    """Rank 0's positions and weights for each forced token, in company, from two chunks on."""
    runner = make_runner(comm, case, 3, source_heads=heads)
    prefill(runner, 0, case)
    # A second sequence that asks nothing, and a fork of the first one before its end that asks.
    runner.execute(Open(1, end=0, total=len(case.prompt), max_read=len(case.prompt)))
    cut = len(case.prompt) - 1
    total = len(case.prompt) + len(case.forced)
    fork = Fork(2, begin=cut, end=cut, total=total, source=0)
    runner.execute(fork)
    runner.execute(Compute.of([BatchEntry(1, case.prompt[:7])]))
    runner.execute(Compute.of([BatchEntry(2, case.prompt[cut:])]))
    found: Found = []
    for at, token in enumerate(case.forced):
        asking = [BatchEntry(key, [token], sources=True) for key in (0, 2)]
        company = BatchEntry(1, case.prompt[7 + at : 8 + at])
        runner.execute(Compute.of([company, *asking]))
        assert set(runner.sources) == ({0, 2} if comm.rank == 0 else set())
        if comm.rank == 0:
            (told,) = runner.sources[0]
            assert torch.equal(told.positions, runner.sources[2][0].positions)
            torch.testing.assert_close(told.weights, runner.sources[2][0].weights)
            found.append((told.positions, told.weights))
    sent = comm.bytes_sent["sources"]
    runner.execute(Compute.of([BatchEntry(1, [1])]))
    assert not runner.sources and comm.bytes_sent["sources"] == sent
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "glm"])
def test_they_are_those_of_stock_attention(family: str, ranks: Ranks, tiny: Tiny) -> None:
    path = tiny(family)
    _, shape = model_and_shape(str(path))
    text = tokens_of(150)
    case = Case(
        str(path),
        ((True,) * shape.kv_heads,) * shape.layers,
        GROWING,
        text[:140],
        text[140:143],
        chunked_prefill_size=48,
        tail=64,
    )
    heads = [(shape.layers - 1, 0), (0, shape.query_heads - 1), (1, 2), (1, 3)]
    weights = stock_run(path, text[:143], output_attentions=True).attentions
    for world in (1, 2, 4, 8) if family == "llama" else (1, 8):
        found = ranks(world).run(traced, case, heads)[0]
        assert len(found) == 3
        for row, (positions, told) in enumerate(found, 140):
            for head, (layer, of) in enumerate(heads):
                want = weights[layer][0, of, row]
                torch.testing.assert_close(told[head], want.topk(TOP).values, atol=1e-4, rtol=0)
                torch.testing.assert_close(told[head], want[positions[head]], atol=1e-4, rtol=0)


def test_they_are_those_of_a_bias_by_distance(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("bloom")
    _, shape = model_and_shape(str(path))
    text = tokens_of(60)
    every = ((True,) * shape.kv_heads,) * shape.layers
    case = Case(str(path), every, GROWING, text[:50], text[50:52], tail=64)
    weights = stock_run(path, text[:52], output_attentions=True).attentions
    for world in (1, 4):
        for row, (positions, told) in enumerate(ranks(world).run(traced, case, [(1, 1)])[0], 50):
            want = weights[1][0, 1, row][positions[0]]
            torch.testing.assert_close(told[0], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("codes", [INT8, INT4])
def test_scores_of_codes_are_those_of_what_they_hold(codes: torch.dtype) -> None:
    q, keys = torch.randn(64), quantize(torch.randn(1, 90, 64), codes)
    want = keys.to(torch.float32)
    torch.testing.assert_close(scores_of(q, keys), scores_of(q, want), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores_of(q, want), want[0] @ q, atol=1e-5, rtol=1e-5)


def test_a_short_context_has_fewer_positions(tiny: Tiny) -> None:
    path = tiny("llama")
    _, shape = model_and_shape(str(path))
    case = Case(str(path), ((True,) * shape.kv_heads,) * shape.layers, GROWING, (5, 6, 7))
    runner = make_runner(Communicator(None), case, source_heads=[(0, 0)])
    runner.execute(Open(0, end=2, total=3, max_read=3))
    runner.execute(one_chunk(0, (5, 6), last=True))
    runner.execute(Compute.of([BatchEntry(0, [7], sources=True)]))
    (told,) = runner.sources[0]
    assert sorted(told.positions[0].tolist()) == [-1] * (TOP - 3) + [0, 1, 2]
    assert told.weights.sum() == pytest.approx(1)
    assert sum(weight for _, weight in told.merged()) == pytest.approx(1)


def test_the_strongest_heads_are_those_of_the_largest_scores() -> None:
    head_map = HeadMap.load(shipped_head_map("smollm2"))
    table = head_map.scores["induction"]
    chosen = strongest_heads(head_map, 4)
    assert all(head_map.retrieval[layer][head // 3] for layer, head in chosen)
    # Its retrieval heads hold the best ones of all.
    best = sorted((score for row in table for score in row), reverse=True)[:4]
    assert [table[layer][head] for layer, head in chosen] == best
    duo = HeadMap.load(shipped_head_map("smollm2-duo"))
    (layer, first), *others = strongest_heads(duo, 3)
    assert others == [(layer, first + 1), (layer, first + 2)]
    gates = duo.kv_scores["gate"]
    assert gates[layer][first // 3] == max(max(row) for row in gates)
