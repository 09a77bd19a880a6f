"""The folders in which DuoAttention publishes trained gates: two files, read and written.

- ``full_attention_heads.tsv``, as numpy's ``savetxt`` writes it: a line per layer, on it a gate
  per KV head, tab separated.
- ``config.json``, the arguments of the training run; ``sink_size`` and ``recent_size`` are what a
  streaming head saw in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from razor_dist.config.errors import HeadMapError
from razor_dist.heads.decision import Scores, rounded

GATES_FILE: Final = "full_attention_heads.tsv"
CONFIG_FILE: Final = "config.json"

# With which all published patterns were trained. Given to maps of other methods when they are
# exported, because DuoAttention's loader wants the keys.
SIZES: Final = {"sink_size": 128, "recent_size": 256}
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
    for key in SIZES:
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


def write_folder(
    folder: str | Path, gates: Sequence[Sequence[float]], config: Mapping[str, Any]
) -> None:
    """Write a pattern folder.

    Parameters
    ----------
    folder : str or Path
        Made if missing. Files of a pattern that are there already are not replaced: a model's
        folder has a ``config.json`` too.
    gates : sequence
        ``[layers][KV heads]``, from 0 to 1.
    config : mapping
        With ``sink_size`` and ``recent_size``.

    Raises
    ------
    HeadMapError
        If a file is there already or cannot be written.
    """
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
