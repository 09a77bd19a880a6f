"""Head maps at a budget: as many KV heads as memory allows, chosen by a map's own scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.heads.decision import Flags, Pairs, flags, heads_of_percent, ranked
from razor_dist.heads.head_map import HeadMap

# RazorAttention's Table 4 varies the share of induction heads beside 1 % of echo heads.
_ECHO_PERCENT: Final = 1.0


@dataclass(frozen=True)
class Choice:
    """The KV heads that a map would keep at a budget.

    Attributes
    ----------
    kept : tuple
        ``(layer, KV head)`` in the order in which they were chosen. A larger budget's begins with
        a smaller one's.
    retrieval : tuple
        The same as a decision, ``[layers][KV heads]`` bool.
    selected : dict
        For a map with scores of query heads: how many were selected by each score.
    """

    kept: Pairs
    retrieval: Flags
    selected: dict[str, int] = field(default_factory=dict)


def kv_budget(head_map: HeadMap, percent: float) -> int:
    """KV heads that are ``percent`` of all: see `heads_of_percent`.

    Raises
    ------
    ConfigError
        Unless the percentage is above 0 and at most 100.
    """
    if not 0 < percent <= 100:
        raise ConfigError(f"a budget must be a percentage above 0 and up to 100, got {percent:g}")
    return heads_of_percent(percent, sum(map(len, head_map.retrieval)))


def choose(head_map: HeadMap, kv_heads: int) -> Choice:
    """Choose the best KV heads by a map's own scores; equal scores by layer, then head.

    A score of KV heads ranks them directly. RazorAttention's scores are of query heads: the best
    1 % of all by echo score, whatever the budget, then one by one by induction score, until the
    groups that they promote are as many as the budget. Each adds one KV head at most, so the budget
    is met exactly.

    Parameters
    ----------
    head_map : HeadMap
        With induction and echo scores, or with one score of KV heads.
    kv_heads : int
        The budget, from 1 to all KV heads.

    Raises
    ------
    HeadMapError
        If the map has no such scores.
    """
    layers, heads = len(head_map.retrieval), len(head_map.retrieval[0])
    if head_map.scores.keys() >= {"induction", "echo"}:
        kept, selected = _by_query_heads(head_map, kv_heads)
    elif len(head_map.kv_scores) == 1 and not head_map.scores:
        (scores,) = head_map.kv_scores.values()
        kept, selected = ranked(scores)[:kv_heads], {}
    else:
        kinds = [*head_map.scores, *head_map.kv_scores]
        raise HeadMapError(
            f"a head map of method {head_map.method!r} with scores {kinds} ranks no KV heads: it "
            "needs induction and echo scores, or one score of KV heads"
        )
    return Choice(kept, flags(kept, layers, heads), selected)


def _by_query_heads(head_map: HeadMap, kv_heads: int) -> tuple[Pairs, dict[str, int]]:
    echo = ranked(head_map.scores["echo"])
    echo = echo[: heads_of_percent(_ECHO_PERCENT, len(echo))]
    selected = {"echo": 0, "induction": 0}
    # Insertion-ordered: the KV heads, first come first.
    kept: dict[tuple[int, int], None] = {}
    for kind, order in (("echo", echo), ("induction", ranked(head_map.scores["induction"]))):
        for layer, head in order:
            if len(kept) == kv_heads:
                break
            selected[kind] += 1
            kept[layer, head // head_map.group] = None
    return tuple(kept), selected
