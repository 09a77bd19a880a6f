"""A suite's report: scores with intervals, what each method loses and gains, and a picture.

A cell is the mean score of its samples in percent. The average of a length is the mean over tasks,
as RULER's paper has it, and the last column the mean over lengths. An average that lacks a cell is
not given.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from razor_dist.evals.methods import FULL
from razor_dist.evals.report import (
    BESIDE,
    BESIDE_NOTE,
    INTERVAL,
    Run,
    beside,
    beside_cells,
    draw_legend,
    failures,
    interval,
    join,
    markdown,
    presses,
    save_picture,
    section,
    shown,
    write_json,
    write_page,
)

SUMMARY, PAGE, PICTURE = "summary.json", "report.md", "scores.svg"
Result = Mapping[str, Any]


def write_report(folder: Path, kind: str, title: str) -> str:
    """Read a folder's results and write all that follows from them; returns the Markdown."""
    run = Run(folder, kind, title)
    scores = Scores(run.settings, run.results)
    write_json(folder / SUMMARY, {"settings": run.settings} | scores.as_json())
    picture = ""
    if run.results:
        scores.draw(folder / PICTURE)
        picture = f"![Mean scores by task and length]({PICTURE})"
    page = report(title, run.settings, run.results, run.failed, run.engines, picture)
    return write_page(folder / PAGE, page)


class Scores:
    """Scores in percent by method, task and length, and by sample beside full attention's."""

    def __init__(self, task: Mapping[str, Any], results: Sequence[Result]) -> None:
        self.methods: list[str] = task["methods"]
        self.tasks: list[str] = task["tasks"]
        self.lengths: list[int] = task["lengths"]
        self._one_document: bool = task.get("one_document", False)
        counts = task.get("counts", {})
        self.asked = {name: int(counts.get(name, task["samples"])) for name in self.tasks}
        self._cells: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
        for number, result in enumerate(results):
            cell = self._cells[result["method"], result["task"], result["length"]]
            cell[result.get("number", number)] = 100 * result["score"]

    def of(self, method: str, task: str, length: int) -> list[float]:
        return list(self._cells[method, task, length].values())

    def mean(self, method: str, task: str, length: int) -> float | None:
        """Return the mean score in percent; None until all samples of the task are answered."""
        scores = self.of(method, task, length)
        return fmean(scores) if scores and len(scores) == self.asked[task] else None

    def changes(self, method: str, tasks: Sequence[str], length: int) -> list[float]:
        """Return a method's scores minus full attention's, for each document that both answered.

        A document shared by several tasks counts once, with the mean over its tasks: their
        answers are correlated.
        """
        found = defaultdict[object, list[float]](list)
        for task in tasks:
            full, own = (self._cells[name, task, length] for name in (FULL, method))
            for number in own.keys() & full.keys():
                document = number if self._one_document else (task, number)
                found[document].append(own[number] - full[number])
        return [fmean(changes) for _, changes in sorted(found.items())]

    def beside_full(self, method: str, tasks: Sequence[str], length: int) -> dict[str, Any]:
        """Compare a method's scores with full attention's by `beside`, in percentage points."""
        return beside(self.changes(method, tasks, length), 100)

    def as_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return a cell for each method, task and length, and each length's ``all`` tasks."""
        cells, every = [], []
        for method, length in itertools.product(self.methods, self.lengths):
            for task in self.tasks:
                if scores := self.of(method, task, length):
                    cell = {"method": method, "task": task, "length": length}
                    cell |= {"samples": len(scores), "score": fmean(scores)}
                    cell |= {"interval": interval(scores, 0, 100)}
                    beside = {} if method == FULL else self.beside_full(method, [task], length)
                    cells.append(cell | beside)
            if method != FULL:
                found = self.beside_full(method, self.tasks, length)
                every.append({"method": method, "length": length} | found)
        return {"cells": cells, "all": every}

    def draw(self, path: Path) -> None:
        """Draw means with their intervals, a panel for each length."""
        height = max(2.4, 0.3 * len(self.tasks) * len(self.methods) ** 0.5 + 1.2)
        figure = Figure((3.4 * len(self.lengths) + 2.6, height), layout="constrained")
        panels = figure.subplots(1, len(self.lengths), sharey=True, squeeze=False)[0]
        step = 0.8 / len(self.methods)
        for axis, length in zip(panels, self.lengths, strict=True):
            for number, method in enumerate(self.methods):
                for row, task in enumerate(self.tasks):
                    if scores := self.of(method, task, length):
                        mean, (low, high) = fmean(scores), interval(scores, 0, 100)
                        axis.errorbar(
                            mean,
                            row + step * (number - (len(self.methods) - 1) / 2),
                            xerr=[[max(0, mean - low)], [max(0, high - mean)]],
                            fmt="osD^v"[number % 5],
                            color=f"C{number}",
                            markersize=4,
                            label=method,
                        )
            axis.set(title=f"{length} tokens", xlabel="score, %", xlim=(-3, 103))
            axis.grid(alpha=0.3)
        panels[0].set_yticks(range(len(self.tasks)), self.tasks)
        panels[0].invert_yaxis()
        draw_legend(figure)
        save_picture(figure, path, "svg")


def report(
    title: str,
    task: Mapping[str, Any],
    results: Sequence[Result],
    failed: Mapping[str, str],
    engines: Mapping[str, Mapping[str, Any]],
    picture: str = "",
) -> str:
    scores = Scores(task, results)
    asked = len(scores.methods) * len(scores.lengths) * sum(scores.asked.values())
    most = max((len(result.get("answers", ())) for result in results), default=1)
    parts = [
        f"# {title}: {task['model']}",
        f"{task['samples']} samples of each task and length, seed {task['seed']}, prose: "
        f"{task['haystack']} ({task['haystack_fingerprint']}). Scores in percent, with their "
        f"{INTERVAL}."
        + (f" A sample has up to {most} questions on one document." if most > 1 else "")
        + (" They are turns of one conversation." if task.get("in_turns") else "")
        + (" All tasks ask about the same documents." if task.get("one_document") else ""),
    ]
    if failed:
        parts.append(f"{len(failed)} of {asked} samples failed and count in no cell: see below.")
    if missing := asked - len(results) - len(failed):
        parts.append(f"{missing} of {asked} samples have not been asked yet.")
    parts += [_cached(results), picture]
    parts += [_table(scores, method) for method in scores.methods]
    parts += [_beside_full(scores), presses(engines, asked_after=False)]
    return join(*parts, failures(failed))


def _table(scores: Scores, method: str) -> str:
    head = ["task", *map(str, scores.lengths), "average"]
    means = {
        task: [scores.mean(method, task, length) for length in scores.lengths]
        for task in scores.tasks
    }
    rows = []
    for task, asked in scores.asked.items():
        cells = [_cell(scores.of(method, task, length), asked) for length in scores.lengths]
        rows.append([task, *cells, shown(_mean(means[task]), ".1f")])
    average = [_mean(column) for column in zip(*means.values(), strict=True)]
    rows.append(["**average**", *(shown(mean, ".1f") for mean in (*average, _mean(average)))])
    return join(f"## {method}", markdown([head, *rows]))


def _beside_full(scores: Scores) -> str:
    rows = [["method", "task", *(f"{length}: {w}" for length in scores.lengths for w in BESIDE)]]
    each = {task: [task] for task in scores.tasks}
    every = {"**all**": scores.tasks} if len(scores.tasks) > 1 else {}
    for method, (name, tasks) in itertools.product(scores.methods, (each | every).items()):
        cells = [scores.beside_full(method, tasks, length) for length in scores.lengths]
        if method != FULL and any(cell["compared"] for cell in cells):
            rows.append([method, name, *(text for cell in cells for text in beside_cells(cell))])
    return section("## Beside full attention, sample by sample", rows, BESIDE_NOTE)


def _cached(results: Sequence[Result]) -> str:
    """Report the share of prompt tokens found in the prefix cache; empty if it was not used."""
    cached = sum(result.get("timing", {}).get("cached_tokens", 0) for result in results)
    tokens = sum(a["prompt_tokens"] for result in results for a in result.get("answers", ()))
    if not cached:
        return ""
    return f"{cached:,} of {tokens:,} prompt tokens came from the prefix cache."


def _cell(scores: Sequence[float], asked: int) -> str:
    if not scores:
        return "-"
    low, high = interval(scores, 0, 100)
    of = f", {len(scores)} of {asked}" if len(scores) < asked else ""
    return f"{fmean(scores):.1f} ({low:.0f}-{high:.0f}{of})"


def _mean(cells: Sequence[float | None]) -> float | None:
    """Return the mean, or None if there are no cells or one lacks its number."""
    known = [cell for cell in cells if cell is not None]
    return fmean(known) if known and len(known) == len(cells) else None
