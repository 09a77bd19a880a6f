"""Results of needle tests as cells and means."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from razor_dist.evals.methods import FULL
from razor_dist.evals.report import Run, grouped, markdown

KIND = "needle"  # of task, in the settings of a needle test


@dataclass(frozen=True)
class Cell:
    method: str
    length: int  # tokens of prompt and answer, in a grid of the document
    depth: float  # percent of the document before the needle
    repeat: int
    needle: int
    expected: str
    answer: str
    score: float  # from 0 to 1

    @property
    def place(self) -> tuple[int, float, int, int]:
        """Return the key that this cell shares with the same cell of other methods."""
        return self.length, self.depth, self.repeat, self.needle


@dataclass(frozen=True)
class MethodSummary:
    score: float | None  # the mean; None if nothing was asked
    cells: int
    by_length: Mapping[int, float]
    lost: int  # answers below full attention's score of the same cell
    gained: int  # answers above it
    failed: int  # documents whose questions have no answer
    # Medians at the longest length that was run; kv_bytes of the rank that holds most.
    kv_bytes: int | None
    prefill_seconds: float | None


class NeedleResults:
    """Answers of several methods to the same questions; ``failed`` says why others are missing."""

    def __init__(
        self, results: Sequence[Mapping[str, Any]], failed: Mapping[str, str] | None = None
    ) -> None:
        self.results, self.failed = results, failed or {}
        self.cells = [
            Cell(result["method"], result["length"], repeat=result["repeat"], **cell)
            for result in results
            for cell in result["cells"]
        ]

    def found(self, method: str, length: int | None = None) -> str:
        """Count the answers with a score of 1, of all, such as 9/10; a hyphen if there is none."""
        own = [
            cell.score == 1
            for cell in self.cells
            if cell.method == method and length in (None, cell.length)
        ]
        return f"{sum(own)}/{len(own)}" if own else "-"

    def table(self, methods: Mapping[str, Sequence[str]], head: Sequence[str] = ()) -> str:
        """Return a Markdown table of needles found, methods by lengths.

        Methods may have cells of their own, under ``head``. A hyphen stands where nothing was
        asked.
        """
        lengths = sorted({cell.length for cell in self.cells})
        kept = f"KV at {max(lengths)}, MiB"
        rows = [["method", *head, *map(str, lengths), "all", "lost", "gained", kept]]
        for method, own in methods.items():
            found = self.summary(method)
            kv = found.kv_bytes if max(lengths) in found.by_length else None
            counts = (self.found(method, length) for length in (*lengths, None))
            about = str(found.lost), str(found.gained), f"{kv / 2**20:.0f}" if kv else "-"
            rows.append([method, *own, *counts, *about])
        return markdown(rows)

    def summary(self, method: str) -> MethodSummary:
        own = [cell for cell in self.cells if cell.method == method]
        full = {cell.place: cell.score for cell in self.cells if cell.method == FULL}
        cells = grouped(own, attrgetter("length"))
        longest = self.results_at(method, max(cells)) if cells else []
        return MethodSummary(
            score=statistics.fmean(cell.score for cell in own) if own else None,
            cells=len(own),
            by_length={n: statistics.fmean(c.score for c in cells[n]) for n in sorted(cells)},
            lost=sum(cell.score < full.get(cell.place, cell.score) for cell in own),
            gained=sum(cell.score > full.get(cell.place, cell.score) for cell in own),
            failed=sum(id.rsplit("/", 3)[0] == method for id in self.failed),
            kv_bytes=median_of(longest, "kv_bytes"),
            prefill_seconds=median_of(longest, "timing", "prefill_seconds"),
        )

    def by_document(self, method: str) -> dict[object, float]:
        """Return a method's mean score of each document, by its length, repeat and needles.

        Needles of one document are not independent: a method that misreads it loses several.
        """
        return {
            (r["length"], r["repeat"], *((c["depth"], c["needle"]) for c in r["cells"])): (
                statistics.fmean(c["score"] for c in r["cells"])
            )
            for r in self.results
            if r["method"] == method and r["cells"]
        }

    def results_at(self, method: str, length: int) -> list[Mapping[str, Any]]:
        return [r for r in self.results if (r["method"], r["length"]) == (method, length)]


def median_of(results: Sequence[Mapping[str, Any]], *keys: str) -> Any:
    """Return the median of a number that results hold under keys; None if none holds it."""
    values: list[Any] = []
    for found in results:
        for key in keys:
            found = found.get(key, {})
        if found != {}:
            values.append(found)
    return statistics.median(values) if values else None


class NeedleRun(NeedleResults):
    """A folder of a needle test, read; it may not be finished."""

    def __init__(self, folder: Path) -> None:
        run = Run(folder, KIND, "the needle test")
        self.name = folder.resolve().name
        self.settings, self.engines = run.settings, run.engines
        self.methods: list[str] = self.settings["methods"]
        self.lengths: list[int] = self.settings["lengths"]
        self.depths: list[float] = self.settings["depths"]
        # Answers that each method has at each place, and in all, once the job is done.
        self._due = self.settings["needles"] * self.settings["repeats"]
        self.expected_cells = len(self.lengths) * len(self.depths) * self._due
        super().__init__(run.results, run.failed)

    @property
    def answered(self) -> list[str]:
        found = {cell.method for cell in self.cells}
        return [method for method in self.methods if method in found]

    def _by_place(self, method: str) -> list[list[list[float]]]:
        found = defaultdict(list)
        for cell in self.cells:
            if cell.method == method:
                found[cell.depth, cell.length].append(cell.score)
        return [[found[depth, length] for length in self.lengths] for depth in self.depths]

    def scores(self, method: str) -> list[list[float | None]]:
        """Return the mean scores of each depth and length; None where nothing was asked."""
        return [
            [statistics.fmean(cell) if cell else None for cell in row]
            for row in self._by_place(method)
        ]

    def unfinished(self, method: str) -> list[list[bool]]:
        """True for each cell of `scores` that lacks some of its answers."""
        return [[len(found) < self._due for found in row] for row in self._by_place(method)]

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "expected_cells": self.expected_cells,
            "failed": self.failed,
            "methods": {
                method: asdict(self.summary(method)) | {"scores": self.scores(method)}
                for method in self.methods
            },
        }
