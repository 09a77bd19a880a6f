"""Windows by head within a budget of bytes, on tables, and on the model made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.errors import ConfigError
from razor_dist.heads.decision import Pairs, ranked
from razor_dist.identify import reach
from razor_dist.identify.budget import Budget, Masses, WindowDecision, budgeted, masses, plan
from razor_dist.identify.criterion import head_map
from razor_dist.identify.settings import ReachSettings
from razor_dist.models.loader import load_model
from razor_dist.models.shape import ModelShape
from tests.heads.planted import BOS, HEADS, RETRIEVAL, _look_back, make_planted, prose

POLICY = StreamingPolicy(window_min=16, window_ratio=None, sinks=4, block=8)
SHAPE = ModelShape(layers=4, query_heads=6, kv_heads=3, head_dim=8, vocab_size=9, max_positions=999)
TOKENS, SHORT = 400, 16
FULL = 12 * TOKENS  # tokens that all heads keep


def _budget(
    tokens: int, share: float = 0.5, length: int = TOKENS, middle: int | None = None
) -> Budget:
    """A budget of ``tokens`` tokens of a head, 10 bytes each."""
    return Budget(10 * tokens, length, POLICY, SHAPE, 10, SHORT, share, middle)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Pairs, Masses]:
    """Scores, and masses that a longer window never raises."""
    number = st.floats(0, 1, width=16)
    table = [[draw(number) for _ in range(3)] for _ in range(4)]
    order = ranked(tuple(map(tuple, table)))
    found, now = {}, [[draw(number) for _ in range(3)] for _ in range(4)]
    for window in (SHORT, 32, 64, 128):
        found[window] = tuple(map(tuple, now))
        now = [[x * draw(number) for x in row] for row in now]
    return order, found


def _held(chosen: WindowDecision, length: int) -> int:
    """Tokens that all heads hold at a length, counted token by token."""
    total = 0
    for row in chosen.windows:
        for window in row:
            if window is None:
                total += length
                continue
            start = max(0, 8 * ((length - window) // 8))
            kept = {*range(min(4, length)), *range(start, length)}
            total += len(kept) + (start > 4)
    return total


@given(drawn(), st.integers(468, FULL + 50), st.sampled_from([0.0, 0.25, 0.5, 0.75]))
def test_no_length_takes_more_than_the_budget(
    tables: tuple[Pairs, Masses], tokens: int, share: float
) -> None:
    order, seen = tables
    chosen = plan(order, _budget(tokens, share), seen)
    assert chosen.bytes <= 10 * tokens
    for length in (*range(1, 40), *range(TOKENS - 17, TOKENS + 1)):
        assert 10 * _held(chosen, length) <= chosen.bytes
    # What is left buys no further head of the class that is next.
    assert 10 * tokens - chosen.bytes < 10 * TOKENS or all(map(all, chosen.retrieval))


@given(drawn(), st.integers(468, FULL), st.integers(0, 900), st.sampled_from([0.0, 0.5]))
def test_a_larger_budget_shortens_no_window(
    tables: tuple[Pairs, Masses], tokens: int, more: int, share: float
) -> None:
    order, seen = tables
    small, large = (
        plan(order, _budget(each, share, middle=64), seen) for each in (tokens, tokens + more)
    )
    for one, two in zip(small.windows, large.windows, strict=True):
        assert all(b is None or (a is not None and a <= b) for a, b in zip(one, two, strict=True))
    assert large.mass(seen) <= small.mass(seen) and large.bytes >= small.bytes


@given(drawn(), st.integers(468, FULL))
def test_retrieval_heads_are_the_first_of_the_order(
    tables: tuple[Pairs, Masses], tokens: int
) -> None:
    order, seen = tables
    for share in (0.0, 0.5):
        chosen = plan(order, _budget(tokens, share), seen)
        kept = [(i, j) for i, j in order if chosen.retrieval[i][j]]
        assert tuple(kept) == order[: len(kept)]


@given(drawn(), st.integers(468, FULL), st.sampled_from([0.25, 0.5, 0.75]))
def test_the_middle_class_has_its_share_to_a_head(
    tables: tuple[Pairs, Masses], tokens: int, share: float
) -> None:
    order, seen = tables
    budget = _budget(tokens, share, middle=64)
    counts = plan(order, budget, seen).counts
    # Tokens beyond short windows; a head that was raised from the middle class is of it no more.
    middle, kept = (
        counts.get(window, 0) * (budget.cost(window) - budget.cost(SHORT)) for window in (64, None)
    )
    assert middle * (1 - share) <= kept * share + budget.cost(64)
    assert middle * (1 - share) >= kept * share - TOKENS or SHORT not in counts


def test_bytes_and_footprint_by_hand() -> None:
    budget = _budget(600, 0)
    # Window of 16 to 23 tokens, 4 sinks, the compensation token.
    assert budget.cost(SHORT) == 28 and budget.cost(None) == 400 and budget.least == 12 * 28 * 10
    order = ranked(((0.5, 0.1, 0.9),) * 4)
    chosen = plan(order, budget, {})
    assert chosen.counts == {None: 0, SHORT: 12}  # 372 more are not left of 264
    chosen = plan(order, _budget(800, 0), {})
    assert chosen.counts == {None: 1, SHORT: 11} and chosen.retrieval[0][2]
    assert chosen.bytes == 10 * (400 + 11 * 28)
    want = sum(_held(chosen, length) for length in range(1, TOKENS + 1))
    whole = 12 * TOKENS * (TOKENS + 1) // 2
    assert budget.footprint(chosen.windows) == pytest.approx(want / whole)
    assert (
        "7,080 of 8,000 bytes at 400 tokens (14.8% of full attention's; KV footprint 19.2%)"
        in str(chosen)
    )
    assert "of 12 KV heads 1 keep everything, 11 a window of 16" in str(chosen)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="3350 bytes, but short windows of 16 tokens alone take"):
        _budget(335)
    with pytest.raises(ConfigError, match="short_window is 16 tokens"):
        _budget(9000, length=16)
    with pytest.raises(ConfigError, match="middle_share must be from 0 to below 1, got 1"):
        _budget(9000, 1)
    for middle in (8, 16, 396):
        with pytest.raises(ConfigError, match=f"middle_window is {middle} tokens"):
            _budget(900, middle=middle)
    with pytest.raises(ConfigError, match="give --middle-window, or --middle-share 0"):
        _budget(900, length=35)


def test_a_planted_head_of_middle_range_gets_the_middle_window(tmp_path: Path) -> None:
    """A head that looks 40 tokens back, of which no criterion of retrieval knows."""
    model = load_model(make_planted(tmp_path), device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        _look_back(model.model.layers[0].self_attn, head=0, distance=40)
    shape = ModelShape.from_config(model.config)
    batch = reach.texts(prose(), ReachSettings(samples=2, tokens=200), shape, [BOS])
    tried = (16, 32, 64, 128)
    seen = masses(model, batch, tried, POLICY.sinks)
    for i, j in HEADS:
        dropped = [seen[window][i][j] for window in tried]
        assert dropped == sorted(dropped, reverse=True)
    assert [seen[window][0][0] for window in tried] == pytest.approx([1, 1, 0, 0], abs=0.01)
    # The diffuse head's mass is by length alone, of queries that see 101 to 201 tokens.
    each = [sum(max(0, t - w - 4) / t for t in range(101, 202)) / 101 for w in tried]
    assert [seen[window][0][1] for window in tried] == pytest.approx(each, abs=5e-3)
    assert seen[16][1][1] < 0.02  # the first token is a sink
    scores = tuple(tuple(float((i, j) in RETRIEVAL) for j in range(2)) for i in range(3))
    found = head_map("planted", model.config, "m", {"kind": scores}, {}, sparsity=0.5)
    # Two retrieval heads and a middle window of 64, no token more.
    tokens = 2 * 200 + (64 + 12) + 3 * (16 + 12)
    budget = Budget(256 * tokens, 200, POLICY, shape, 256, 16, 0.2)
    changed, chosen = budgeted(found, budget, seen)
    assert chosen.middle == 64 and chosen.bytes == budget.bytes
    assert changed.windows == ((64, 16), (None, 16), (None, 16))
    assert changed.settings["budget"]["middle_window"] == 64
    assert changed.kv_scores == found.kv_scores
