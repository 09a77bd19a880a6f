"""DuoAttention's published patterns to head maps, and back.

A pattern is a folder of two files:

- ``full_attention_heads.tsv``, as numpy's ``savetxt`` writes it: a line per layer, on it a gate
  per KV head, the share of full attention in its output (papers/duoattention.txt, section 2.2).
- ``config.json``, the arguments of the training run; ``sink_size`` and ``recent_size`` are the
  first and most recent tokens that a streaming head saw in it.

The heads with the highest gates keep the whole context (section 2.3): all but a given fraction, the
sparsity, or those of at least a threshold.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from razor_dist.config.errors import HeadMapError
from razor_dist.heads.decision import Scores, by_rule, by_sparsity, rounded
from razor_dist.heads.head_map import HeadMap, first_fault

if TYPE_CHECKING:
    from transformers import PretrainedConfig

METHOD: Final = "duo"
KIND: Final = "gate"  # of score, in `HeadMap.kv_scores`
GATES_FILE: Final = "full_attention_heads.tsv"
CONFIG_FILE: Final = "config.json"

# The sizes of all published patterns, which DuoAttention's loader requires of any pattern.
_SIZES: Final = {"sink_size": 128, "recent_size": 256}
# Training clips the gates to [0, 1] before every step but not after the last, so published files
# hold values such as -0.0002, and DuoAttention clips when it loads. One step moves a gate by about
# the learning rate, 0.02 at most; a generous multiple of that is an error.
_OVERSHOOT: Final = 0.1


@dataclass(frozen=True)
class Pattern:
    gates: Scores  # [layers][KV heads], in [0, 1]
    config: dict[str, Any]  # of config.json; sink_size, recent_size and sparsity are checked
    clipped: int  # gates that were a little outside [0, 1] in the file


def read_pattern(folder: str | Path) -> Pattern:
    """Read a pattern folder; raise `HeadMapError` with the wrong file and line."""
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
    rows: list[list[float]] = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        # savetxt can also write a header.
        if line.strip() and not line.startswith("#"):
            rows.append(_gates(line, f"{path}, line {number}"))
            if len(rows[-1]) != len(rows[0]):
                raise HeadMapError(
                    f"{path}, line {number}: {len(rows[-1])} gates, but the first layer has "
                    f"{len(rows[0])}; every line needs one per KV head, separated by tabs"
                )
    if not rows:
        raise HeadMapError(f"{path} is empty; it needs a line of gates per layer")
    clipped = sum(not 0 <= gate <= 1 for row in rows for gate in row)
    gates = [[min(max(gate, 0.0), 1.0) for gate in row] for row in rows]
    return Pattern(rounded(gates), _config(folder / CONFIG_FILE), clipped)


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
        if not -_OVERSHOOT <= gate <= 1 + _OVERSHOOT:
            raise HeadMapError(
                f"{where}: invalid gate {word.strip()!r}; it must be a number from 0 to 1, and "
                "tabs must stand between gates"
            )
        gates.append(gate)
    return gates


class _TrainingConfig(BaseModel):
    """``config.json``; fields that are not named here are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    sink_size: int = Field(ge=0)
    recent_size: int = Field(ge=0)
    sparsity: float | None = Field(default=None, ge=0, le=1)


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise HeadMapError(
            f"the pattern folder {path.parent} has no {path.name}; it needs one with sink_size and "
            "recent_size, in tokens"
        )
    try:
        fields = from_json(_text(path), allow_inf_nan=False)
        return _TrainingConfig.model_validate(fields).model_dump()
    except ValidationError as error:
        raise HeadMapError(f"{path}: {first_fault(error)}") from error
    except ValueError as error:
        raise HeadMapError(f"{path}: invalid JSON: {error}") from error


def head_map(
    pattern: Pattern,
    model: str,
    config: PretrainedConfig,
    *,
    sparsity: float | None = None,
    threshold: float | None = None,
) -> HeadMap:
    """Build the head map that follows from a pattern's gates, for a model.

    Without `sparsity` and `threshold`, the sparsity is the one in the pattern's ``config.json``
    (`write_pattern` puts it there; the published ones have null), else `published_sparsity`.
    Raise `HeadMapError` if the pattern has other layers or KV heads than the model.
    """
    from razor_dist.models.shape import ModelShape

    shape = ModelShape.from_config(config)
    layers, heads = len(pattern.gates), len(pattern.gates[0])
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
    if sparsity is None and threshold is None:
        sparsity = pattern.config.get("sparsity")
    rule, retrieval = by_rule(pattern.gates, shape.group, sparsity=sparsity, threshold=threshold)
    used = (*_SIZES, "sparsity", "threshold")  # a rule becomes a setting, or is replaced
    training = {k: v for k, v in pattern.config.items() if k not in used and v is not None}
    sizes = {key: pattern.config[key] for key in _SIZES}
    return HeadMap.of_model(
        model,
        config,
        method=METHOD,
        settings={**rule, **sizes, "training": training},
        retrieval=retrieval,
        kv_scores={KIND: pattern.gates},
    )


def write_pattern(head_map: HeadMap, folder: str | Path) -> bool:
    """Write a head map as a pattern folder, for `read_pattern` and DuoAttention.

    The gates are the map's own if they give the same decision (then return True); otherwise they
    are 1 for a retrieval head and 0 for a streaming head. ``config.json`` gets the sizes and
    training settings of an imported map, and the fraction of streaming heads as ``sparsity``, so
    that importing the folder decides the same. Raise `HeadMapError` if a file exists already (a
    model's folder has a ``config.json``, too) or cannot be written, or if streaming heads have
    windows of their own, which a pattern cannot store.
    """
    if head_map.windows is not None:
        raise HeadMapError(
            f"the head map of {head_map.model!r} gives each streaming head a window of its own, "
            "and a DuoAttention pattern has one for all: it cannot be exported"
        )
    flags = [flag for row in head_map.retrieval for flag in row]
    # A fraction k / n, of which ceil(k / n (n - 1)) is k again for k below n.
    sparsity = flags.count(False) / len(flags)
    gates = rounded(head_map.kv_scores.get(KIND, ()))
    # False if the decision or the gates were edited by hand.
    own = bool(gates) and all(0 <= gate <= 1 for row in gates for gate in row)
    own = own and by_sparsity(gates, sparsity) == head_map.retrieval
    if not own:
        gates = tuple(tuple(map(float, row)) for row in head_map.retrieval)
    settings = head_map.settings if head_map.method == METHOD else {}
    training = settings.get("training")
    config = {
        **(training if isinstance(training, dict) else {"model_name": head_map.model}),
        **{key: settings.get(key, size) for key, size in _SIZES.items()},
        "sparsity": sparsity,
    }
    folder = Path(folder).expanduser()
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
    return own
