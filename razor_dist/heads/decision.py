"""From heads' scores to the KV heads that keep the whole context; what both are written as."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import Field

from razor_dist.config.ranges import check_percent

Score: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Scores: TypeAlias = tuple[tuple[Score, ...], ...]
"""``[layers][query heads]``, or ``[layers][KV heads]`` in `HeadMap.kv_scores`."""
Flags: TypeAlias = tuple[tuple[bool, ...], ...]
"""``[layers][KV heads]``."""
Windows: TypeAlias = tuple[tuple[Annotated[int, Field(ge=1)] | None, ...], ...]
"""``[layers][KV heads]``: windows of their own that streaming heads have, in tokens."""
Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""``(layer, head)`` pairs, the highest score first."""

# Significant digits with which scores are written and decided upon: what a reader of the file can
# check is what was decided, and noise in the last bits of a float cannot order two heads.
_DIGITS = 6


class Decision(NamedTuple):
    """What `decide` makes of scores."""

    retrieval: Flags
    selected: dict[str, Pairs]


def decide(
    scores: Mapping[str, Scores], induction_percent: float, echo_percent: float, group: int
) -> Decision:
    """Choose the retrieval heads: the best by induction score and the best by echo score.

    The paper's Table 2 takes the top 14 % and 1 % of all query heads. Their number is
    `heads_of_percent`. Equal scores are ordered by layer, then head. A KV head is a retrieval head
    if any query head of its group was chosen for either score (section 4.1 of the paper, on GQA).

    Parameters
    ----------
    scores : mapping
        ``induction`` and ``echo``: ``[layers][query heads]``, see `rounded`.
    induction_percent, echo_percent : float
        Of all query heads, 0 to 100.
    group : int
        Query heads per KV head.

    Returns
    -------
    Decision

    Raises
    ------
    ConfigError
        If a percentage is out of range.
    """
    percents = {"induction": induction_percent, "echo": echo_percent}
    selected: dict[str, Pairs] = {}
    for kind, percent in percents.items():
        check_percent(kind, percent)
        order = ranked(scores[kind])
        selected[kind] = order[: heads_of_percent(percent, len(order))]
    promoted = {(layer, head // group) for pairs in selected.values() for layer, head in pairs}
    layers, kv_heads = len(scores["induction"]), len(scores["induction"][0]) // group
    return Decision(flags(promoted, layers, kv_heads), selected)


def heads_of_percent(percent: float, heads: int) -> int:
    """How many heads are ``percent`` of ``heads``.

    Rounded to the nearest whole (halves up), and at least 1 for a percentage above 0.
    """
    count = math.floor(percent * heads / 100 + 0.5)
    return max(count, 1) if percent > 0 else count


def rounded(scores: Sequence[Sequence[float]]) -> Scores:
    """Scores as a head map keeps them: 6 significant digits."""
    return tuple(tuple(float(f"{score:.{_DIGITS}g}") for score in row) for row in scores)


def ranked(scores: Scores) -> Pairs:
    """All ``(layer, head)``, the best score first; equal scores by layer, then head."""
    order = sorted(
        (-score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row)
    )
    return tuple((layer, head) for _, layer, head in order)


def flags(kept: Iterable[tuple[int, int]], layers: int, heads: int) -> Flags:
    """A table ``[layers][heads]`` of which ``(layer, head)`` are in ``kept``."""
    kept = set(kept)
    return tuple(tuple((layer, head) in kept for head in range(heads)) for layer in range(layers))


def spread(kept: float, layers: int, kv_heads: int) -> Flags:
    """A decision that keeps a fraction of the KV heads, evenly spread over the model.

    For sizes alone, where no head map is at hand. At least one head is kept, and the count is the
    nearest to ``kept`` of all.
    """
    total = layers * kv_heads
    count = max(1, round(kept * total))
    flat = [(i + 1) * count // total > i * count // total for i in range(total)]
    return tuple(tuple(flat[i : i + kv_heads]) for i in range(0, total, kv_heads))
