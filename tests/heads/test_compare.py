"""Comparing head maps: counts by hand, and the rank correlation against its definition."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.heads.compare import HeadMapSummary, Overlap, compare, drawn_rows, rank_correlation
from razor_dist.heads.head_map import HeadMap

A = HeadMap(
    model="a",
    fingerprint="sha256:0",
    method="razor",
    settings={},
    query_heads=4,
    retrieval=((True, True), (False, False), (True, False)),
    selected={"induction": ((0, 0), (0, 2)), "echo": ((2, 1), (0, 0))},
    scores={"induction": ((4.0, 0.0, 3.0, 0.0), (1.0,) * 4, (0.0, 2.0, 0.0, 0.0))},
)
B = HeadMap(
    model="b",
    fingerprint="sha256:0",
    method="duo",
    settings={},
    query_heads=4,
    retrieval=((True, False), (False, False), (False, True)),
    selected={},
    scores={},
    kv_scores={"gate": ((1.0, 0.1), (0.0, 0.2), (0.5, 1.0))},
)


def test_a_map_in_numbers() -> None:
    assert HeadMapSummary.of("a.json", A) == HeadMapSummary(
        name="a.json",
        model="a",
        method="razor",
        selected=3 / 12,  # (0, 0) was selected twice
        kept=0.5,
        kept_heads=3,
        kv_heads=6,
        touched=2,
        layers=3,
    )
    assert HeadMapSummary.of("b.json", B).selected is None


def test_a_pair() -> None:
    result = compare([("a", A), ("b", B), ("a2", A)])
    assert result.warnings == ()
    assert [(pair.a, pair.b) for pair in result.pairs] == [("a", "b"), ("a", "a2"), ("b", "a2")]
    a_b, a_a, _ = result.pairs
    assert a_b.kv_heads == Overlap(both=1, jaccard=1 / 4, a_in_b=1 / 3, b_in_a=1 / 2)
    assert a_b.query_heads is None and a_b.correlations == {}
    assert a_a.kv_heads == a_a.query_heads == Overlap(3, 1.0, 1.0, 1.0)
    assert a_a.correlations == {"induction": pytest.approx(1.0)}


def test_a_kind_is_of_query_heads_or_of_kv_heads() -> None:
    as_if = dataclasses.replace(B, scores={"gate": A.scores["induction"]}, kv_scores={})
    assert compare([("b", B), ("c", as_if)]).pairs[0].correlations == {}
    assert compare([("b", B), ("b2", B)]).pairs[0].correlations == {"gate": pytest.approx(1.0)}


def test_nothing_kept() -> None:
    nothing = dataclasses.replace(B, retrieval=((False, False),) * 3)
    pair = compare([("nothing", nothing), ("b", B)]).pairs[0]
    assert pair.kv_heads == Overlap(both=0, jaccard=0.0, a_in_b=None, b_in_a=0.0)
    pair = compare([("nothing", nothing), ("again", nothing)]).pairs[0]
    assert pair.kv_heads == Overlap(both=0, jaccard=1.0, a_in_b=None, b_in_a=None)


def test_another_configuration_is_a_warning_and_another_size_an_error() -> None:
    other = dataclasses.replace(B, fingerprint="sha256:1")
    [warning] = compare([("a", A), ("b", other)]).warnings
    assert "a is for 'a' and b for 'b'" in warning and "different configurations" in warning
    anyones = dataclasses.replace(B, fingerprint="any")
    assert compare([("a", A), ("b", anyones)]).warnings == ()
    # The first map may be for any model, and those after it for different ones.
    assert len(compare([("any", anyones), ("a", A), ("b", other)]).warnings) == 1
    short = dataclasses.replace(
        B, retrieval=B.retrieval[:2], kv_scores={"gate": B.kv_scores["gate"][:2]}
    )
    with pytest.raises(HeadMapError, match=r"b\.json, made for 'b', has 2"):
        compare([("a.json", A), ("b.json", short)])
    wide = dataclasses.replace(B, query_heads=8)
    with pytest.raises(HeadMapError, match="has 4 query heads, but b, made for 'b', has 8"):
        compare([("a", A), ("b", wide)])
    with pytest.raises(ConfigError, match="needs two head maps or more, got 1"):
        compare([("a", A)])


def test_rank_correlation_by_hand() -> None:
    # Ranks 0, 1.5, 1.5, 3 and 1, 0, 2, 3: covariance 3, variances 4.5 and 5 (all times n).
    assert rank_correlation(((1, 2, 2, 9),), ((5, 4, 6, 7),)) == pytest.approx(3 / 22.5**0.5)
    assert rank_correlation(((1, 2), (3, 4)), ((40, 30), (20, 10))) == pytest.approx(-1)
    assert rank_correlation(((1, 2),), ((1, 1),)) is None
    assert rank_correlation(((1,),), ((1,),)) is None


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=20))
def test_rank_correlation_ranks(pairs: list[tuple[int, int]]) -> None:
    a, b = (tuple(map(float, column)) for column in zip(*pairs, strict=True))
    found = rank_correlation((a,), (b,))
    # What order alone decides: any increasing map keeps it, and both ways round are the same.
    assert rank_correlation((tuple(x**3 for x in a),), (b,)) == found
    assert rank_correlation((b,), (a,)) == pytest.approx(found)
    assert (found is None) == (len(set(a)) == 1 or len(set(b)) == 1)


def test_drawn_rows() -> None:
    assert drawn_rows(A) == ["0  ■■  2", "1  ··", "2  ■·  1"]
    many = dataclasses.replace(B, retrieval=B.retrieval * 4, kv_scores={})
    assert drawn_rows(many)[9:11] == [" 9  ■·  1", "10  ··"]
