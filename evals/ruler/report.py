"""RULER's table: tasks by lengths for each method, and their averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.evals.baselines.presses import KVPRESS
from razor_dist.evals.markdown import markdown
from razor_dist.evals.ruler.job import KIND
from razor_dist.jobs.results import read_job

PAGE = "report.md"


def write_report(folder: str | Path) -> str:
    """Write a run's table into its folder, and return it.

    Raises
    ------
    ConfigError
        If the folder holds no run of RULER.
    """
    settings, records = read_job(folder)
    if settings["task"].get("kind") != KIND:
        raise ConfigError(f"{folder} holds results of another job than RULER")
    page = report(settings["task"], records, settings["engines"])
    (Path(folder) / PAGE).write_text(page + "\n", encoding="utf-8")
    return page


def report(
    task: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    engines: Mapping[str, Mapping[str, Any]],
) -> str:
    """The page of a run.

    A cell is the mean score of its samples in percent, a task's row. The average of a length is
    the mean over tasks, as the paper's, and the last column the mean over lengths. An average that
    lacks a cell is not given.
    """
    scores: dict[tuple[str, str, int], list[float]] = {}
    for record in records:
        if record["status"] == "done":
            result = record["result"]
            place = result["method"], result["task"], result["length"]
            scores.setdefault(place, []).append(result["score"])
    lengths, tasks, samples = task["lengths"], task["tasks"], task["samples"]
    asked = len(task["methods"]) * len(tasks) * len(lengths) * samples
    failed = [record for record in records if record["status"] == "failed"]
    lines = [
        f"# RULER: {task['model']}",
        "",
        f"{samples} samples of each task and length, seed {task['seed']}, prose: "
        f"{task['haystack']} ({task['haystack_fingerprint']}). Scores in percent.",
    ]
    if failed:
        lines += ["", f"{len(failed)} of {asked} samples failed and count in no cell: see below."]
    if missing := asked - len(records):
        lines += ["", f"{missing} of {asked} samples have not been asked yet."]
    if presses := [method for method in task["methods"] if "press" in engines.get(method, {})]:
        part = engines[presses[0]]["kv_budget"]
        budget = "as many bytes as razor on one rank" if part is None else f"{part:g} of all"
        lines += [
            "",
            f"{', '.join(presses)}: kvpress {KVPRESS}. Every head reads in full; then {budget} is "
            "kept. The question is a part of what is read: they know it when they drop the rest.",
        ]
    for method in task["methods"]:
        rows: dict[str, list[float | None]] = {
            name: [_percent(scores.get((method, name, length))) for length in lengths]
            for name in tasks
        }
        rows["**average**"] = [_mean(column) for column in zip(*rows.values(), strict=True)]
        head = ["task", *map(str, lengths), "average"]
        body = [[name, *map(_shown, [*cells, _mean(cells)])] for name, cells in rows.items()]
        lines += ["", f"## {method}", "", markdown([head, *body])]
    return "\n".join([*lines, *_failures(failed)])


def _failures(failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which samples failed, and why; those of one reason together."""
    if not failed:
        return []
    reasons: dict[str, list[str]] = {}
    for record in failed:
        error = record["error"]
        why = " ".join(f"{error['type']}: {error['message']}".split())
        reasons.setdefault(why, []).append(f"`{record['id']}`")
    return ["", "## Failed", "", *(f"- {', '.join(ids)}: {why}" for why, ids in reasons.items())]


def _percent(scores: Sequence[float] | None) -> float | None:
    return 100 * fmean(scores) if scores else None


def _mean(cells: Sequence[float | None]) -> float | None:
    known = [cell for cell in cells if cell is not None]
    return fmean(known) if len(known) == len(cells) else None


def _shown(cell: float | None) -> str:
    return "-" if cell is None else f"{cell:.1f}"
