"""DuoAttention's published patterns to head maps, and back; `duo_folder` has their files.

A pattern has a gate alpha per KV head, the share of full attention in the head's trained output
(papers/duoattention.txt, section 2.2).

**The decision** (section 2.3). The heads with the highest gates keep the whole context: all but a
given fraction (the sparsity), or those of at least a threshold. DuoAttention takes the quantile of
the gates at the sparsity for a threshold, after adding random noise so that equal gates (many are
exactly 1) do not fall on one side together. The same number of heads is kept here, but of equal
gates the lower layer's and then the lower head's comes first, so that two imports agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.ranges import check_fraction
from razor_dist.heads.decision import Flags, Scores, flags, ranked, rounded
from razor_dist.heads.duo.folder import GATES_FILE, SIZES, Pattern, write_folder
from razor_dist.heads.head_map import HeadMap

if TYPE_CHECKING:
    from razor_dist.models.shape import ModelShape

METHOD: Final = "duo"
KIND: Final = "gate"
"""The kind of score, in `HeadMap.kv_scores`."""

# Keys of config.json that say how to decide; they become settings of their own or are replaced.
_RULES: Final = ("sparsity", "threshold")


def published_sparsity(group: int) -> float:
    """The sparsity of the paper's experiments (section 3): 0.75 without, 0.5 with grouped heads.

    Parameters
    ----------
    group : int
        Query heads per KV head.
    """
    return 0.5 if group > 1 else 0.75


def by_sparsity(gates: Scores, sparsity: float) -> Flags:
    """Make the fraction ``sparsity`` of all KV heads local, those with the lowest gates.

    The number is the one that lies below numpy's interpolated quantile when all gates differ,
    ``ceil(sparsity (n - 1))`` of n, and all n at 1. Of equal gates, the lower layer's and then
    the lower head's is the last to become local.

    Parameters
    ----------
    gates : tuple
        ``[layers][KV heads]``.
    sparsity : float
        From 0 to 1.

    Returns
    -------
    tuple
        ``[layers][KV heads]`` bool: whether a head keeps the whole context.

    Raises
    ------
    ConfigError
        If the sparsity is out of range.
    """
    check_fraction("sparsity", sparsity)
    order = ranked(gates)
    total = len(order)
    # Rounded first: 0.07 x 100 is 7.000000000000001, and no eighth head was asked for.
    local = total if sparsity == 1 else math.ceil(round(sparsity * (total - 1), 9))
    return flags(order[: total - local], len(gates), len(gates[0]))


def by_threshold(gates: Scores, threshold: float) -> Flags:
    """Keep the whole context of KV heads whose gate is at least ``threshold``.

    Equation (4) of the paper has "above"; DuoAttention's code, whose patterns these are, has "at
    least", and many gates are exactly 1.

    Raises
    ------
    ConfigError
        If the threshold is not from 0 to 1.
    """
    check_fraction("threshold", threshold)
    return tuple(tuple(gate >= threshold for gate in row) for row in gates)


def head_map(
    pattern: Pattern,
    model: str,
    shape: ModelShape,
    fingerprint: str,
    *,
    sparsity: float | None = None,
    threshold: float | None = None,
) -> HeadMap:
    """The head map that a pattern's gates decide for a model.

    Parameters
    ----------
    pattern : Pattern
        See `duo_folder.read_pattern`.
    model : str
        As people know it.
    shape : ModelShape
        Of the model.
    fingerprint : str
        `razor_dist.models.loader.model_fingerprint` of its configuration.
    sparsity : float, optional
        See `by_sparsity`. If neither is given, it is the one in the pattern's ``config.json``
        (`write_pattern` puts it there; the published ones have null), else `published_sparsity`.
    threshold : float, optional
        See `by_threshold`.

    Raises
    ------
    ConfigError
        If both are given, or one is out of range.
    HeadMapError
        If the pattern has other layers or KV heads than the model.
    """
    if sparsity is not None and threshold is not None:
        raise ConfigError("give sparsity or threshold, not both: each decides alone")
    _check_sizes(pattern.gates, model, shape)
    rule: dict[str, float]
    if threshold is not None:
        rule, retrieval = {"threshold": threshold}, by_threshold(pattern.gates, threshold)
    else:
        if sparsity is None:
            sparsity = pattern.config.get("sparsity")
        if sparsity is None:
            sparsity = published_sparsity(shape.group)
        rule, retrieval = {"sparsity": sparsity}, by_sparsity(pattern.gates, sparsity)
    training = {
        key: value
        for key, value in pattern.config.items()
        if key not in SIZES and key not in _RULES and value is not None
    }
    return HeadMap(
        model=model,
        fingerprint=fingerprint,
        method=METHOD,
        settings={
            **rule,
            **{key: pattern.config[key] for key in SIZES},
            "training": training,
        },
        query_heads=shape.query_heads,
        retrieval=retrieval,
        selected={},
        scores={},
        kv_scores={KIND: pattern.gates},
    )


def _check_sizes(gates: Scores, model: str, shape: ModelShape) -> None:
    layers, heads = len(gates), len(gates[0])
    if layers != shape.layers:
        raise HeadMapError(
            f"{GATES_FILE} has {layers} lines of gates, but {model!r} has {shape.layers} layers; "
            "it needs a line per layer"
        )
    if heads != shape.kv_heads:
        raise HeadMapError(
            f"{GATES_FILE} has {heads} gates a line, but {model!r} has {shape.kv_heads} KV heads "
            f"(and {shape.query_heads} query heads); it needs a gate per KV head"
        )


def model_facts(name: str) -> tuple[str, ModelShape, str]:
    """What a head map must know of a model, read from its ``config.json`` alone.

    Parameters
    ----------
    name : str
        As `razor_dist.models.registry.config_folder` takes it.

    Returns
    -------
    str
        The model's name, for people.
    ModelShape
    str
        Its fingerprint.

    Raises
    ------
    ModelError
        If there is no such model, or its attention is not supported.
    """
    # Imported here: reading, comparing and exporting maps needs no transformers.
    from razor_dist.models.loader import model_fingerprint, read_config
    from razor_dist.models.registry import config_folder, display_name
    from razor_dist.models.shape import ModelShape

    config = read_config(config_folder(name))
    return display_name(name), ModelShape.from_config(config), model_fingerprint(config)


def exported_gates(head_map: HeadMap) -> Scores | None:
    """The map's own gates, as a pattern file has them, if they give its decision back.

    None if it has none, or somebody edited the decision or the gates by hand.
    """
    own = head_map.kv_scores.get(KIND)
    if own is None or not all(0 <= gate <= 1 for row in own for gate in row):
        return None
    gates = rounded(own)
    return (
        gates if by_sparsity(gates, _streaming_fraction(head_map)) == head_map.retrieval else None
    )


def _streaming_fraction(head_map: HeadMap) -> float:
    """Fraction k / n of KV heads, of which ``ceil(k / n (n - 1))`` is k again for k below n."""
    flags = [flag for row in head_map.retrieval for flag in row]
    return flags.count(False) / len(flags)


def write_pattern(head_map: HeadMap, folder: str | Path) -> bool:
    """Write a head map as a pattern folder, which `duo_folder.read_pattern` and DuoAttention read.

    The gates are `exported_gates`; failing them 1 for a KV head that keeps the whole context and 0
    for the others.

    ``config.json`` gets the map's sizes and training settings where it was imported, and the
    fraction of streaming heads as ``sparsity``: importing the folder decides the same.

    Parameters
    ----------
    head_map : HeadMap
        Of any method.
    folder : str or Path
        Made if missing. Files of a pattern that are there already are not replaced: a model's
        folder has a ``config.json`` too.

    Returns
    -------
    bool
        Whether the gates are the map's own.

    Raises
    ------
    HeadMapError
        If a file is there already or cannot be written, or streaming heads have windows of their
        own, which a pattern cannot say.
    """
    if head_map.windows is not None:
        raise HeadMapError(
            f"the head map of {head_map.model!r} gives each streaming head its own window, and a "
            "DuoAttention pattern has one for all: it cannot be exported"
        )
    own = exported_gates(head_map)
    gates = own or [[float(flag) for flag in row] for row in head_map.retrieval]
    settings: Mapping[str, Any] = head_map.settings if head_map.method == METHOD else {}
    training = settings.get("training")
    config = {
        **(training if isinstance(training, dict) else {"model_name": head_map.model}),
        **{key: settings.get(key, size) for key, size in SIZES.items()},
        "sparsity": _streaming_fraction(head_map),
    }
    write_folder(folder, gates, config)
    return own is not None
