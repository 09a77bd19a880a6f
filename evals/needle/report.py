"""The needle test's report: a folder is read, and what it tells is written beside its results.

``summary.json`` holds means by method, and by depth and length; ``report.md`` the same as tables,
with what failed; the pictures are depth by length for each method, and full attention's scores less
each other method's.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from razor_dist.config.errors import ConfigError
from razor_dist.evals.methods import FULL
from razor_dist.evals.needle.presets import PRESETS
from razor_dist.evals.needle.results import NeedleRun, median_of
from razor_dist.evals.report import (
    BESIDE,
    BESIDE_NOTE,
    INTERVAL,
    beside,
    beside_cells,
    failures,
    interval,
    markdown,
    presses,
    save_picture,
    section,
    shown,
    write_json,
    write_page,
)
from razor_dist.evals.settings import STREAMING_SETTINGS
from razor_dist.files import make_folder

SUMMARY, REPORT = "summary.json", "report.md"
HEATMAP, DIFFERENCE = "heatmap.png", "difference.png"
_WRONG_SHOWN = 20
# Shown always, beside settings in which engines differ.
_ENGINE = ("attention", "head_map", "prefill", *STREAMING_SETTINGS)


def write_report(folder: Path) -> str:
    """Read a folder's results and write all that follows from them; returns the Markdown."""
    run = NeedleRun(folder)
    write_json(folder / SUMMARY, run.as_json())
    return write_page(
        folder / REPORT,
        "# Needle test",
        _about(run),
        _scores([run]),
        *_draw([run], folder),
        _documents(run),
        _costs(run),
        _engines(run),
        presses(run.engines, run.settings["query"] == "after"),
        _wrong(run),
        failures(run.failed),
    )


def compare(folders: Sequence[Path], out: Path) -> str:
    """Put several runs side by side in ``out``; returns the Markdown."""
    runs = [NeedleRun(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two of the folders have the same name, of {names}; rename one")
    make_folder(out)
    about = [["run", "model", "preset", "query", "haystack", "depths", "needles", "repeats"]]
    for run in runs:
        own = run.settings
        texts = [own["model"], own["preset"], own["query"], own["haystack"] or "-"]
        numbers = [len(own["depths"]), own["needles"], own["repeats"]]
        about.append([run.name, *texts, *map(str, numbers)])
    write_json(out / SUMMARY, {run.name: run.as_json() for run in runs})
    title = "# Needle tests compared"
    return write_page(out / REPORT, title, markdown(about), _scores(runs), *_draw(runs, out))


def _about(run: NeedleRun) -> str:
    own, preset = run.settings, PRESETS[run.settings["preset"]]
    where = "at the needle" if own["query"] == "middle" else f"{own['query']} the document"
    text = f"{own['haystack']} ({own['haystack_fingerprint']})" if own["haystack"] else ""
    shared = ", the needles of all depths in one document" if own["share_depths"] else ""
    return "\n".join(
        [
            f"- model: {own['model']}",
            f"- preset: {own['preset']} ({preset.source})",
            f"- score: {preset.score_name}",
            f"- question: {where}",
            f"- haystack: {text or 'of the preset'}",
            f"- {len(run.lengths)} lengths x {len(run.depths)} depths x {own['needles']} needles x "
            f"{own['repeats']} repeats = {run.expected_cells} questions for each method{shared}",
        ]
    )


def _scores(runs: Sequence[NeedleRun]) -> str:
    """Tabulate mean scores, methods of all runs by lengths; a hyphen where nothing was asked."""
    lengths = sorted({length for run in runs for length in run.lengths})
    several = len(runs) > 1
    head = ["method", *map(_short, lengths), "all", "questions", "lost", "gained"]
    rows = [[*["run"] * several, *head, "failed", "KV per rank, MiB", "prefill, s"]]
    for run in runs:
        for method in run.methods:
            found = run.summary(method)
            scores = [found.by_length.get(length) for length in lengths]
            counts = [f"{found.cells}/{run.expected_cells}", "-", "-", str(found.failed)]
            if method != FULL and found.cells and run.summary(FULL).cells:
                counts[1:3] = str(found.lost), str(found.gained)
            means = [shown(score, ".3f") for score in (*scores, found.score)]
            mib = None if found.kv_bytes is None else found.kv_bytes / 2**20
            costs = [shown(mib, ".2f"), shown(found.prefill_seconds, ".1f")]
            rows.append([*[run.name] * several, method, *means, *counts, *costs])
    note = (
        "Mean scores of the questions that were answered, of those asked for. Lost and gained are "
        "questions that score below or above full attention's; failed are documents; "
        "KV is measured, of the rank that holds most, after a document of the longest length, "
        "for kvpress's methods once the cache was compressed; "
        "prefill is the median time of its documents, on a machine that may have been busy."
    )
    return f"{markdown(rows)}\n\n{note}"


def _documents(run: NeedleRun) -> str:
    """Tabulate mean scores of documents with their intervals, and each beside full attention's."""
    full = run.by_document(FULL)
    rows = [["method", "documents", "score", *BESIDE]]
    for method in run.answered:
        own = run.by_document(method)
        low, high = interval(list(own.values()))
        score = f"{statistics.fmean(own.values()):.3f} ({low:.3f} to {high:.3f})"
        both = [document for document in own if document in full and method != FULL]
        changes = [own[document] - full[document] for document in both]
        rows.append([method, str(len(own)), score, *beside_cells(beside(changes, 1), percent=100)])
    return section("## Document by document", rows, f"With their {INTERVAL}. {BESIDE_NOTE}")


def _costs(run: NeedleRun) -> str:
    """Tabulate time, memory and bytes between ranks, medians of the documents of each length."""
    sent = ("prefill_bytes", "answer_bytes")
    found = [
        (method, length, results)
        for method in run.methods
        for length in run.lengths
        if (results := [r for r in run.results_at(method, length) if sent[0] in r])
    ]
    if not found:
        return ""
    purposes = [
        (key, purpose)
        for key in sent
        for purpose in found[0][2][0][key]
        if any(median_of(results, key, purpose) for _, _, results in found)
    ]
    head = ["method", "tokens", "prefill, s", "its CPU s", "answers, s", "their CPU s"]
    head += ["RSS per rank at most, MB", "KV per rank, MB"]
    head += [f"{key.removesuffix('_bytes')}: {purpose}, MB" for key, purpose in purposes]
    times = ("prefill_seconds", "prefill_cpu_seconds", "answer_seconds", "answer_cpu_seconds")
    rows = [head]
    for method, length, results in found:
        seconds = [f"{median_of(results, 'timing', key):.1f}" for key in times]
        memory = [median_of(results, "timing", "rss_bytes"), median_of(results, "kv_bytes")]
        moved = [median_of(results, *keys) for keys in purposes]
        megabytes = [f"{nbytes / 1e6:.2f}" for nbytes in (*memory, *moved)]
        rows.append([method, _short(length), *seconds, *megabytes])
    note = (
        "Medians of the documents of a length. CPU seconds and bytes sent are of all ranks "
        "together. RSS is the highest since the engine's start; where several engines share the "
        "work, each reads its longest documents first."
    )
    return section("## Costs", rows, note, "numbers")


def _engines(run: NeedleRun) -> str:
    ours = {name: run.engines[name] for name in run.methods if "press" not in run.engines[name]}
    every = dict.fromkeys(itertools.chain(_ENGINE, *ours.values()))
    keys = [k for k in every if k in _ENGINE or len({str(e.get(k)) for e in ours.values()}) > 1]
    rows = [["method", *keys]]
    for method, engine in ours.items():
        rows.append([method, *("-" if (v := engine.get(key)) is None else str(v) for key in keys)])
    return section("## Engines", rows)


def _wrong(run: NeedleRun) -> str:
    wrong = [cell for cell in run.cells if cell.score < 1]
    rows = [["method", "tokens", "depth", "expected", "answer", "score"]]
    for cell in wrong[:_WRONG_SHOWN]:
        answer = " ".join(cell.answer.split())[:120]
        place = [_short(cell.length), f"{cell.depth:g} %"]
        rows.append([cell.method, *place, cell.expected, answer, shown(cell.score, ".3f")])
    title = f"## Answers with a score below 1 ({min(len(wrong), _WRONG_SHOWN)} of {len(wrong)})"
    return section(title, rows)


def _short(tokens: int) -> str:
    """Return ``8K`` for 8192, ``1000`` for 1000."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


class Panel(NamedTuple):
    """One map; its values are ``[depths, lengths]``."""

    title: str
    run: NeedleRun
    values: NDArray[np.float64]  # NaN where nothing was asked
    unfinished: NDArray[np.bool_]  # True where some questions have no answer yet


def _draw(runs: Sequence[NeedleRun], folder: Path) -> list[str]:
    """Draw the pictures that there are numbers for; return links to them."""
    label = "full attention's score less the method's"
    return [
        _picture(runs, folder / HEATMAP, "Scores by depth and length", "mean score", False),
        _picture(runs, folder / DIFFERENCE, "Full attention less the others", label, True),
    ]


def _picture(
    runs: Sequence[NeedleRun], path: Path, title: str, label: str, difference: bool
) -> str:
    """Draw panels side by side, with one scale of colours that colour-blind eyes can read.

    The scale, which ``label`` names, goes from 0 to 1, or for a difference from −1 to 1.
    """
    path.unlink(missing_ok=True)
    panels = [panel for run in runs for panel in _panels(run, difference, len(runs) > 1)]
    if not panels:
        return ""
    longest = max(len(panel.run.lengths) for panel in panels)
    columns = min(2 if longest > 6 else 3, len(panels))
    rows = -(-len(panels) // columns)
    width, height = 2.2 + 0.5 * longest, 1.6 + 0.32 * max(len(panel.run.depths) for panel in panels)
    figure = Figure((width * columns + 1, height * rows + 0.4), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    colours, low = ("PuOr", -1.0) if difference else ("cividis", 0.0)
    images = [_draw_panel(*pair, colours, low) for pair in zip(axes, panels, strict=False)]
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.colorbar(images[0], ax=list(axes), label=label)
    save_picture(figure, path)
    return f"![{title}]({path.name})"


def _panels(run: NeedleRun, difference: bool, named: bool) -> Iterator[Panel]:
    """Return a panel for each method; for differences, of all but full attention."""
    prefix = f"{run.name}: " if named else ""
    maps = {
        method: (np.array(run.scores(method), dtype=float), np.array(run.unfinished(method)))
        for method in run.answered
    }
    for method, (values, unfinished) in maps.items():
        if not difference:
            yield Panel(prefix + method, run, values, unfinished)
        elif method != FULL and FULL in maps:
            full, lacking = maps[FULL]
            yield Panel(f"{prefix}full - {method}", run, full - values, unfinished | lacking)


def _draw_panel(axis: Axes, panel: Panel, colours: str, low: float) -> AxesImage:
    """Write each cell's number, with ``?`` where something is unasked; means come last."""
    cells = np.ma.masked_invalid(panel.values)
    down, across = cells.shape
    means = [np.ma.filled(cells.mean(axis=axis), np.nan) for axis in (0, 1, None)]
    values = np.block([[panel.values, means[1][:, None]], [means[0], means[2]]])
    image = axis.imshow(values, cmap=colours, vmin=low, vmax=1.0, aspect="auto")
    axis.set_facecolor("0.85")  # where nothing was asked
    for (row, column), value in np.ndenumerate(values):
        asked = not np.isnan(value)
        text = f"{value:.2f}" if asked else ""
        if row < down and column < across and panel.unfinished[row, column]:
            text += "?"
        colour = "w" if asked and sum(image.cmap(image.norm(value))[:3]) < 1.5 else "k"
        axis.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    # Borders between cells, and a wider one before the means.
    axis.set_xticks(np.arange(across) + 0.5, minor=True)
    axis.set_yticks(np.arange(down) + 0.5, minor=True)
    axis.grid(which="minor", color="w", linewidth=0.8)
    axis.tick_params(which="minor", length=0)
    axis.axvline(across - 0.5, color="w", linewidth=3)
    axis.axhline(down - 0.5, color="w", linewidth=3)
    lengths = [*map(_short, panel.run.lengths), "mean"]
    axis.set_xticks(range(across + 1), lengths, rotation=45, fontsize=8)
    axis.set_yticks(range(down + 1), [*(f"{d:g}" for d in panel.run.depths), "mean"], fontsize=8)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel("tokens", fontsize=9)
    axis.set_ylabel("depth of the needle, %", fontsize=9)
    return image
