"""Choosing KV heads to fill a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.heads.decision import Scores, decide
from razor_dist.heads.head_map import HeadMap, choose, kv_budget, shipped_head_map


def _map(scores: dict[str, Scores], kv_scores: dict[str, Scores], kv_heads: int = 2) -> HeadMap:
    tables = [*scores.values(), *kv_scores.values()]
    return HeadMap(
        model="m",
        fingerprint="f",
        method="x",
        settings={},
        query_heads=len(tables[0][0]) if scores else 2 * kv_heads,
        retrieval=((False,) * kv_heads,) * len(tables[0]),
        selected={},
        scores=scores,
        kv_scores=kv_scores,
    )


def test_scores_of_kv_heads_rank_them_and_ties_go_by_index() -> None:
    gates = ((0.5, 0.9), (0.9, 0.5), (0.1, 0.5))
    choice = choose(_map({}, {"gate": gates}), 4)
    assert choice.kept == ((0, 1), (1, 0), (0, 0), (1, 1))
    assert choice.retrieval == ((True, True), (True, True), (False, False))
    assert choice.selected == {}


def test_query_heads_are_selected_until_their_groups_fill_the_budget() -> None:
    # The two best induction heads share a group, which the echo head has promoted already.
    induction = ((0.9, 0.8, 0.1, 0.2), (0.0, 0.0, 0.7, 0.6))
    echo = ((0.0, 0.3, 0.0, 0.0), (0.1, 0.2, 0.0, 0.0))
    choice = choose(_map({"induction": induction, "echo": echo}, {}), 2)
    assert choice.kept == ((0, 0), (1, 1))
    assert choice.selected == {"echo": 1, "induction": 3}


def test_a_razor_budget_is_its_own_decision_at_these_counts() -> None:
    razor = HeadMap.load(shipped_head_map("smollm2"))
    heads = 30 * 9
    for budget in (9, 14, 23, 45, 90):
        choice = choose(razor, budget)
        assert len(choice.kept) == sum(map(sum, choice.retrieval)) == budget
        percents = [100 * choice.selected[kind] / heads for kind in ("induction", "echo")]
        assert decide(razor.scores, *percents, group=3).retrieval == choice.retrieval
        assert choice.selected["echo"] == 3  # 1 % of 270


@given(st.integers(0, 2**32), st.integers(1, 11))
def test_a_larger_budget_begins_with_a_smaller_one(seed: int, budget: int) -> None:
    import random

    draw = random.Random(seed)
    scores = {
        kind: tuple(tuple(draw.choice((0.0, 0.5, draw.random())) for _ in range(9)) for _ in "1234")
        for kind in ("induction", "echo")
    }
    head_map = _map(scores, {}, kv_heads=3)
    small, large = choose(head_map, budget), choose(head_map, budget + 1)
    assert len(small.kept) == budget
    assert large.kept[:budget] == small.kept


def test_budgets_are_percents_of_kv_heads() -> None:
    razor = HeadMap.load(shipped_head_map("smollm2"))
    heads = [kv_budget(razor, percent) for percent in (10, 15, 25, 50, 100, 0.1)]
    assert heads == [9, 14, 23, 45, 90, 1]
    for percent in (0, 101):
        with pytest.raises(ConfigError, match="a budget must be a percentage"):
            kv_budget(razor, percent)


def test_a_map_that_ranks_no_kv_heads_is_refused() -> None:
    table = ((0.1, 0.2),)
    for head_map in (
        _map({"induction": ((0.1, 0.2, 0.3, 0.4),)}, {}),
        _map({}, {"gate": table, "change": table}),
    ):
        with pytest.raises(HeadMapError, match="ranks no KV heads"):
            choose(head_map, 1)
