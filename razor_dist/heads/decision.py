"""Rules that turn heads' scores into the KV heads that keep the whole context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import Field

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.validation import check_fraction, check_percent

Score: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Scores: TypeAlias = tuple[tuple[Score, ...], ...]
"""``[layers][query heads]``, or ``[layers][KV heads]`` in `HeadMap.kv_scores`."""
Flags: TypeAlias = tuple[tuple[bool, ...], ...]
"""``[layers][KV heads]``: True for a retrieval head."""
Windows: TypeAlias = tuple[tuple[Annotated[int, Field(ge=1)] | None, ...], ...]
"""``[layers][KV heads]``: each streaming head's window, in tokens; None for a retrieval head."""
Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""``(layer, head)`` pairs, the highest score first."""

NOT_FINITE = "check the model's weights, or try --dtype fp32"  # ends a message


class HeadRoles(NamedTuple):
    """The roles of a model's heads in an engine."""

    retrieval: Sequence[Sequence[bool]]  # as `Flags`
    windows: Windows | None = None
    sources: Sequence[tuple[int, int]] = ()  # (layer, query head) whose weights give sources


class Decision(NamedTuple):
    """Retrieval heads, and the query heads selected for each kind of score."""

    retrieval: Flags
    selected: dict[str, Pairs]


def rounded(scores: Sequence[Sequence[float]]) -> Scores:
    """Round scores to the 6 significant digits that a head map keeps.

    Rounded scores decide, so that a file's decision can be checked and noise in last bits does not
    matter. Raise `ModelError` for a score that is not finite.
    """
    for layer, row in enumerate(scores):
        for head, score in enumerate(row):
            if not math.isfinite(score):
                raise ModelError(
                    f"the score of head {head} in layer {layer} is {score}: {NOT_FINITE}"
                )
    return tuple(tuple(float(f"{score:.6g}") for score in row) for row in scores)


def ranked(scores: Scores) -> Pairs:
    """Sort all ``(layer, head)`` by score, the best first; equal scores by layer, then head."""
    order = sorted(
        (-score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row)
    )
    return tuple((layer, head) for _, layer, head in order)


def flags(kept: Iterable[tuple[int, int]], layers: int, heads: int) -> Flags:
    """Make a table ``[layers][heads]`` that is True for each ``(layer, head)`` in ``kept``."""
    kept = set(kept)
    return tuple(tuple((layer, head) in kept for head in range(heads)) for layer in range(layers))


def heads_of_percent(percent: float, heads: int) -> int:
    """Count ``percent`` of ``heads``, halves rounded up, and at least 1 if it is above 0."""
    count = math.floor(percent * heads / 100 + 0.5)
    return max(count, 1) if percent > 0 else count


def decide(
    scores: Mapping[str, Scores], induction_percent: float, echo_percent: float, group: int
) -> Decision:
    """Choose the retrieval heads: the best by induction score and the best by echo score.

    The paper's Table 2 takes the top 14 % and 1 % of all query heads. A KV head is a retrieval
    head if any query head of its group was chosen for either score (section 4.1 of the paper).
    ``group`` is the number of query heads per KV head.
    """
    selected: dict[str, Pairs] = {}
    for kind, percent in (("induction", induction_percent), ("echo", echo_percent)):
        check_percent(kind, percent)
        order = ranked(scores[kind])
        selected[kind] = order[: heads_of_percent(percent, len(order))]
    promoted = {(layer, head // group) for pairs in selected.values() for layer, head in pairs}
    layers, kv_heads = len(scores["induction"]), len(scores["induction"][0]) // group
    return Decision(flags(promoted, layers, kv_heads), selected)


def published_sparsity(group: int) -> float:
    """Return the sparsity of DuoAttention's experiments: 0.75, or 0.5 with grouped heads."""
    return 0.5 if group > 1 else 0.75


def check_rule(sparsity: float | None, threshold: float | None = None) -> None:
    """Raise `ConfigError` if both rules are given, or one is not from 0 to 1."""
    if sparsity is not None and threshold is not None:
        raise ConfigError("give sparsity or threshold, not both: each decides alone")
    for name, value in (("sparsity", sparsity), ("threshold", threshold)):
        if value is not None:
            check_fraction(name, value)


def by_sparsity(scores: Scores, sparsity: float) -> Flags:
    """Make the fraction ``sparsity`` of all KV heads, the lowest scores, streaming heads.

    They are ``ceil(sparsity (n - 1))`` of n, as many as are below numpy's interpolated quantile,
    which DuoAttention uses; a sparsity of 1 takes all n. DuoAttention adds noise to break ties;
    here, of equal scores, those of higher layers and then of higher heads are taken first.
    """
    order = ranked(scores)
    total = len(order)
    # Rounded first: 0.07 x 100 is 7.000000000000001, which asks for no eighth head.
    streaming = total if sparsity == 1 else math.ceil(round(sparsity * (total - 1), 9))
    return flags(order[: total - streaming], len(scores), len(scores[0]))


def by_threshold(scores: Scores, threshold: float) -> Flags:
    """Make KV heads that score at least ``threshold`` retrieval heads.

    Equation (4) of the paper has "above". DuoAttention's code has "at least", which matters since
    many of its gates are exactly 1.
    """
    return tuple(tuple(score >= threshold for score in row) for row in scores)


def by_rule(
    scores: Scores, group: int, *, sparsity: float | None = None, threshold: float | None = None
) -> tuple[dict[str, float], Flags]:
    """Decide by the given rule, or else by `published_sparsity`; return the rule and the decision.

    Raise `ConfigError` as `check_rule`.
    """
    check_rule(sparsity, threshold)
    if threshold is not None:
        return {"threshold": threshold}, by_threshold(scores, threshold)
    sparsity = published_sparsity(group) if sparsity is None else sparsity
    return {"sparsity": sparsity}, by_sparsity(scores, sparsity)


def spread(kept: float, layers: int, kv_heads: int) -> Flags:
    """Make a fraction of the KV heads, at least one, retrieval heads, evenly spread."""
    total = layers * kv_heads
    count = max(1, round(kept * total))
    flat = [(i + 1) * count // total > i * count // total for i in range(total)]
    return tuple(tuple(flat[i : i + kv_heads]) for i in range(0, total, kv_heads))
