"""The needle test's report: a folder is read, and what it tells is written beside its results.

==================  ==========================================================================
``job.json``        the settings that decide the results (`razor_dist.jobs.results`)
``results.jsonl``   the answers (the same)
``config.json``     all settings of the last run, with those that decide nothing
``environment.json``  of each run that ended: machine, versions, when it began
``summary.json``    means by method, and by depth and length
``report.md``       the same as tables, with what failed
``heatmap.png``     depth by length for each method, one scale of colours
``difference.png``  full attention's scores less each other method's
==================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from razor_dist.config.errors import ConfigError
from razor_dist.evals.baselines.presses import KVPRESS, PRESSES
from razor_dist.evals.markdown import markdown, section, write_page
from razor_dist.evals.needle.heatmaps import Panel, draw, short_length
from razor_dist.evals.needle.presets import PRESETS
from razor_dist.evals.needle.results import FULL, NeedleRun, median_of
from razor_dist.evals.run_notes import write_json

SUMMARY, REPORT = "summary.json", "report.md"
HEATMAP, DIFFERENCE = "heatmap.png", "difference.png"
_WRONG_SHOWN = 20
# In which engines differ, or that a streaming head's cache hangs on.
_ENGINE = ("attention", "head_map", "prefill", "window_min", "window_ratio", "window_max")
_ENGINE += ("sink_tokens", "block", "compensation")


def write_report(folder: Path) -> str:
    """Read a folder's results and write all that follows from them; returns the Markdown.

    Raises
    ------
    ConfigError
        If the folder holds no results of a needle test.
    """
    run = NeedleRun(folder)
    write_json(folder / SUMMARY, run.as_json())
    failures = "\n".join(f"- `{id}`: {' '.join(why.split())}" for id, why in run.failed.items())
    return write_page(
        folder / REPORT,
        "# Needle test",
        _about(run),
        _scores([run]),
        *_draw([run], folder),
        _costs(run),
        _engines(run),
        _presses(run),
        _wrong(run),
        *(["## Failed", failures] if failures else []),
    )


def compare(folders: Sequence[Path], out: Path) -> str:
    """Put several runs side by side in ``out``; returns the Markdown.

    Raises
    ------
    ConfigError
        If two folders have one name, or one holds no results of a needle test.
    """
    runs = [NeedleRun(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two of the folders have the same name, of {names}; rename one")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from None
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
    head = ["method", *map(short_length, lengths), "all", "questions", "lost", "gained"]
    costs = ["failed", "KV per rank, MiB", "prefill, s"]
    rows = [[*["run"] * several, *head, *costs]]
    for run in runs:
        for method in run.methods:
            found = run.summary(method)
            against = method != FULL and found.cells and run.summary(FULL).cells
            changed = [str(found.lost), str(found.gained)] if against else ["-", "-"]
            kv, seconds = found.kv_bytes, found.prefill_seconds
            rows.append(
                [
                    *[run.name] * several,
                    method,
                    *(_mean(found.by_length.get(length)) for length in lengths),
                    _mean(found.score),
                    f"{found.cells}/{run.expected_cells}",
                    *changed,
                    str(found.failed),
                    "-" if kv is None else f"{kv / 2**20:.2f}",
                    "-" if seconds is None else f"{seconds:.1f}",
                ]
            )
    note = (
        "Mean scores of the questions that were answered, of those asked for. Lost and gained are "
        "questions that score below or above full attention's; failed are documents; "
        "KV is measured, of the rank that holds most, after a document of the longest length; "
        "prefill is the median time of its documents, on a machine that may have been busy."
    )
    return f"{markdown(rows)}\n\n{note}"


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
        rows.append([method, short_length(length), *seconds, *megabytes])
    note = (
        "Medians of the documents of a length. CPU seconds and bytes sent are of all ranks "
        "together. RSS is the highest since the engine's start, which reads its longest documents "
        "first."
    )
    return section("## Costs", rows, note, "numbers")


def _mean(score: float | None) -> str:
    return "-" if score is None else f"{score:.3f}"


def _engines(run: NeedleRun) -> str:
    rows = [["method", *_ENGINE]]
    for method in run.methods:
        engine = run.engines[method]
        if "press" not in engine:
            values = ["-" if (v := engine.get(name)) is None else str(v) for name in _ENGINE]
            rows.append([method, *values])
    return section("## Engines", rows)


def _presses(run: NeedleRun) -> str:
    """Tabulate the budgets and the knowledge of kvpress's methods, which ours do not have."""
    rows = [["method", "class", "may keep", "sees the question before it drops anything"]]
    after = run.settings["query"] == "after"
    for method in run.methods:
        engine = run.engines[method]
        if "press" in engine:
            press, part = PRESSES[method], engine["kv_budget"]
            budget = "razor's bytes on one rank" if part is None else f"{part:g} of full attention"
            sees = "yes" if press.with_question or not after else "no"
            rows.append([method, press.name, budget, sees])
    note = (
        f"kvpress {KVPRESS} on transformers' own model: every head reads the document in full, "
        "then each layer's cache is compressed once; what follows is added to it in full. KV above "
        "is what the cache held once it was compressed. "
    ) + (
        "Seeing the question is an advantage: the method knows what will be asked for when it "
        "drops the rest, and it reads the document anew for each question. No engine above sees it."
        if after
        else "The question is part of what is read here, for every method."
    )
    return section("## Baselines", rows, note)


def _wrong(run: NeedleRun) -> str:
    """Tabulate some of the answers that are not what was expected."""
    wrong = [cell for cell in run.cells if cell.score < 1]
    rows = [["method", "tokens", "depth", "expected", "answer", "score"]]
    for cell in wrong[:_WRONG_SHOWN]:
        answer = " ".join(cell.answer.split()).replace("|", "\\|")[:120]
        place = [short_length(cell.length), f"{cell.depth:g} %"]
        rows.append([cell.method, *place, cell.expected, answer, _mean(cell.score)])
    title = f"## Answers with a score below 1 ({min(len(wrong), _WRONG_SHOWN)} of {len(wrong)})"
    return section(title, rows)


def _draw(runs: Sequence[NeedleRun], folder: Path) -> list[str]:
    """Draw the pictures that there are numbers for; return links to them."""
    links = []
    for name, difference, label, title in (
        (HEATMAP, False, "mean score", "Scores by depth and length"),
        (
            DIFFERENCE,
            True,
            "full attention's score less the method's",
            "Full attention less the others",
        ),
    ):
        (folder / name).unlink(missing_ok=True)
        panels = [panel for run in runs for panel in _panels(run, difference, len(runs) > 1)]
        if panels:
            draw(panels, folder / name, label=label, difference=difference)
            links.append(f"![{title}]({name})")
    return links


def _panels(run: NeedleRun, difference: bool, named: bool) -> list[Panel]:
    methods = run.answered
    if difference:
        methods = [method for method in methods if method != FULL] if FULL in methods else []
    return [
        Panel(
            (f"{run.name}: " if named else "") + ("full - " if difference else "") + method,
            run.lengths,
            run.depths,
            run.differences(method) if difference else run.scores(method),
            run.unfinished(*([FULL] if difference else []), method),
        )
        for method in methods
    ]
