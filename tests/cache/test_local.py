"""The streaming cache's slots: what a query sees is what the policy says, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.cache.streaming import StreamingCache, StreamingSlot, _shares
from razor_dist.heads.policy import StreamingPolicy
from razor_dist.kernels import HIDDEN, attend
from tests.test_policy import policies

ALL = slice(0, 1)


def make_cache(policy: StreamingPolicy, longest: int, slots: int = 2) -> StreamingCache:
    return StreamingCache(
        1, slots, longest, policy, 2, dtype=torch.float32, device=torch.device("cpu")
    )


def visible(cache: StreamingCache, slot: StreamingSlot, position: int) -> torch.Tensor:
    """The bias over the slot, of which a longer one shows the same and nothing more."""
    at, start = torch.tensor([position, cache.policy.start(position)])
    width, whole = cache.width(slot, position + 1), cache.width(slot, slot.capacity)
    bias = cache.visibility(slot, width, at, start)
    longer = cache.visibility(slot, whole, at, start)
    assert torch.equal(longer[:width], bias)
    assert (longer[width:] == HIDDEN).all()
    return bias


@settings(max_examples=80, deadline=None)
@given(policy=policies(), length=st.integers(1, 150))
def test_a_decoded_sequence_leaves_what_the_policy_keeps(
    policy: StreamingPolicy, length: int
) -> None:
    cache = make_cache(policy, length)
    slot = cache.allocate(length)
    for position in range(length):
        start = max(policy.sinks, policy.start(position))
        if start > slot.start:
            cache.drop(ALL, slot, slot.start, start)
            slot.start = start
        # The key of position p is p itself: what is visible can be read off the keys.
        value = torch.full((1, 1, 2), float(position))
        cache.write(ALL, slot, cache.indices(slot, position, position + 1), value, -value)
    last = length - 1
    bias = visible(cache, slot, last)
    seen = cache.k[0, slot.index, 1 : bias.shape[0], 0][bias[1:] == 0].tolist()
    start = max(policy.sinks, policy.start(last))
    kept = [*range(min(policy.sinks, length)), *range(start, length)]
    assert sorted(seen) == kept
    dropped = policy.dropped(last)
    if dropped and policy.compensation:
        mean = sum(range(policy.sinks, start)) / dropped
        assert math.isclose(cache.k[0, slot.index, 0, 0].item(), mean, rel_tol=1e-6)
        assert math.isclose(cache.v[0, slot.index, 0, 1].item(), -mean, rel_tol=1e-6)
    expected = math.log(dropped) if dropped and policy.compensation else HIDDEN
    assert math.isclose(bias[0].item(), expected, rel_tol=1e-6)


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
    slot.start = max(policy.sinks, policy.start(length - 1))
    for begin, end in ((0, min(policy.sinks, length)), (slot.start, length)):
        value = torch.arange(begin, max(begin, end), dtype=torch.float32).view(1, -1, 1)
        at = cache.indices(slot, begin, max(begin, end))
        cache.write(ALL, slot, at, value.expand(1, -1, 2), -value.expand(1, -1, 2))
    cache.sums[:, 0, slot.index] = 7.0
    copy = cache.fork(slot, length, length + more)
    bias = visible(cache, copy, length - 1)
    seen = cache.k[0, copy.index, 1 : bias.shape[0], 0][bias[1:] == 0].tolist()
    assert sorted(seen) == [*range(min(policy.sinks, length)), *range(slot.start, length)]
    assert copy.start == slot.start
    assert cache.sums[:, 0, copy.index].tolist() == [[7.0, 7.0]] * 2


def test_a_fork_is_independent_and_a_reused_slot_is_clean() -> None:
    cache = make_cache(StreamingPolicy(window_min=4, window_ratio=None, sinks=1, block=1), 20)
    slot = cache.allocate(20)
    cache.write(ALL, slot, cache.indices(slot, 0, 1), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    copy = cache.fork(slot, 1, 3)
    cache.write(ALL, copy, cache.indices(copy, 0, 1), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    assert cache.k[0, slot.index, 1].tolist() == [1.0, 1.0]
    # Compensation token, sink and ring: of 4 tokens (the window), and of 3 (all there will be).
    assert cache.used_bytes == (6 + 5) * 2 * 2 * 4 + 2 * 2 * 2 * 4
    cache.k.fill_(math.nan)
    cache.release(copy)
    cache.release(slot)
    assert cache.used_bytes == 0
    again = cache.allocate(20)
    assert not cache.k[:, again.index, :6].isnan().any()


@settings(deadline=None)
@given(count=st.integers(0, 2**24) | st.integers(0, 40))
def test_the_weight_of_dropped_tokens_in_shares_that_bfloat16_holds(count: int) -> None:
    """Where one logarithm in bfloat16 is off by up to 3 %."""
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
    kinds = [
        StreamingCache(
            1, 2, length, policy, 8, dtype=torch.float32, device=torch.device("cpu"), queries=dtype
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    outs = []
    for cache in kinds:
        generator = torch.Generator().manual_seed(length)
        slot = cache.allocate(length)
        for position in range(length):
            start = max(policy.sinks, policy.start(position))
            if start > slot.start:
                cache.drop(ALL, slot, slot.start, start)
                slot.start = start
            k, v = torch.randn(2, 1, 1, 8, generator=generator)
            cache.write(ALL, slot, cache.indices(slot, position, position + 1), k, v)
        slot = cache.fork(slot, length, length)
        at, start = torch.tensor([length - 1, policy.start(length - 1)])
        width = cache.width(slot, length)
        bias = cache.visibility(slot, width, at, start)
        assert len(cache.distance(slot, width, at, start)) == len(bias) == width
        q = torch.ones(1, 1, 1, 8)
        seen = cache.k[ALL, slot.index, :width], cache.v[ALL, slot.index, :width]
        # The bias as an op in bfloat16 would have it.
        bias = bias.to(torch.bfloat16).float() if cache.entries > 1 else bias
        outs.append(attend(q, *seen, scale=0.3, bias=bias).out)
    assert kinds[1].entries == (4 if policy.compensation else 1)
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
