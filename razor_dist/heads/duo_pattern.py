"""DuoAttention's published patterns: folders of trained gates, to head maps and back.

A pattern is a folder with two files (papers/duoattention.txt, sections 2.2 and 2.3):

- ``full_attention_heads.tsv``, as numpy's ``savetxt`` writes it: a line per layer, on it a gate
  alpha per KV head, tab separated. The gate is the share of full attention in the head's output.
- ``config.json``, the arguments of the training run; ``sink_size`` and ``recent_size`` are what a
  streaming head saw in it.

**The decision.** The heads with the highest gates keep the whole context: all but a given fraction
(the sparsity), or those of at least a threshold. DuoAttention takes the quantile of the gates at
the sparsity for a threshold, after adding random noise so that equal gates (many are exactly 1)
do not fall on one side together. The same number of heads is kept here, but of equal gates the
lower layer's and then the lower head's comes first, so that two imports agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from razor_dist.errors import ConfigError, HeadMapError, ModelError
from razor_dist.heads.head_map import Flags, HeadMap, Scores, rounded

if TYPE_CHECKING:
    from razor_dist.models.shape import ModelShape

METHOD: Final = "duo"
KIND: Final = "gate"
"""The kind of score, in `HeadMap.kv_scores`."""

GATES_FILE: Final = "full_attention_heads.tsv"
CONFIG_FILE: Final = "config.json"

# With which all published patterns were trained. Given to maps of other methods when they are
# exported, because DuoAttention's loader wants the keys.
_SIZES: Final = {"sink_size": 128, "recent_size": 256}
# Keys of config.json that say how to decide; they become settings of their own or are replaced.
_RULES: Final = ("sparsity", "threshold")

# Training clips the gates to [0, 1] before every step but not after the last, so published files
# hold values such as -0.0002, and DuoAttention clips when it loads. One step moves a gate by about
# the learning rate, 0.02 at most; what is further out than a generous multiple is no gate.
_OVERSHOOT: Final = 0.1


@dataclass(frozen=True)
class Pattern:
    """What a pattern folder says.

    Attributes
    ----------
    gates : tuple
        ``[layers][KV heads]``, in [0, 1], rounded as a head map keeps scores.
    config : dict
        ``config.json``; ``sink_size``, ``recent_size`` and ``sparsity`` are checked.
    clipped : int
        Gates that were a little outside [0, 1] in the file.
    """

    gates: Scores
    config: dict[str, Any]
    clipped: int


def read_pattern(folder: str | Path) -> Pattern:
    """Read a pattern folder.

    Raises
    ------
    HeadMapError
        Names the file and line at fault, and says what would be right.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise HeadMapError(
            f"there is no folder {folder}; give one that holds {GATES_FILE} and {CONFIG_FILE}"
        )
    path = folder / GATES_FILE
    if not path.is_file():
        # The published patterns lie one folder deeper than the models' names.
        deeper = min((file.parent for file in folder.glob(f"*/{GATES_FILE}")), default=None)
        hint = "" if deeper is None else f"; did you mean {deeper}?"
        raise HeadMapError(f"the pattern folder {folder} has no {GATES_FILE}{hint}")
    rows = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        # What savetxt can write besides: a header, and nothing else.
        if line.strip() and not line.startswith("#"):
            rows.append(_gates(line, f"{path}, line {number}"))
            if len(rows[-1]) != len(rows[0]):
                raise HeadMapError(
                    f"{path}, line {number}: {len(rows[-1])} gates, but the first layer has "
                    f"{len(rows[0])}; every line needs one per KV head, separated by tabs"
                )
    if not rows:
        raise HeadMapError(f"{path} is empty; it needs a line of gates per layer")
    clipped = [[min(max(gate, 0.0), 1.0) for gate in row] for row in rows]
    changed = sum(
        a != b
        for old, new in zip(rows, clipped, strict=True)
        for a, b in zip(old, new, strict=True)
    )
    return Pattern(rounded(clipped), _config(folder / CONFIG_FILE), changed)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise HeadMapError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HeadMapError(f"{path} is not text in UTF-8: {error.reason}") from error


def _gates(line: str, where: str) -> list[float]:
    gates = []
    for word in line.split("\t"):
        try:
            gate = float(word)
        except ValueError:
            gate = math.nan
        if not math.isfinite(gate):
            raise HeadMapError(
                f"{where}: {word.strip()!r} is no number; a gate is from 0 to 1, and tabs stand "
                "between gates"
            )
        if not -_OVERSHOOT <= gate <= 1 + _OVERSHOOT:
            raise HeadMapError(f"{where}: {word.strip()} is no gate, which is from 0 to 1")
        gates.append(gate)
    return gates


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise HeadMapError(
            f"the pattern folder {path.parent} has no {path.name}; it needs one with sink_size and "
            "recent_size, in tokens"
        )
    try:
        config = json.loads(_text(path), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise HeadMapError(f"{path}, line {error.lineno}: no JSON: {error.msg}") from error
    except ValueError as error:
        raise HeadMapError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise HeadMapError(f"{path}: needs an object with sink_size and recent_size")
    for key in _SIZES:
        size = config.get(key)
        if not isinstance(size, int) or not _is_number(size) or size < 0:
            raise HeadMapError(
                f"{path}: {key} is {json.dumps(size)}; it must be a number of tokens, 0 or more"
            )
    sparsity = config.get("sparsity")
    if sparsity is not None and not (_is_number(sparsity) and 0 <= sparsity <= 1):
        raise HeadMapError(
            f"{path}: sparsity is {json.dumps(sparsity)}; it must be null or from 0 to 1"
        )
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"no JSON: {name}")


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
    _check_fraction("sparsity", sparsity)
    ranked = sorted(
        (-gate, layer, head) for layer, row in enumerate(gates) for head, gate in enumerate(row)
    )
    total = len(ranked)
    # Rounded first: 0.07 x 100 is 7.000000000000001, and no eighth head was asked for.
    local = total if sparsity == 1 else math.ceil(round(sparsity * (total - 1), 9))
    kept = {(layer, head) for _, layer, head in ranked[: total - local]}
    return tuple(
        tuple((layer, head) in kept for head in range(len(row))) for layer, row in enumerate(gates)
    )


def by_threshold(gates: Scores, threshold: float) -> Flags:
    """Keep the whole context of KV heads whose gate is at least ``threshold``.

    Equation (4) of the paper has "above"; DuoAttention's code, whose patterns these are, has "at
    least", and many gates are exactly 1.

    Raises
    ------
    ConfigError
        If the threshold is not from 0 to 1.
    """
    _check_fraction("threshold", threshold)
    return tuple(tuple(gate >= threshold for gate in row) for row in gates)


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be from 0 to 1, got {value}")


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
        See `read_pattern`.
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
        if key not in _SIZES and key not in _RULES and value is not None
    }
    return HeadMap(
        model=model,
        fingerprint=fingerprint,
        method=METHOD,
        settings={
            **rule,
            **{key: pattern.config[key] for key in _SIZES},
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
        ``smollm2`` (embedded), a local folder, or a hub id ``org/name``, of which that one file
        is fetched.

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
    from razor_dist.models import smollm2
    from razor_dist.models.loader import model_fingerprint, read_config
    from razor_dist.models.shape import ModelShape

    folder = Path(name).expanduser()
    if name == smollm2.NAME:
        folder = smollm2.embedded_model()
    elif folder.is_dir():
        name = folder.resolve().name
    else:
        folder = _fetch_config(name)
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {folder} has no config.json")
    config = read_config(folder)
    return name, ModelShape.from_config(config), model_fingerprint(config)


def _fetch_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except HFValidationError as error:
        raise ModelError(
            f"model {name!r}: there is no such folder; give a folder with config.json, a hub id "
            "such as org/name, or 'smollm2', the embedded model"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, EntryNotFoundError, OSError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model {name!r} is neither a folder here nor reachable on the Hugging Face hub "
            f"({cause}); a folder that holds just its config.json is enough"
        ) from error


def exported_gates(head_map: HeadMap) -> Scores | None:
    """The map's own gates, as a pattern file has them, if they give its decision back.

    None if it has none, or somebody edited the decision or the gates by hand.
    """
    own = head_map.kv_scores.get(KIND)
    if own is None or not all(0 <= gate <= 1 for row in own for gate in row):
        return None
    gates = rounded(own)
    return gates if by_sparsity(gates, _local_fraction(head_map)) == head_map.retrieval else None


def _local_fraction(head_map: HeadMap) -> float:
    """Fraction k / n of KV heads, of which ``ceil(k / n (n - 1))`` is k again for k below n."""
    flags = [flag for row in head_map.retrieval for flag in row]
    return flags.count(False) / len(flags)


def write_pattern(head_map: HeadMap, folder: str | Path) -> bool:
    """Write a head map as a pattern folder, which `read_pattern` and DuoAttention read.

    The gates are `exported_gates`; failing them 1 for a KV head that keeps the whole context and 0
    for the others.

    ``config.json`` gets the map's sizes and training settings where it was imported, and the
    fraction of local heads as ``sparsity``: importing the folder decides the same.

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
        If a file is there already or cannot be written.
    """
    folder = Path(folder).expanduser()
    own = exported_gates(head_map)
    gates = own or [[float(flag) for flag in row] for row in head_map.retrieval]
    settings: Mapping[str, Any] = head_map.settings if head_map.method == METHOD else {}
    config = {
        **settings.get("training", {"model_name": head_map.model}),
        **{key: settings.get(key, size) for key, size in _SIZES.items()},
        "sparsity": _local_fraction(head_map),
    }
    # 18 decimals in scientific notation, like savetxt.
    lines = ("\t".join(f"{gate:.18e}" for gate in row) + "\n" for row in gates)
    contents = {GATES_FILE: "".join(lines), CONFIG_FILE: json.dumps(config, indent=2) + "\n"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in contents:
            if (folder / name).exists():
                raise HeadMapError(f"{folder / name} is there already; give a new folder")
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeadMapError(f"cannot write the pattern to {folder}: {error.strerror}") from error
    return own is not None
