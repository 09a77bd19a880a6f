"""The window's definition: its vectorised forms against the formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.cache.policy import StreamingPolicy, saves_from
from razor_dist.config.errors import ConfigError


@st.composite
def policies(draw: st.DrawFn) -> StreamingPolicy:
    low = draw(st.integers(1, 50))
    return StreamingPolicy(
        window_min=low,
        window_ratio=draw(st.none() | st.integers(1, 9)),
        window_max=draw(st.none() | st.integers(low, 80)),
        sinks=draw(st.integers(0, 8)),
        block=draw(st.integers(1, 20)),
    )


@given(policy=policies(), position=st.integers(0, 5000))
def test_start_is_the_formula_and_covers_the_window(policy: StreamingPolicy, position: int) -> None:
    length = policy.window_min
    if policy.window_ratio:
        length = max(length, math.ceil((position + 1) / policy.window_ratio))
    length = min(length, policy.window_max or length)
    start = max(0, policy.block * math.floor((position + 1 - length) / policy.block))
    assert policy.start(position) == start
    live = position + 1 - start
    assert live >= min(length, position + 1)
    assert live <= length + policy.block - 1 or start == 0
    assert live <= policy.capacity(position + 1)
    assert policy.start(position + 1) >= start


@given(policy=policies(), begin=st.integers(0, 300), count=st.integers(0, 200))
def test_runs_partition_the_queries(policy: StreamingPolicy, begin: int, count: int) -> None:
    runs = policy.runs(begin, begin + count)
    covered = [i for run in runs for i in range(run.begin, run.end)]
    assert covered == list(range(begin, begin + count))
    assert all(policy.start(i) == run.start for run in runs for i in range(run.begin, run.end))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"window_min": 0}, "window_min"),
        ({"window_ratio": 0}, "window_ratio"),
        ({"block": 0}, "block"),
        ({"sinks": -1}, "sinks"),
        ({"window_min": 10, "window_max": 9}, "window_max"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        StreamingPolicy(**settings)


@pytest.mark.parametrize("copies", (1, 2, 4, 5, 8))
@pytest.mark.parametrize("ratio", (None, 4, 5))
@pytest.mark.parametrize("most", (None, 24))
def test_from_where_windows_are_together_shorter_than_the_context(
    copies: int, ratio: int | None, most: int | None
) -> None:
    policy = StreamingPolicy(window_min=16, window_ratio=ratio, window_max=most, block=1)
    shorter = [n for n in range(1, 1000) if copies * policy.window(n - 1) < n]
    begin = saves_from({policy: 3}, copies)
    assert shorter == ([] if begin is None else list(range(begin + 1, 1000)))


@pytest.mark.parametrize(("copies", "begin"), [(1, 10), (2, 33), (3, 50)])
def test_from_where_windows_of_two_lengths_save_together(copies: int, begin: int) -> None:
    """Two heads keep 10 tokens and one keeps 30; `copies` is the number of ranks."""
    policy = StreamingPolicy()
    own = {policy.with_window(10, alibi=False): 2, policy.with_window(30, alibi=False): 1}
    shorter = [n for n in range(1, 1000) if copies * (2 * min(n, 10) + min(n, 30)) < 3 * n]
    assert saves_from(own, copies) == shorter[0] - 1 == begin
