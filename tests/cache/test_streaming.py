"""The streaming cache's slots: what a query sees is what the policy says, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.cache.slots import Arena, StreamingSlot
from razor_dist.cache.streaming import StreamingCache
from razor_dist.kernels.decode import Windows
from tests.cache.test_policy import policies
from tests.decode_batches import slots_of

ALL = slice(0, 1)


def make_cache(
    policy: StreamingPolicy,
    longest: int,
    dim: int = 2,
    tail: int = 0,
) -> StreamingCache:
    """A cache with room for two sequences, filled with NaN."""
    arena, device = Arena.of(policy, longest, 2, tail), torch.device("cpu")
    cache = StreamingCache(1, 2, arena, dim, dtype=torch.float32, device=device)
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    return cache


def windows_of(cache: StreamingCache, slot: StreamingSlot, position: int) -> Windows:
    """Return the windows of a slot as a decode step has them."""
    numbers = (position, cache.policy.start(position), slot.offset, slot.capacity)
    width = cache.arena.ring + min(slot.capacity, position + 1)
    return Windows(
        cache.k,
        cache.v,
        cache.policy.sinks,
        cache.policy.compensation,
        width,
        *(torch.tensor([number]) for number in numbers),
    )


def visible(
    cache: StreamingCache, slot: StreamingSlot, position: int
) -> tuple[list[float], float | None]:
    """Keys that a query sees, and the bias of the compensation token if it does."""
    seen = list(slots_of(windows_of(cache, slot, position), 0))
    bias = [bias for place, bias, _ in seen if place == slot.offset]
    places = [place for place, _, _ in seen if place != slot.offset]
    return cache.k[0, places, 0].tolist(), bias[0] if bias else None


def decoded(cache: StreamingCache, slot: StreamingSlot, values: torch.Tensor) -> None:
    """Read tokens ``[0, n)`` one by one, with keys ``[n, D]`` and their negatives as values."""
    for position, value in enumerate(values):
        start = max(cache.policy.sinks, cache.policy.start(position))
        if start > slot.start:
            cache.drop(slot, start)
        at = cache.places(slot, position, position + 1)
        cache.write(ALL, at, value.view(1, 1, -1), -value.view(1, 1, -1))
        slot.length = position + 1


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
    seen, bias = visible(cache, slot, last)
    start = max(policy.sinks, policy.start(last))
    kept = [*range(min(policy.sinks, length)), *range(start, length)]
    assert sorted(seen) == kept
    dropped = policy.dropped(last)
    if dropped and policy.compensation:
        mean = sum(range(policy.sinks, start)) / dropped
        assert math.isclose(cache.view(ALL, slot.at, 1)[0][0, 0, 0].item(), mean, rel_tol=1e-6)
        assert math.isclose(cache.view(ALL, slot.at, 1)[1][0, 0, 1].item(), -mean, rel_tol=1e-6)
    expected = math.log(dropped) if dropped and policy.compensation else None
    assert bias == (None if expected is None else pytest.approx(expected, rel=1e-6))


@settings(max_examples=80, deadline=None)
@given(
    policy=policies(),
    length=st.integers(1, 100),
    tail=st.integers(0, 100),
    data=st.data(),
)
def test_the_state_at_a_cut_is_that_of_a_sequence_that_ends_there(
    policy: StreamingPolicy, length: int, tail: int, data: st.DataObject
) -> None:
    cache = make_cache(policy, length, tail=tail)
    slot, sinks = cache.allocate(length), policy.sinks
    read_positions(cache, slot, length)
    # Rank 0 counts on no more than is there: here, and of the copy below.
    expected = cache.arena.tail_begin(length)
    assert slot.tail_begin <= expected
    cut = data.draw(
        st.sampled_from([n for n in range(1, length + 1) if cache.arena.can_cut(slot, n)])
    )
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
        k, v = cache.view(ALL, copy.at, 1)
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
    slot.advance(max(policy.sinks, policy.start(length - 1)))
    slot.length = length
    for begin, end in ((0, min(policy.sinks, length)), (slot.start, length)):
        value = torch.arange(begin, max(begin, end), dtype=torch.float32).view(1, -1, 1)
        at = cache.places(slot, begin, max(begin, end))
        cache.write(ALL, at, value.expand(1, -1, 2), -value.expand(1, -1, 2))
    cache.sums[:, 0, slot.index] = 7.0
    copy = cache.fork(slot, length, length + more)
    seen, _ = visible(cache, copy, length - 1)
    assert sorted(seen) == [*range(min(policy.sinks, length)), *range(slot.start, length)]
    assert copy.start == slot.start
    assert cache.sums[:, 0, copy.index].tolist() == [[7.0, 7.0]] * 2


def test_a_fork_is_independent_and_a_reused_slot_is_new() -> None:
    cache = make_cache(StreamingPolicy(window_min=4, window_ratio=None, sinks=1, block=1), 20)
    slot = cache.allocate(20)
    cache.write(ALL, cache.places(slot, 0, 1), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    copy = cache.fork(slot, 1, 3)
    cache.write(ALL, cache.places(copy, 0, 1), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    assert cache.view(ALL, slot.at, 2)[0][0, 1, 0].item() == 1.0
    # Compensation token, sink and ring: of 4 tokens (the window), and of 3 (all there will be).
    assert cache.used_bytes == (6 + 5) * 2 * 2 * 4 + 2 * 2 * 2 * 4
    cache.release(copy)
    cache.release(slot)
    assert cache.used_bytes == 0
    again = cache.allocate(20)
    assert (again.start, again.length) == (0, 0) and not cache.sums[:, :, again.index].any()


def test_a_slots_window_and_tail_only_move_forward() -> None:
    slot = StreamingSlot(index=0, offset=0, capacity=8, tail_capacity=4)
    slot.read_to(3)
    assert (slot.tail_begin, slot.ring_begin, slot.start) == (0, 0, 3)
    slot.advance(12)
    assert (slot.tail_begin, slot.ring_begin, slot.start) == (8, 12, 12)
    for move in (slot.read_to, slot.advance):
        with pytest.raises(AssertionError):
            move(11)
    with pytest.raises(AssertionError):
        StreamingSlot(0, 0, 8, 4, start=2, ring_begin=3)


SIX = StreamingPolicy(window_min=6, window_ratio=None, sinks=1, block=1)


def new_keys(slot: StreamingSlot, end: int) -> torch.Tensor:
    """Keys of tokens ``[0, end)`` that no other slot has."""
    return torch.arange(end).view(1, -1, 1).expand(1, -1, 2) + 100.0 * slot.index


def least_moved(extents: list[tuple[int, int]], places: int, need: int) -> int:
    """Places that must move, of extents in their order, for a gap of ``need``: by every choice."""
    begins, ends = [*(b for b, _ in extents), places], [0, *(e for _, e in extents)]
    found = []
    for first, last in itertools.combinations_with_replacement(range(len(begins)), 2):
        between = sum(end - begin for begin, end in extents[first:last])
        if begins[last] - ends[first] - between >= need:
            found.append(between)
    return min(found)


@settings(max_examples=100, deadline=None)
@given(totals=st.lists(st.integers(1, 9), max_size=60), data=st.data())
def test_a_slot_that_fits_the_free_places_is_allocated(
    totals: list[int], data: st.DataObject
) -> None:
    """Even if the free places are scattered: as few as can be move, and keep their contents."""
    arena, cpu = Arena(SIX, 30), torch.device("cpu")
    cache = StreamingCache(1, 9, arena, 2, dtype=torch.float32, device=cpu)
    cache.k.fill_(math.nan)
    held: list[tuple[StreamingSlot, int]] = []
    for total in totals:
        free = arena.places - sum(arena.width(tokens) for _, tokens in held)
        if arena.width(total) <= free and len(held) < 9:
            extents = [(s.offset, s.offset + arena.width(tokens)) for s, tokens in held]
            slot = cache.allocate(total)
            after = [s.offset for s, _ in held]
            moved = sum(e - b for (b, e), at in zip(extents, after, strict=True) if at != b)
            assert moved == least_moved(sorted(extents), arena.places, arena.width(total))
            seen = slot.length = min(total, slot.capacity)  # one turn of the ring
            at = cache.places(slot, 0, seen)
            cache.write(ALL, at, new_keys(slot, seen), new_keys(slot, seen))
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
    arena, cpu = Arena(SIX, 0, tail=8), torch.device("cpu")
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
        assert cache.arena.can_cut(slot, length)
        state = cache.state(slot, ALL, length)
        begin = min(SIX.start(length), slot.start)
        seen = [0, *range(6, length)]
        assert state["k"][0, :, 0].tolist() == seen and state["v"][0, :, 1].neg().tolist() == seen
        dropped = sum(range(1, begin))
        assert state["sums"][:, 0, 0].tolist() == [dropped, -dropped]


def test_a_cut_far_back_leaves_no_rounding_of_large_sums() -> None:
    """Qwen2's keys have a bias, so that sums grow while what is left after a cut is small."""
    policy = StreamingPolicy(window_min=16, window_ratio=None, sinks=4, block=8)
    arena, cpu = Arena.of(policy, 1000, 2, tail=1024), torch.device("cpu")
    cache = StreamingCache(1, 3, arena, 4, dtype=torch.float32, device=cpu)
    slot = cache.allocate(1000)
    values = 300 + torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    decoded(cache, slot, values)
    errors = []
    for length in range(28, 1000):
        assert cache.arena.can_cut(slot, length)
        copy = cache.fork(slot, length, length)
        want = values[4 : copy.start].double().mean(0)
        k, v = cache.view(ALL, copy.at, 1)
        errors.append(max((k[0, 0] - want).abs().max(), (v[0, 0] + want).abs().max()).item())
        cache.release(copy)
    assert max(errors) < 3e-4  # float32 holds these keys to 3e-5


def test_memory_that_no_token_has_reached_is_not_touched() -> None:
    arena = Arena(StreamingPolicy(window_min=4000, sinks=4), 9000)
    cache = StreamingCache(1, 2, arena, 2, dtype=torch.float32, device=torch.device("cpu"))
    cache.k.fill_(math.nan)
    slot = cache.allocate(8000)
    cache.write(ALL, cache.places(slot, 0, 9), torch.ones(1, 9, 2), torch.ones(1, 9, 2))
    assert (~cache.k[0, :, 0].isnan()).sum() == 9
