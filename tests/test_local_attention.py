"""Streaming heads in a prefill chunk: runs that are alike are computed at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from razor_dist.attention import streaming as streaming_attention
from razor_dist.attention.streaming import SpanKeys, SpanQueries, window_attention
from razor_dist.attention.window_plan import QuerySpan
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.kernels import query as query_module
from razor_dist.kernels.query import Query
from razor_dist.parallel.zigzag import Interval

TOKENS = 300


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def attention(policy: StreamingPolicy, begin: int, end: int, dim: int = 8) -> tuple[Tensor, int]:
    """Attention of the queries ``[begin, end)``, and the number of kernel calls."""
    q = draw(2, 3, TOKENS, dim, seed=0)
    k, v = draw(2, TOKENS, dim, seed=1), draw(2, TOKENS, dim, seed=2)
    first = max(policy.sinks, policy.start(begin))
    sums = torch.stack([x[:, policy.sinks : first].sum(1) for x in (k, v)])
    runs = policy.runs(max(begin, policy.sinks), end)
    keys = SpanKeys(
        k[:, first:end], v[:, first:end], first, k[:, : policy.sinks], v[:, : policy.sinks], sums
    )
    span = QuerySpan(at=Interval(begin, end), offset=0, edge=0, runs=runs)
    calls = []
    attend = query_module.attend

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return attend(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_module, "attend", counted)
        queries = SpanQueries(Query(q[:, :, begin:end], 0.3), begin)
        return window_attention(queries, span, keys, policy), len(calls)


def one_by_one(policy: StreamingPolicy, begin: int, end: int) -> tuple[Tensor, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming_attention, "_TOGETHER", 1)
        return attention(policy, begin, end)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(
    least=st.integers(1, 90), ratio=st.sampled_from([None, 2, 5]),
    most=st.none() | st.integers(90, 120),
    sinks=st.integers(0, 5), block=st.integers(1, 20), compensation=st.booleans(),
    begin=st.integers(0, TOKENS - 1), length=st.integers(1, TOKENS),
)  # fmt: skip
def test_runs_together_are_the_runs_one_by_one(
    least: int, ratio: int | None, most: int | None, sinks: int, block: int, compensation: bool,
    begin: int, length: int,
) -> None:  # fmt: skip
    policy = StreamingPolicy(least, ratio, most, sinks, block, compensation)
    end = min(begin + length, TOKENS)
    got, calls = attention(policy, begin, end)
    want, separate = one_by_one(policy, begin, end)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    assert calls <= separate + 2  # a group of two is 2 calls per head and 1 for the sinks


@settings(max_examples=100, deadline=None)
@given(
    least=st.integers(1, 90), ratio=st.sampled_from([None, 2, 5]),
    sinks=st.integers(0, 5), block=st.integers(1, 20), compensation=st.booleans(),
    begin=st.integers(0, TOKENS - 1), length=st.integers(1, TOKENS),
)  # fmt: skip
def test_windows_in_one_call_are_those_of_many_calls(
    least: int, ratio: int | None, sinks: int, block: int, compensation: bool,
    begin: int, length: int,
) -> None:  # fmt: skip
    policy = StreamingPolicy(least, ratio, None, sinks, block, compensation)
    end = min(begin + length, TOKENS)
    got, _ = attention(policy, begin, end, dim=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_module, "takes_windows", lambda q, k: False)
        want, _ = attention(policy, begin, end, dim=16)
    torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)


def test_a_long_chunk_takes_few_calls() -> None:
    """30 runs of 8 queries: each of 2 heads sees its window and itself, all see the sinks.

    Two more runs are shorter, and see their windows and themselves.
    """
    policy = StreamingPolicy(40, None, None, 4, 8)
    begin, end = 59, 299
    assert len(policy.runs(begin, end)) == 31  # the first and the last are shorter
    _, calls = attention(policy, begin, end)
    _, separate = one_by_one(policy, begin, end)
    assert (calls, separate) == (2 * 2 + 2 * 2 + 1, 31 * 3)
