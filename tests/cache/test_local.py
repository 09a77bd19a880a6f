"""The local cache's slots: what a query sees is what the policy says, and nothing else."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.cache.local import LocalCache
from razor_dist.policy import LocalPolicy
from tests.test_policy import policies

ALL = slice(0, 1)


def make_cache(policy: LocalPolicy, longest: int, slots: int = 2) -> LocalCache:
    return LocalCache(1, slots, longest, policy, 2, dtype=torch.float32, device=torch.device("cpu"))


@settings(max_examples=80, deadline=None)
@given(policy=policies(), length=st.integers(1, 150))
def test_a_decoded_sequence_leaves_what_the_policy_keeps(policy: LocalPolicy, length: int) -> None:
    cache = make_cache(policy, length)
    slot = cache.allocate()
    for position in range(length):
        start = max(policy.sinks, policy.start(position))
        if start > slot.start:
            cache.drop(ALL, slot, slot.start, start)
            slot.start = start
        # The key of position p is p itself: what is visible can be read off the keys.
        value = torch.full((1, 1, 2), float(position))
        cache.write(ALL, slot, cache.indices(position, position + 1), value, -value)
    last = length - 1
    bias = cache.visibility(last)
    seen = cache.k[0, slot.index, 1 : bias.shape[0], 0][bias[1:] == 0].tolist()
    start = max(policy.sinks, policy.start(last))
    kept = [*range(min(policy.sinks, length)), *range(start, length)]
    assert sorted(seen) == kept
    dropped = policy.dropped(last)
    if dropped:
        mean = sum(range(policy.sinks, start)) / dropped
        assert math.isclose(cache.k[0, slot.index, 0, 0].item(), mean, rel_tol=1e-6)
        assert math.isclose(cache.v[0, slot.index, 0, 1].item(), -mean, rel_tol=1e-6)
    expected = math.log(dropped) if dropped and policy.compensation else -math.inf
    assert math.isclose(bias[0].item(), expected, rel_tol=1e-6)


def test_a_fork_is_independent_and_a_reused_slot_is_clean() -> None:
    cache = make_cache(LocalPolicy(window_min=4, window_ratio=None, sinks=1, block=1), 20)
    slot = cache.allocate()
    cache.write(ALL, slot, cache.indices(0, 1), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    copy = cache.fork(slot)
    cache.write(ALL, copy, cache.indices(0, 1), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    assert cache.k[0, slot.index, 1].tolist() == [1.0, 1.0]
    assert cache.used_bytes == 2 * cache.slot_bytes
    cache.k.fill_(math.nan)
    cache.release(copy)
    cache.release(slot)
    assert cache.used_bytes == 0
    again = cache.allocate()
    assert not cache.k[:, again.index].isnan().any()
