"""Head maps in numbers and text: one alone, or several side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.heads.decision import Scores
from razor_dist.heads.head_map import HeadMap


@dataclass(frozen=True)
class HeadMapSummary:
    """One head map in numbers; a kept head keeps the whole context."""

    name: str  # of the file
    model: str
    method: str
    selected: float | None  # fraction of query heads; None if the method selects none
    kept: float  # fraction of KV heads
    kept_heads: int
    kv_heads: int
    touched: int  # layers with a kept head
    layers: int

    @classmethod
    def of(cls, name: str, head_map: HeadMap) -> HeadMapSummary:
        rows = head_map.retrieval
        return cls(
            name=name,
            model=head_map.model,
            method=head_map.method,
            selected=head_map.selected_fraction if any(head_map.selected.values()) else None,
            kept=head_map.kv_fraction,
            kept_heads=sum(map(sum, rows)),
            kv_heads=sum(map(len, rows)),
            touched=sum(map(any, rows)),
            layers=len(rows),
        )

    def __str__(self) -> str:
        return (
            f"{self.kept_heads} of {self.kv_heads} KV heads ({self.kept:.1%}) on {self.touched} of "
            f"{self.layers} layers"
        )


@dataclass(frozen=True)
class Overlap:
    """Two sets A and B of heads."""

    both: int
    jaccard: float  # heads in both, as a fraction of those in either; 1 if there are none
    a_in_b: float | None  # fraction of A's heads that are in B; None if A is empty
    b_in_a: float | None

    @classmethod
    def of(cls, a: set[tuple[int, int]], b: set[tuple[int, int]]) -> Overlap:
        both, either = len(a & b), len(a | b)
        return cls(
            both=both,
            jaccard=both / either if either else 1.0,
            a_in_b=both / len(a) if a else None,
            b_in_a=both / len(b) if b else None,
        )


@dataclass(frozen=True)
class Pair:
    a: str
    b: str
    kv_heads: Overlap  # of KV heads that keep the whole context
    query_heads: Overlap | None  # of selected query heads; None if a map selects none
    correlations: dict[str, float | None]  # by kind of score, for kinds that both maps have


@dataclass(frozen=True)
class Comparison:
    """Several head maps, in the order given, all pairs, and reasons to doubt the result."""

    maps: tuple[HeadMapSummary, ...]
    pairs: tuple[Pair, ...]
    warnings: tuple[str, ...]


def compare(maps: Sequence[tuple[str, HeadMap]]) -> Comparison:
    """Compare named head maps; `HeadMapError` if their models differ in size."""
    if len(maps) < 2:
        raise ConfigError(f"comparing needs two head maps or more, got {len(maps)}")
    (first, a), *others = maps
    for name, b in others:
        for (what, mine), theirs in zip(a.sizes.items(), b.sizes.values(), strict=True):
            if mine != theirs:
                raise HeadMapError(
                    f"cannot compare maps of different models: {first}, made for {a.model!r}, has "
                    f"{mine} {what}, but {name}, made for {b.model!r}, has {theirs}"
                )
    # A map for any model ("full", "streaming") raises no doubt.
    bound = [(name, head_map) for name, head_map in maps if head_map.fingerprint != "any"]
    return Comparison(
        maps=tuple(HeadMapSummary.of(name, head_map) for name, head_map in maps),
        pairs=tuple(_pair(*a, *b) for a, b in combinations(maps, 2)),
        warnings=tuple(
            f"{bound[0][0]} is for {bound[0][1].model!r} and {name} for {head_map.model!r}: models "
            "of the same sizes, but with different configurations"
            for name, head_map in bound[1:]
            if head_map.fingerprint != bound[0][1].fingerprint
        ),
    )


def _pair(a_name: str, a: HeadMap, b_name: str, b: HeadMap) -> Pair:
    a_kept, b_kept = (
        {(i, j) for i, row in enumerate(m.retrieval) for j, flag in enumerate(row) if flag}
        for m in (a, b)
    )
    a_selected, b_selected = (set(chain.from_iterable(m.selected.values())) for m in (a, b))
    return Pair(
        a=a_name,
        b=b_name,
        kv_heads=Overlap.of(a_kept, b_kept),
        query_heads=Overlap.of(a_selected, b_selected) if a_selected and b_selected else None,
        correlations={
            kind: rank_correlation(mine[kind], theirs[kind])
            for mine, theirs in ((a.scores, b.scores), (a.kv_scores, b.kv_scores))
            for kind in mine
            if kind in theirs
        },
    )


def rank_correlation(a: Scores, b: Scores) -> float | None:
    """Compute Spearman's rank correlation, ties sharing their mean rank; None if all are equal."""
    try:
        return statistics.correlation(_ranks(a), _ranks(b))
    except statistics.StatisticsError:
        return None


def _ranks(scores: Scores) -> list[float]:
    places: dict[float, list[int]] = {}
    flat = list(chain.from_iterable(scores))
    for place, value in enumerate(sorted(flat)):
        places.setdefault(value, []).append(place)
    return [(places[value][0] + places[value][-1]) / 2 for value in flat]


def drawn_rows(head_map: HeadMap) -> list[str]:
    """Draw a line per layer: number, ``■`` (retrieval) or ``·`` for each head, sum of ``■``."""
    width = len(str(len(head_map.retrieval) - 1))
    lines = []
    for layer, row in enumerate(head_map.retrieval):
        marks = "".join("■" if flag else "·" for flag in row)
        lines.append(f"{layer:>{width}}  {marks}  {sum(row) or ''}".rstrip())
    return lines
