"""RULER's table: tasks by lengths for each method, and their averages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.evals.baselines.presses import KVPRESS
from razor_dist.evals.ruler.job import KIND
from razor_dist.evals.run_notes import join, markdown, write_page
from razor_dist.jobs.results import read_job

PAGE = "report.md"


def write_report(folder: Path) -> str:
    """Write a run's table into its folder, and return it; refuse another job's folder."""
    settings, records = read_job(folder)
    if settings["task"].get("kind") != KIND:
        raise ConfigError(f"{folder} holds results of another job than RULER")
    return write_page(folder / PAGE, report(settings["task"], records, settings["engines"]))


def report(
    task: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    engines: Mapping[str, Mapping[str, Any]],
) -> str:
    """Return the page of a run.

    A cell is the mean score of its samples in percent, a task's row. The average of a length is
    the mean over tasks, as the paper's, and the last column the mean over lengths. An average that
    lacks a cell is not given.
    """
    scores: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for record in records:
        if record["status"] == "done":
            result = record["result"]
            place = result["method"], result["task"], result["length"]
            scores[place].append(100 * result["score"])
    lengths, tasks, samples = task["lengths"], task["tasks"], task["samples"]
    asked = len(task["methods"]) * len(tasks) * len(lengths) * samples
    failed = [record for record in records if record["status"] == "failed"]
    parts = [
        f"# RULER: {task['model']}",
        f"{samples} samples of each task and length, seed {task['seed']}, prose: "
        f"{task['haystack']} ({task['haystack_fingerprint']}). Scores in percent.",
    ]
    if failed:
        parts.append(f"{len(failed)} of {asked} samples failed and count in no cell: see below.")
    if missing := asked - len(records):
        parts.append(f"{missing} of {asked} samples have not been asked yet.")
    if presses := [method for method in task["methods"] if "press" in engines.get(method, {})]:
        part = engines[presses[0]]["kv_budget"]
        budget = "as many bytes as razor on one rank" if part is None else f"{part:g} of all"
        parts.append(
            f"{', '.join(presses)}: kvpress {KVPRESS}. Every head reads in full; then {budget} is "
            "kept. The question is a part of what is read: they know it when they drop the rest."
        )
    head = ["task", *map(str, lengths), "average"]
    for method in task["methods"]:
        rows = {name: [_mean(scores[method, name, n]) for n in lengths] for name in tasks}
        rows["**average**"] = [_mean(column) for column in zip(*rows.values(), strict=True)]
        body = [[name, *map(_shown, [*cells, _mean(cells)])] for name, cells in rows.items()]
        parts += [f"## {method}", markdown([head, *body])]
    return join(*parts, *_failures(failed))


def _failures(failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the samples that failed, those of one reason together."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for record in failed:
        error = record["error"]
        why = " ".join(f"{error['type']}: {error['message']}".split())
        reasons[why].append(f"`{record['id']}`")
    lines = [f"- {', '.join(ids)}: {why}" for why, ids in reasons.items()]
    return ["## Failed", "\n".join(lines)] if lines else []


def _mean(cells: Sequence[float | None]) -> float | None:
    """Return the mean, or None if there are no cells or one lacks its number."""
    known = [cell for cell in cells if cell is not None]
    return fmean(known) if known and len(known) == len(cells) else None


def _shown(cell: float | None) -> str:
    return "-" if cell is None else f"{cell:.1f}"
