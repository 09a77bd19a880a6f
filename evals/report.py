"""Results of evaluations and benches: folders read, tables, pages, pictures, notes on the run."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import random
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import psutil
import torch

import razor_dist
from razor_dist.config.cores import usable_cores
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import JobConfig
from razor_dist.evals.baselines.presses import KVPRESS, PRESSES
from razor_dist.files import replacing
from razor_dist.jobs.results import HEADER, read_job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

CONFIG, ENVIRONMENT = "config.json", "environment.json"
Align: TypeAlias = Literal["left", "numbers"]  # numbers: all columns but the first to the right
Thing = TypeVar("Thing")


def machine() -> dict[str, Any]:
    info = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: version(name) for name in ("torch", "transformers")},
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    return info


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.*)", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def commit_of(package: Path) -> str | None:
    """Return the commit of a package's checkout, with ``-dirty`` if it was changed.

    None if the package is not tracked by Git, say where it is installed.
    """
    tracked = ["ls-files", "--error-unmatch", "__init__.py"]
    named = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    git = ["git", "--no-optional-locks", "-C", str(package)]
    run = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=60)
    try:
        run([*git, *tracked])
        return str(run([*git, *named]).stdout).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def refuse_others_config(folder: Path) -> None:
    """Raise `ConfigError` if `note_run` would replace a file that no job wrote, as a model's."""
    if os.path.isfile(folder / CONFIG) and not os.path.isfile(folder / HEADER):
        raise ConfigError(
            f"--out {folder} holds a {CONFIG} that is no evaluation's, such as a model's, which "
            "would be replaced; name another folder"
        )


def note_run(folder: Path, config: JobConfig) -> None:
    """Add settings, machine and commit of a run to a folder; earlier runs stay listed.

    Warn if an earlier run was of another commit.
    """
    path = folder / ENVIRONMENT
    try:
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged; remove it, it is written anew") from None
    here = {"began": datetime.now(UTC).isoformat(timespec="seconds"), **machine()}
    here["razor_dist"] = razor_dist.__version__  # a copy that Ray makes is not installed
    here["commit"] = commit = commit_of(Path(razor_dist.__file__).resolve().parent)
    others = {run["commit"] for run in runs if run.get("commit") not in (None, commit)}
    if commit is not None and others:
        of = "results in %s are of several commits: %s earlier, %s now"
        log.warning(of, folder, ", ".join(sorted(others)), commit)
    with suppress(PackageNotFoundError):
        here["kvpress"] = version("kvpress")
    write_json(folder / CONFIG, config.model_dump(mode="json"))
    write_json(path, {"runs": [*runs, here]})


class Run:
    """A folder of an evaluation, read; it may not be finished.

    ``settings`` are the task's, ``results`` those of the items that are done, and ``failed`` says
    why others are missing, by their ids. Raises `ConfigError` if the folder is another job's.
    """

    def __init__(self, folder: Path, kind: str, what: str) -> None:
        job = read_job(folder)
        self.settings: dict[str, Any] = job.settings["task"]
        if self.settings.get("kind") != kind:
            raise ConfigError(f"{folder} holds results of another job than {what}")
        self.engines: dict[str, dict[str, Any]] = job.settings["engines"]
        self.results: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        for record in job.records:
            if record["status"] == "done":
                self.results.append(record["result"])
            elif record["status"] == "failed":
                error = record["error"]
                self.failed[record["id"]] = f"{error['type']}: {error['message']}"


def grouped(things: Iterable[Thing], key: Callable[[Thing], Any]) -> dict[Any, list[Thing]]:
    """Return things by their keys; both in the order in which they come."""
    found: dict[Any, list[Thing]] = {}
    for thing in things:
        found.setdefault(key(thing), []).append(thing)
    return found


def failures(failed: Mapping[str, str]) -> str:
    """Return a section of what failed, items of one reason together; an empty text without any."""
    reasons = grouped(failed, lambda name: " ".join(failed[name].split()))
    lines = [f"- `{'`, `'.join(names)}`: {why}" for why, names in reasons.items()]
    return "\n\n".join(["## Failed", "\n".join(lines)]) if lines else ""


def presses(engines: Mapping[str, Mapping[str, Any]], asked_after: bool) -> str:
    """Return a section of kvpress's methods: their budgets and what they know; empty without any.

    ``asked_after`` says that the question stands behind what is compressed.
    """
    rows = [["method", "class", "may keep", "sees the question before it drops anything"]]
    for method, engine in engines.items():
        if "press" in engine:
            press, part = PRESSES[engine["press"]], engine["kv_budget"]
            budget = "razor's bytes on one rank" if part is None else f"{part:g} of full attention"
            sees = "yes" if press.with_question or not asked_after else "no"
            rows.append([method, press.name, budget, sees])
    note = (
        f"kvpress {KVPRESS} on transformers' own model: every head reads the document in full, "
        "then each layer's cache is compressed once; what follows is added to it in full. "
    ) + (
        "Seeing the question is an advantage: the method knows what will be asked for when it "
        "drops the rest, and it reads the document anew for each question. No engine sees it."
        if asked_after
        else "The question is part of what is read here, for every method."
    )
    return section("## Baselines", rows, note)


# What reports call an `interval`.
INTERVAL = (
    "95 % interval (of 2,000 resamplings, and by Clopper and Pearson's bound for what they miss)"
)


def interval(
    numbers: Sequence[float], lowest: float = 0.0, highest: float = 1.0
) -> tuple[float, float]:
    """Return the 95 % interval of the mean of numbers from ``lowest`` to ``highest``.

    It is found by resampling, and is `widened`: resamplings of equal numbers are all alike.
    """
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(numbers, k=len(numbers))) for _ in range(2000))
    found = means[50], means[-51]
    return widened(found, fmean(numbers), len(numbers), lowest, highest)


def widened(
    found: tuple[float, float], mean: float, count: int, lowest: float = 0.0, highest: float = 1.0
) -> tuple[float, float]:
    """Widen an interval, found by resampling, by the values that the samples can have missed.

    ``1 - 0.025 ** (1 / count)`` bounds their share (Clopper and Pearson's bound for none of
    ``count``), and they may be as far away as the range allows.
    """
    unseen = 1 - 0.025 ** (1 / count)
    low, high = (mean + unseen * (end - mean) for end in (lowest, highest))
    return min(found[0], low), max(found[1], high)


# What `beside_cells` has, and what it means.
BESIDE = ("lost", "gained", "p", "change")
BESIDE_NOTE = (
    "Of documents that both answered: how many score below full attention (lost) and above it "
    "(gained), the probability of a split at least as uneven if both were as likely (p, sign "
    "test), and the mean change of the score with its interval, in percentage points."
)


def beside(changes: Sequence[float], highest: float) -> dict[str, Any]:
    """Summarise ``changes``: for each document, a method's score minus full attention's.

    ``compared`` documents were answered by both; ``lost`` and ``gained`` count the signs. If there
    are any, ``p`` is their `sign_test`, and ``change`` the mean with its interval.
    Scores go from 0 to ``highest``.
    """
    # Rounded: sums of thirds would miss an exact tie by a float error.
    changes = [round(change, 9) for change in changes]
    lost, gained = (sum(sign * change > 0 for change in changes) for sign in (-1, 1))
    found: dict[str, Any] = {"compared": len(changes), "lost": lost, "gained": gained}
    if not changes:
        return found
    found |= {"p": sign_test(lost, gained), "change": fmean(changes)}
    return found | {"change_interval": interval(changes, -highest, highest)}


def beside_cells(found: Mapping[str, Any], percent: float = 1.0) -> list[str]:
    """Return the table cells, under the titles `BESIDE`, of a result of `beside` × ``percent``."""
    if not found["compared"]:
        return ["-"] * len(BESIDE)
    change, low, high = (percent * x for x in (found["change"], *found["change_interval"]))
    texts = str(found["lost"]), str(found["gained"]), f"{found['p']:.2g}"
    return [*texts, f"{change:+.1f} ({low:+.1f} to {high:+.1f})"]


def sign_test(lost: int, gained: int) -> float:
    """Return the exact two-sided p-value of the sign test, for equal chances of loss and gain.

    ``min(1, 2 P(X <= min(lost, gained)))`` for X binomial with ``lost + gained`` tries at 1/2. It
    assumes nothing about the scores' range, so it can show a loss even where most scores are 0.
    """
    both = lost + gained
    tail = sum(math.comb(both, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**both)


def draw_legend(figure: Figure) -> None:
    """Name what any panel shows, once: a panel may lack what another has."""
    shown: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=8)


def save_picture(figure: Figure, path: Path | BytesIO, form: Literal["png", "svg"] = "png") -> None:
    """Write a figure, without dates and with fixed identifiers: equal results, equal files."""
    missing = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    import matplotlib as mpl  # `make gpu` runs without it

    with mpl.rc_context({"svg.hashsalt": "razor_dist", "svg.fonttype": "none"}):
        figure.savefig(path, format=form, metadata=missing)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def markdown(rows: Iterable[Sequence[str]], align: Align = "left") -> str:
    """Return a Markdown table whose head is the first of the rows, of any texts."""
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    others = "---:" if align == "numbers" else "---"
    rule = ["---", *[others] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], align: Align) -> str:
    """Return a Markdown table of columns by title, each a format of a row's values."""
    cells = ([form.format(**row) for form in columns.values()] for row in rows)
    return markdown([list(columns), *cells], align)


def shown(number: float | None, form: str) -> str:
    """Format a number; a hyphen stands for None."""
    return "-" if number is None else format(number, form)


def section(
    title: str, rows: Sequence[Sequence[str]], note: str = "", align: Align = "left"
) -> str:
    """Return a table beneath its title and above a note; an empty text if it has no body."""
    return join(title, markdown(rows, align), note) if len(rows) > 1 else ""


def join(*parts: str) -> str:
    """Return the parts of a page as paragraphs, without the empty ones."""
    return "\n\n".join(filter(None, parts))


def write_page(path: Path, *parts: str) -> str:
    page = join(*parts)
    with replacing(path) as draft:
        draft.write_text(page + "\n", encoding="utf-8")
    return page
