"""Bytes between ranks: measured against the arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.parallel.comm import Communicator, Pending
from tests.cases import Case, all_full, answer, make_runner, model_and_shape, prefill
from tests.ranks import Ranks
from tests.tiny_models import Tiny

WORLD = 8
POLICY = StreamingPolicy(window_min=32, window_ratio=None, sinks=4, block=16)
DIM, ITEM = 16, 4


def traffic(comm: Communicator, case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes this rank sends, by purpose: in prefill, and in the decode steps after it."""
    runner = make_runner(comm, case)
    comm.bytes_sent.clear()
    prefill(runner, 0, case)
    after_prefill = dict(comm.bytes_sent)
    for token in case.forced:
        runner.execute(answer((0, token)))
    decode = {p: n - after_prefill.get(p, 0) for p, n in comm.bytes_sent.items()}
    return after_prefill, {p: n for p, n in decode.items() if n}


def total(results: list[tuple[dict[str, int], dict[str, int]]], phase: int, purpose: str) -> int:
    return sum(result[phase].get(purpose, 0) for result in results)


def test_prefill_moves_the_retrieval_fraction_of_the_full_ring(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    _, shape = model_and_shape(str(path))
    n = 640
    tokens = tuple(torch.randint(3, 190, (n,), generator=torch.manual_seed(0)).tolist())
    full = all_full(path)
    razor = ((True, False), (False, False), (False, True), (False, False))
    pool = ranks(WORLD)
    in_full = pool.run(traffic, Case(str(path), full, POLICY, tokens))
    in_razor = pool.run(traffic, Case(str(path), razor, POLICY, tokens))

    per_token = 2 * shape.layers * shape.kv_heads * DIM * ITEM
    assert total(in_full, 0, "ring") == n * per_token * (WORLD - 1)
    fraction = 2 / 8
    ring = total(in_razor, 0, "ring")
    assert abs(ring - fraction * total(in_full, 0, "ring")) <= 0.05 * ring
    assert total(in_full, 0, "halo") == 0

    # Every chunk fetches what its window needs from other ranks, and at the end every rank gets
    # the window: never more than 2P windows and P windows of L + B - 1 tokens.
    streaming_per_token = 2 * 6 * DIM * ITEM
    halo = total(in_razor, 0, "halo")
    assert 0 < halo <= 3 * WORLD * (32 + 15) * streaming_per_token
    assert total(in_razor, 0, "sinks") == 4 * (WORLD - 1) * streaming_per_token


def test_decode_of_a_model_without_retrieval_heads_sends_nothing(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    _, shape = model_and_shape(str(path))
    tokens = tuple(range(3, 103))
    none = ((False,) * shape.kv_heads,) * shape.layers
    case = Case(str(path), none, POLICY, tokens[:90], tokens[90:])
    for _, decode in ranks(WORLD).run(traffic, case):
        assert decode == {}


def test_decode_gathers_out_and_lse_in_layers_with_retrieval_heads_only(
    ranks: Ranks, tiny: Tiny
) -> None:
    path = tiny("llama")
    _, shape = model_and_shape(str(path))
    tokens = tuple(range(3, 103))
    one = ((False, False), (True, False), (False, False), (False, False))
    case = Case(str(path), one, POLICY, tokens[:90], tokens[90:])
    for _, decode in ranks(WORLD).run(traffic, case):
        packed = shape.group * (DIM + 1) * 4
        assert decode == {"merge": 10 * (WORLD - 1) * packed}
    two = dataclasses.replace(case, retrieval=((True, True), *one[1:]))
    for _, decode in ranks(WORLD).run(traffic, two):
        assert decode["merge"] == 10 * 3 * (WORLD - 1) * packed


def test_queries_travel_when_that_moves_less(ranks: Ranks, tiny: Tiny) -> None:
    """A short chunk after a long past: pass-Q beats moving the past's keys and values."""
    path = tiny("llama")
    _, shape = model_and_shape(str(path))
    tokens = tuple(torch.randint(3, 190, (650,), generator=torch.manual_seed(1)).tolist())
    full = all_full(path)
    pool = ranks(4)
    whole = pool.run(traffic, Case(str(path), full, POLICY, tokens[:640], chunked_prefill_size=640))
    then = pool.run(traffic, Case(str(path), full, POLICY, tokens, chunked_prefill_size=640))
    more = total(then, 0, "ring") - total(whole, 0, "ring")
    rows = shape.layers * shape.kv_heads * shape.group
    queries = 10 * rows * (DIM * ITEM + (DIM + 1) * 4) * 3
    own_ring = 10 * shape.layers * shape.kv_heads * 2 * DIM * ITEM * 3
    assert more == queries + own_ring
    assert more < 640 * shape.layers * shape.kv_heads * 2 * DIM * ITEM * 3


def largest_messages(comm: Communicator, case: Case) -> dict[str, int]:
    """Bytes of the largest message between two ranks in a prefill, by purpose."""
    runner, exchange = make_runner(comm, case), comm.exchange
    largest: dict[str, int] = {}

    def noting(sends: Any, receives: Any, purpose: Any) -> Pending:
        sizes = [tensor.nbytes for _, tensor in sends]
        largest[purpose] = max([largest.get(purpose, 0), *sizes])
        return exchange(sends, receives, purpose)

    comm.exchange = noting
    try:
        prefill(runner, 0, case)
    finally:
        del comm.exchange  # the class's again
    return largest


def test_no_message_grows_with_the_prompt(ranks: Ranks, tiny: Tiny) -> None:
    """Earlier keys travel until they outweigh the queries, and never again."""
    path = tiny("llama")
    world, chunk, group = 2, 64, 4
    razor = ((True, False), (False, False), (False, True), (False, False))
    rows: list[dict[str, int]] = []
    for chunks in (2, 8, 16, 32):
        tokens = torch.randint(3, 190, (chunks * chunk,), generator=torch.manual_seed(0)).tolist()
        case = Case(str(path), razor, POLICY, tuple(tokens), chunked_prefill_size=chunk)
        results = ranks(world).run(largest_messages, case)
        rows.append({p: max(result[p] for result in results) for p in results[0]})
    # Keys and values of one retrieval head; what `queries_travel` compares, in units of those.
    own = chunk // world * 2 * DIM * ITEM
    queries = group * (DIM * ITEM + 4 * (DIM + 1)) / (2 * DIM * ITEM)
    assert rows[0]["ring"] == 2 * own
    assert rows[1] == rows[2] == rows[3]
    assert rows[3]["ring"] <= (1 + queries) * own
