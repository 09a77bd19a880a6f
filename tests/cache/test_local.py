"""The streaming cache's slots: what a query sees is what the policy says, and nothing else."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.cache.streaming import Arena, StreamingCache, StreamingSlot, _shares
from razor_dist.kernels import HIDDEN, attend
from tests.test_policy import policies

ALL = slice(0, 1)


def make_cache(
    policy: StreamingPolicy,
    longest: int,
    dim: int = 2,
    queries: torch.dtype = torch.float32,
    tail: int = 0,
) -> StreamingCache:
    """Room for two sequences; what nobody has written or cleared is NaN."""
    arena, device = Arena.of(policy, queries, longest, 2, tail), torch.device("cpu")
    cache = StreamingCache(1, 2, arena, dim, dtype=torch.float32, device=device)
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    return cache


def keys(cache: StreamingCache, slot: StreamingSlot, width: int) -> torch.Tensor:
    """First coordinates of the keys in the slot's first places."""
    return cache.view(ALL, slot, width)[0][0, :, 0]


def visible(cache: StreamingCache, slot: StreamingSlot, position: int) -> torch.Tensor:
    """The bias over the slot, of which a longer one shows the same and nothing more."""
    at, start = torch.tensor([position, cache.policy.start(position)])
    width, whole = cache.width(slot, position + 1), cache.width(slot, slot.capacity)
    bias = cache.visibility(slot, width, at, start)
    longer = cache.visibility(slot, whole, at, start)
    assert torch.equal(longer[:width], bias)
    assert (longer[width:] == HIDDEN).all()
    return bias


def decoded(cache: StreamingCache, slot: StreamingSlot, values: torch.Tensor) -> None:
    """Read tokens ``[0, n)`` one by one, with keys ``[n, D]`` and their negatives as values."""
    for position, value in enumerate(values):
        start = max(cache.policy.sinks, cache.policy.start(position))
        if start > slot.start:
            cache.drop(slot, start)
        at = cache.indices(slot, position, position + 1)
        cache.write(ALL, slot, at, value.view(1, 1, -1), -value.view(1, 1, -1))


def read_positions(cache: StreamingCache, slot: StreamingSlot, length: int) -> None:
    """Read tokens whose keys are their positions: it can be seen which are there."""
    decoded(cache, slot, torch.arange(float(length))[:, None].expand(-1, 2))


@settings(max_examples=80, deadline=None)
@given(policy=policies(), length=st.integers(1, 150))
def test_a_decoded_sequence_leaves_what_the_policy_keeps(
    policy: StreamingPolicy, length: int
) -> None:
    cache = make_cache(policy, length)
    slot = cache.allocate(length)
    read_positions(cache, slot, length)
    last = length - 1
    bias = visible(cache, slot, last)
    seen = keys(cache, slot, len(bias))[1:][bias[1:] == 0].tolist()
    start = max(policy.sinks, policy.start(last))
    kept = [*range(min(policy.sinks, length)), *range(start, length)]
    assert sorted(seen) == kept
    dropped = policy.dropped(last)
    if dropped and policy.compensation:
        mean = sum(range(policy.sinks, start)) / dropped
        assert math.isclose(keys(cache, slot, 1).item(), mean, rel_tol=1e-6)
        assert math.isclose(cache.view(ALL, slot, 1)[1][0, 0, 1].item(), -mean, rel_tol=1e-6)
    expected = math.log(dropped) if dropped and policy.compensation else HIDDEN
    assert math.isclose(bias[0].item(), expected, rel_tol=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    policy=policies(),
    length=st.integers(1, 100),
    tail=st.integers(0, 100),
    data=st.data(),
)
def test_the_state_at_any_cut_is_the_sequences_that_was_read_to_there(
    policy: StreamingPolicy, length: int, tail: int, data: st.DataObject
) -> None:
    cache = make_cache(policy, length, tail=tail)
    slot, sinks = cache.allocate(length), policy.sinks
    read_positions(cache, slot, length)
    # Rank 0 counts on no more than is there: here, and of the copy below.
    expected = cache.arena.tail_begin(length)
    assert slot.tail_begin <= expected
    cut = data.draw(st.sampled_from([n for n in range(1, length + 1) if cache.can_cut(slot, n)]))
    state = cache.state(slot, ALL, cut)
    # The next token's window, unless that has yet to be read: then still the last one's.
    start = max(sinks, policy.start(min(cut, length - 1)))
    _, first, end = state["at"].tolist()
    assert end == cut and max(sinks, start - tail) <= first <= start
    seen = [*range(min(sinks, cut)), *range(first, cut)]
    sums = [sum(range(sinks, start))] * 2
    for sign, kept, total in zip((1, -1), (state["k"], state["v"]), state["sums"], strict=True):
        assert (sign * kept[0, :, 0]).tolist() == seen
        assert (sign * total[0]).tolist() == sums
    copy = cache.fork(slot, cut, cut, instead=True)
    assert copy.start in (start, 0) and max(copy.start, sinks) == start
    assert copy.tail_begin <= cache.arena.tail_begin(cut, expected)
    if start > sinks:
        mean = sums[0] / (start - sinks)
        k, v = cache.view(ALL, copy, 1)
        assert k[0, 0, 0].item() == -v[0, 0, 0].item() == pytest.approx(mean, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    policy=policies(),
    length=st.integers(1, 100),
    more=st.integers(0, 50),
    spare=st.integers(0, 50),
)
def test_a_fork_holds_the_same_in_a_ring_of_another_length(
    policy: StreamingPolicy, length: int, more: int, spare: int
) -> None:
    cache = make_cache(policy, length + more + spare)
    slot = cache.allocate(length + spare)
    slot.start = slot.ring_begin = max(policy.sinks, policy.start(length - 1))
    for begin, end in ((0, min(policy.sinks, length)), (slot.start, length)):
        value = torch.arange(begin, max(begin, end), dtype=torch.float32).view(1, -1, 1)
        at = cache.indices(slot, begin, max(begin, end))
        cache.write(ALL, slot, at, value.expand(1, -1, 2), -value.expand(1, -1, 2))
    cache.sums[:, 0, slot.index] = 7.0
    copy = cache.fork(slot, length, length + more)
    bias = visible(cache, copy, length - 1)
    seen = keys(cache, copy, len(bias))[1:][bias[1:] == 0].tolist()
    assert sorted(seen) == [*range(min(policy.sinks, length)), *range(slot.start, length)]
    assert copy.start == slot.start
    assert cache.sums[:, 0, copy.index].tolist() == [[7.0, 7.0]] * 2


def test_a_fork_is_independent_and_a_reused_slot_is_clean() -> None:
    cache = make_cache(StreamingPolicy(window_min=4, window_ratio=None, sinks=1, block=1), 20)
    slot = cache.allocate(20)
    cache.write(ALL, slot, cache.indices(slot, 0, 1), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    copy = cache.fork(slot, 1, 3)
    cache.write(ALL, copy, cache.indices(copy, 0, 1), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    assert keys(cache, slot, 2)[1].item() == 1.0
    # Compensation token, sink and ring: of 4 tokens (the window), and of 3 (all there will be).
    assert cache.used_bytes == (6 + 5) * 2 * 2 * 4 + 2 * 2 * 2 * 4
    cache.k.fill_(math.nan)
    cache.release(copy)
    cache.release(slot)
    assert cache.used_bytes == 0
    again = cache.allocate(20)
    assert not keys(cache, again, cache.width(again, 20)).isnan().any()


@settings(deadline=None)
@given(count=st.integers(0, 2**24) | st.integers(0, 40))
def test_the_weight_of_dropped_tokens_in_shares_that_bfloat16_holds(count: int) -> None:
    """One logarithm in bfloat16 would be off by up to 3 %."""
    shares = _shares(torch.tensor(count), 4)
    seen = shares[shares > HIDDEN]
    assert torch.equal(seen.bfloat16().float(), seen)
    assert shares.isfinite().all()
    assert shares.double().exp().sum().item() == pytest.approx(count, rel=3e-5)
    if count:
        [whole] = _shares(torch.tensor(count), 1).tolist()
        assert whole == pytest.approx(math.log(count), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(policy=policies(), length=st.integers(1, 80))
def test_a_slot_for_queries_in_bfloat16_weighs_the_same(
    policy: StreamingPolicy, length: int
) -> None:
    """Decoded, forked and read: attention over it is that over a slot for float32."""
    kinds = [make_cache(policy, length, 8, dtype) for dtype in (torch.float32, torch.bfloat16)]
    outs = []
    for cache in kinds:
        generator = torch.Generator().manual_seed(length)
        slot = cache.allocate(length)
        for position in range(length):
            start = max(policy.sinks, policy.start(position))
            if start > slot.start:
                cache.drop(slot, start)
            k, v = torch.randn(2, 1, 1, 8, generator=generator)
            cache.write(ALL, slot, cache.indices(slot, position, position + 1), k, v)
        slot = cache.fork(slot, length, length)
        at, start = torch.tensor([length - 1, policy.start(length - 1)])
        width = cache.width(slot, length)
        bias = cache.visibility(slot, width, at, start)
        assert len(cache.distance(slot, width, at, start)) == len(bias) == width
        q = torch.ones(1, 1, 1, 8)
        seen = cache.view(ALL, slot, width)
        # The bias as an op in bfloat16 would have it.
        bias = bias.to(torch.bfloat16).float() if cache.entries > 1 else bias
        outs.append(attend(q, *seen, scale=0.3, bias=bias).out)
    assert kinds[1].entries == (4 if policy.compensation else 1)
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)


SIX = StreamingPolicy(window_min=6, window_ratio=None, sinks=1, block=1)


def new_keys(slot: StreamingSlot, end: int) -> torch.Tensor:
    """Keys of tokens ``[0, end)`` that no other slot has."""
    return torch.arange(end).view(1, -1, 1).expand(1, -1, 2) + 100.0 * slot.index


@settings(max_examples=100, deadline=None)
@given(totals=st.lists(st.integers(1, 9), max_size=60), data=st.data())
def test_what_is_no_larger_than_what_is_free_is_allocated(
    totals: list[int], data: st.DataObject
) -> None:
    """However the free places are scattered; and slots keep what they hold when they move."""
    arena, cpu = Arena(SIX, 1, 30), torch.device("cpu")
    cache = StreamingCache(1, 9, arena, 2, dtype=torch.float32, device=cpu)
    cache.k.fill_(math.nan)
    held: list[tuple[StreamingSlot, int]] = []
    for total in totals:
        free = arena.places - sum(arena.width(tokens) for _, tokens in held)
        if arena.width(total) <= free and len(held) < 9:
            slot = cache.allocate(total)
            seen = min(total, slot.capacity)  # one turn of the ring
            cache.width(slot, seen)
            at = cache.indices(slot, 0, seen)
            cache.write(ALL, slot, at, new_keys(slot, seen), new_keys(slot, seen))
            held.append((slot, total))
        else:
            slot, _ = held.pop(data.draw(st.integers(0, len(held) - 1)))
            cache.release(slot)
        taken: list[int] = []
        for slot, tokens in held:
            seen = min(tokens, slot.capacity)
            got = cache.read(ALL, slot, 0, seen)[0]
            # The first token is a sink and stays one; the ring's place 0 is never read.
            assert torch.equal(got, new_keys(slot, seen))
            taken += range(slot.offset, slot.offset + arena.width(tokens))
        assert len(taken) == len(set(taken))
        assert max(taken, default=0) < arena.places
    for slot, _ in held:
        cache.release(slot)
    assert cache.used_bytes == 0
    assert cache.allocate(99).offset == 0


def test_a_slot_that_moves_keeps_its_tail() -> None:
    arena, cpu = Arena(SIX, 1, 0, tail=8), torch.device("cpu")
    first, second = arena.width(9), arena.width(20)
    arena = dataclasses.replace(arena, places=first + second + 3)
    cache = StreamingCache(1, 3, arena, 2, dtype=torch.float32, device=cpu)
    cache.k.fill_(math.nan)
    before, slot = cache.allocate(9), cache.allocate(20)
    positions = torch.arange(20.0)
    decoded(cache, slot, positions.view(-1, 1).expand(-1, 2))
    assert (slot.offset, slot.tail_begin, slot.start) == (first, 6, 14)
    cache.release(before)
    more = cache.allocate(11)  # fits only behind the slot, once that has moved
    assert (slot.offset, more.offset) == (0, second) and arena.width(11) > first
    for length in range(13, 21):
        assert cache.can_cut(slot, length)
        state = cache.state(slot, ALL, length)
        begin = min(SIX.start(length), slot.start)
        seen = [0, *range(6, length)]
        assert state["k"][0, :, 0].tolist() == seen and state["v"][0, :, 1].neg().tolist() == seen
        dropped = sum(range(1, begin))
        assert state["sums"][:, 0, 0].tolist() == [dropped, -dropped]


def test_a_cut_far_back_leaves_no_rounding_of_large_sums() -> None:
    """Qwen2's keys have a bias, so that sums grow while what is left after a cut is small."""
    policy = StreamingPolicy(window_min=16, window_ratio=None, sinks=4, block=8)
    arena, cpu = Arena.of(policy, torch.float32, 1000, 2, tail=1024), torch.device("cpu")
    cache = StreamingCache(1, 3, arena, 4, dtype=torch.float32, device=cpu)
    slot = cache.allocate(1000)
    values = 300 + torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    decoded(cache, slot, values)
    errors = []
    for length in range(28, 1000):
        assert cache.can_cut(slot, length)
        copy = cache.fork(slot, length, length)
        want = values[4 : copy.start].double().mean(0)
        k, v = cache.view(ALL, copy, 1)
        errors.append(max((k[0, 0] - want).abs().max(), (v[0, 0] + want).abs().max()).item())
        cache.release(copy)
    assert max(errors) < 3e-4  # float32 holds these keys to 3e-5


def test_memory_that_no_token_has_reached_is_not_touched() -> None:
    arena = Arena(StreamingPolicy(window_min=4000, sinks=4), 1, 9000)
    cache = StreamingCache(1, 2, arena, 2, dtype=torch.float32, device=torch.device("cpu"))
    cache.k.fill_(math.nan)
    slot = cache.allocate(8000)
    cache.write(ALL, slot, cache.indices(slot, 0, 9), torch.ones(1, 9, 2), torch.ones(1, 9, 2))
    assert 14 <= (~cache.k[0, :, 0].isnan()).sum() < 500
