"""What a needle test's folder holds, as cells and means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.evals.grid import FULL
from razor_dist.jobs.results import read_job

KIND = "needle"
"""What the settings of a needle test call it."""


@dataclass(frozen=True)
class Cell:
    """One question and its answer.

    Attributes
    ----------
    method : str
    length : int
        Tokens of prompt and answer.
    depth : float
        Percent of the document before the needle.
    repeat, needle : int
    expected, answer : str
    score : float
        From 0 to 1.
    """

    method: str
    length: int
    depth: float
    repeat: int
    needle: int
    expected: str
    answer: str
    score: float


@dataclass(frozen=True)
class MethodSummary:
    """A method over its cells.

    Attributes
    ----------
    score : float or None
        Mean; None if nothing was asked.
    cells : int
    by_length : dict of int to float
        Means.
    lost, gained : int
        Answers below full attention's score of the same cell, and above it.
    failed : int
        Documents whose questions have no answer.
    kv_bytes : int or None
        Median at the longest length that was run, of the rank that holds most.
    prefill_seconds : float or None
        The same median, on a machine that may have been busy.
    """

    score: float | None
    cells: int
    by_length: Mapping[int, float]
    lost: int
    gained: int
    failed: int
    kv_bytes: int | None
    prefill_seconds: float | None


class NeedleRun:
    """A folder of a needle test, read; it may not be finished.

    Parameters
    ----------
    folder : Path

    Attributes
    ----------
    settings : dict
        The task's: `NeedleTask.settings`.
    engines : dict
        Settings of each method's engine.
    cells : list of Cell
    failed : dict of str to str
        Items without a result, and why.

    Raises
    ------
    ConfigError
        If the folder holds no results, or those of something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        job = read_job(folder)
        self.settings: dict[str, Any] = job.settings["task"]
        if self.settings.get("kind") != KIND:
            raise ConfigError(f"{folder} holds results of another job than the needle test")
        self.engines: dict[str, dict[str, Any]] = job.settings["engines"]
        self._results = [r["result"] for r in job.records if r["status"] == "done"]
        self.failed = {
            r["id"]: f"{r['error']['type']}: {r['error']['message']}"
            for r in job.records
            if r["status"] == "failed"
        }
        self.cells = [
            Cell(result["method"], result["length"], repeat=result["repeat"], **cell)
            for result in self._results
            for cell in result["cells"]
        ]

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.resolve().name

    @property
    def methods(self) -> list[str]:
        """All that were asked for; one that has failed throughout is among them."""
        return list(self.settings["methods"])

    @property
    def answered(self) -> list[str]:
        """Those of which there are results."""
        found = {cell.method for cell in self.cells}
        return [method for method in self.methods if method in found]

    @property
    def lengths(self) -> list[int]:
        """All that were asked for."""
        return list(self.settings["lengths"])

    @property
    def depths(self) -> list[float]:
        """All that were asked for."""
        return list(self.settings["depths"])

    @property
    def expected_cells(self) -> int:
        """Of each method, once the job is done."""
        own = self.settings
        return len(own["lengths"]) * len(own["depths"]) * own["needles"] * own["repeats"]

    def scores(self, method: str) -> list[list[float | None]]:
        """``[depths][lengths]``: mean scores, None where nothing was asked."""
        found: dict[tuple[float, int], list[float]] = {}
        for cell in self.cells:
            if cell.method == method:
                found.setdefault((cell.depth, cell.length), []).append(cell.score)
        return [
            [
                statistics.fmean(found[depth, length]) if (depth, length) in found else None
                for length in self.lengths
            ]
            for depth in self.depths
        ]

    def differences(self, method: str) -> list[list[float | None]]:
        """``[depths][lengths]``: full attention's mean scores less a method's."""
        pairs = zip(self.scores(FULL), self.scores(method), strict=True)
        return [
            [None if a is None or b is None else a - b for a, b in zip(full, own, strict=True)]
            for full, own in pairs
        ]

    def summary(self, method: str) -> MethodSummary:
        """Of all cells of a method."""
        own = [cell for cell in self.cells if cell.method == method]
        full = {_place(cell): cell.score for cell in self.cells if cell.method == FULL}
        lengths = sorted({cell.length for cell in own})
        longest = [
            result
            for result in self._results
            if lengths and result["method"] == method and result["length"] == lengths[-1]
        ]
        return MethodSummary(
            score=statistics.fmean(cell.score for cell in own) if own else None,
            cells=len(own),
            by_length={
                length: statistics.fmean(cell.score for cell in own if cell.length == length)
                for length in lengths
            },
            lost=sum(cell.score < full.get(_place(cell), cell.score) for cell in own),
            gained=sum(cell.score > full.get(_place(cell), cell.score) for cell in own),
            failed=sum(id.partition("/")[0] == method for id in self.failed),
            kv_bytes=_median_of(longest, lambda result: result["kv_bytes"]),
            prefill_seconds=_median_of(longest, lambda result: result["timing"]["prefill_seconds"]),
        )

    def as_json(self) -> dict[str, Any]:
        """The summary of all methods, and the mean score of every place."""
        return {
            "settings": self.settings,
            "expected_cells": self.expected_cells,
            "failed": self.failed,
            "methods": {
                method: asdict(self.summary(method)) | {"scores": self.scores(method)}
                for method in self.methods
            },
        }


def _place(cell: Cell) -> tuple[int, float, int, int]:
    return cell.length, cell.depth, cell.repeat, cell.needle


def _median_of(
    results: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], Any]
) -> Any:
    return statistics.median([value(result) for result in results]) if results else None
