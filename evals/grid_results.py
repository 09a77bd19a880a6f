"""The answers of a grid: the file that keeps them as they come, and what they come to.

A cell that is in the file, with the same settings, is not run again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.evals.grid import FULL, Place
from razor_dist.evals.markdown import markdown
from razor_dist.files import replacing


@dataclass(frozen=True)
class Cell:
    """One question and its answer.

    Attributes
    ----------
    method : str
    length : int
        Tokens of the document.
    depth : int
        Percent of the document before the needle.
    needle : int
        Which of the needles of this length and depth, from 0.
    expected, answer : str
    right : bool
    kv_bytes : int
        Measured bytes of KV cache that the document holds once prefilled.
    prefill_seconds : float
        Of the whole document, on a machine that may have been busy. Methods with exact prefill may
        have shared it.
    settings : str
        `Method.fingerprint`.
    """

    method: str
    length: int
    depth: int
    needle: int
    expected: str
    answer: str
    right: bool
    kv_bytes: int
    prefill_seconds: float
    settings: str

    @property
    def place(self) -> Place:
        """Which document."""
        return self.length, self.depth, self.needle

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What a newer result replaces."""
        return self.method, *self.place


class Results:
    """The cells in a JSON file, complete after each `add`; one process at a time may write it.

    Parameters
    ----------
    path : Path or None
        None keeps them in memory only.
    about : mapping
        What all cells share; written before them.
    order : sequence of str
        Methods in the order in which to list them; others follow.

    Raises
    ------
    ConfigError
        If the file holds the results of something else, or is no file of results.
    """

    def __init__(
        self, path: Path | None, about: Mapping[str, Any], order: Sequence[str] = ()
    ) -> None:
        self.path, self._about = path, dict(about)
        self._order = {name: rank for rank, name in enumerate(order)}
        self._cells: dict[tuple[str, int, int, int], Cell] = {}
        self._report: Mapping[str, Any] = {}
        if path is not None and path.exists():
            try:
                stored = json.loads(path.read_text())
                cells = [Cell(**cell) for cell in stored["cells"]]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path} is no file of results ({error}); give another"
                ) from error
            for name, value in self._about.items():
                if stored.get(name) != value:
                    raise ConfigError(
                        f"{path} holds results with {name} {stored.get(name)!r}, not {value!r}; "
                        "give another --out"
                    )
            self._cells = {cell.key: cell for cell in cells}

    @property
    def cells(self) -> list[Cell]:
        """All cells, in the order of methods, lengths and depths."""
        last = len(self._order)
        return sorted(self._cells.values(), key=lambda c: (self._order.get(c.method, last), *c.key))

    def has(self, key: tuple[str, int, int, int], settings: str) -> bool:
        """Whether a cell was run with these settings."""
        cell = self._cells.get(key)
        return cell is not None and cell.settings == settings

    def add(self, cells: Iterable[Cell]) -> None:
        """Store cells, in place of older ones of the same key."""
        self._cells.update((cell.key, cell) for cell in cells)
        self._write()

    def conclude(self, report: Mapping[str, Any]) -> None:
        """Store what follows from the cells, under names of its own."""
        self._report = report
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        lines = ",\n".join("  " + json.dumps(asdict(cell)) for cell in self.cells)
        text = json.dumps({**self._about, **self._report}, indent=1).removesuffix("\n}")
        with replacing(self.path) as draft:
            draft.write_text(f'{text},\n "cells": [\n{lines}\n ]\n}}\n')


@dataclass(frozen=True)
class Score:
    """A method over documents.

    Attributes
    ----------
    right, total : int
        Answers.
    lost, gained : int
        Needles that full attention finds and the method does not, and the opposite, where both
        were asked.
    kv_bytes : float
        Median over the longest documents, measured; 0 if there are none.
    by_length : dict
        For each length, right answers and all.
    """

    right: int
    total: int
    lost: int
    gained: int
    kv_bytes: float
    by_length: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, method: str, cells: Sequence[Cell]) -> Score:
        """Count among ``cells``, which hold those of other methods too."""
        full = {cell.place: cell.right for cell in cells if cell.method == FULL}
        longest = max((cell.length for cell in cells), default=0)
        own = [cell for cell in cells if cell.method == method]
        lengths = sorted({cell.length for cell in own})
        return cls(
            right=sum(cell.right for cell in own),
            total=len(own),
            lost=sum(full.get(cell.place, False) and not cell.right for cell in own),
            gained=sum(cell.right and not full.get(cell.place, True) for cell in own),
            kv_bytes=statistics.median(
                [cell.kv_bytes for cell in own if cell.length == longest] or [0]
            ),
            by_length={
                length: (
                    sum(cell.right for cell in own if cell.length == length),
                    sum(cell.length == length for cell in own),
                )
                for length in lengths
            },
        )

    @property
    def accuracy(self) -> float | None:
        """Right answers of all; None if nothing was asked."""
        return self.right / self.total if self.total else None

    def row(self, lengths: Sequence[int]) -> list[str]:
        """The columns that `score_heads` names; a hyphen where nothing was run."""
        parts = [self.by_length.get(length, (0, 0)) for length in lengths]
        return [
            *(_of(*part) for part in parts),
            _of(self.right, self.total),
            str(self.lost),
            str(self.gained),
            f"{self.kv_bytes / 2**20:.0f}" if self.kv_bytes else "-",
        ]


def score_heads(lengths: Sequence[int]) -> list[str]:
    """Headings of `Score.row`."""
    return [*map(str, lengths), "all", "lost", "gained", f"KV at {max(lengths)}, MiB"]


def _of(right: int, total: int) -> str:
    return f"{right}/{total}" if total else "-"


def table(cells: Sequence[Cell]) -> str:
    """A Markdown table of right answers, methods by lengths: see `Score`."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = sorted({cell.length for cell in cells})
    rows = [[method, *Score.of(method, cells).row(lengths)] for method in methods]
    return markdown([["method", *score_heads(lengths)], *rows])
