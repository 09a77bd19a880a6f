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
from razor_dist.evals.markdown import markdown
from razor_dist.evals.needle.heatmaps import Panel, draw, short_length
from razor_dist.evals.needle.presets import PRESETS
from razor_dist.evals.needle.results import FULL, MethodSummary, NeedleRun, median_of
from razor_dist.evals.run_notes import write_json

SUMMARY, REPORT = "summary.json", "report.md"
HEATMAP, DIFFERENCE = "heatmap.png", "difference.png"
_WRONG_SHOWN = 20


def write_report(folder: Path) -> str:
    """Read a folder's results and write all that follows from them; returns the Markdown.

    Raises
    ------
    ConfigError
        If the folder holds no results of a needle test.
    """
    run = NeedleRun(folder)
    write_json(folder / SUMMARY, run.as_json())
    pictures = _draw([run], folder)
    page = _page(run, pictures)
    (folder / REPORT).write_text(page + "\n", encoding="utf-8")
    return page


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
    pictures = _draw(runs, out)
    about = [["run", "model", "preset", "query", "haystack", "depths", "needles", "repeats"]]
    for run in runs:
        own = run.settings
        texts = [own["model"], own["preset"], own["query"], own["haystack"] or "-"]
        numbers = [len(own["depths"]), own["needles"], own["repeats"]]
        about.append([run.name, *texts, *map(str, numbers)])
    page = "\n\n".join(
        ["# Needle tests compared", markdown(about), _scores(runs), *_shown(pictures)]
    )
    write_json(out / SUMMARY, {run.name: run.as_json() for run in runs})
    (out / REPORT).write_text(page + "\n", encoding="utf-8")
    return page


def _page(run: NeedleRun, pictures: Sequence[str]) -> str:
    own, preset = run.settings, PRESETS[run.settings["preset"]]
    asked = [
        f"- model: {own['model']}",
        f"- preset: {own['preset']} ({preset.source})",
        f"- score: {preset.score_name}",
        f"- question: {own['query']} the document"
        if own["query"] != "middle"
        else "- question: at the needle",
        f"- haystack: {own['haystack'] or 'of the preset'}"
        + (f" ({own['haystack_fingerprint']})" if own["haystack"] else ""),
        f"- {len(run.lengths)} lengths x {len(run.depths)} depths x {own['needles']} needles x "
        f"{own['repeats']} repeats = {run.expected_cells} questions for each method"
        + (", the needles of all depths in one document" if own["share_depths"] else ""),
    ]
    parts = ["# Needle test", "\n".join(asked), _scores([run])]
    parts += [*_shown(pictures), *_costs_of(run), *_engines(run), *_presses(run), *_wrong(run)]
    if run.failed:
        lines = [f"- `{id}`: {' '.join(why.split())}" for id, why in run.failed.items()]
        parts += ["## Failed", "\n".join(lines)]
    return "\n\n".join(parts)


def _scores(runs: Sequence[NeedleRun]) -> str:
    """Tabulate mean scores, methods of all runs by lengths; a hyphen where nothing was asked."""
    lengths = sorted({length for run in runs for length in run.lengths})
    several = len(runs) > 1
    head = ["method", *map(short_length, lengths), "all", "questions", "lost", "gained"]
    costs = ["failed", "KV per rank, MiB", "prefill, s"]
    rows = [[*(["run"] if several else []), *head, *costs]]
    for run in runs:
        for method in run.methods:
            found = run.summary(method)
            means = [_mean(found.by_length.get(length)) for length in lengths]
            against = method != FULL and found.cells and run.summary(FULL).cells
            rows.append(
                [
                    *([run.name] if several else []),
                    method,
                    *means,
                    _mean(found.score),
                    f"{found.cells}/{run.expected_cells}",
                    str(found.lost) if against else "-",
                    str(found.gained) if against else "-",
                    str(found.failed),
                    *_costs(found),
                ]
            )
    note = (
        "Mean scores of the questions that were answered, of those asked for. Lost and gained are "
        "questions that score below or above full attention's; failed are documents; "
        "KV is measured, of the rank that holds most, after a document of the longest length; "
        "prefill is the median time of its documents, on a machine that may have been busy."
    )
    return f"{markdown(rows)}\n\n{note}"


def _costs(found: MethodSummary) -> list[str]:
    return [
        "-" if found.kv_bytes is None else f"{found.kv_bytes / 2**20:.2f}",
        "-" if found.prefill_seconds is None else f"{found.prefill_seconds:.1f}",
    ]


def _costs_of(run: NeedleRun) -> list[str]:
    """Tabulate time, memory and bytes between ranks, medians of the documents of each length."""
    sent = ("prefill_bytes", "answer_bytes")
    found = [
        (method, length, results)
        for method in run.methods
        for length in run.lengths
        if (results := [r for r in run.results_at(method, length) if sent[0] in r])
    ]
    if not found:
        return []
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
    rows = []
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
    return ["## Costs", markdown([head, *rows], "numbers"), note]


def _mean(score: float | None) -> str:
    return "-" if score is None else f"{score:.3f}"


def _engines(run: NeedleRun) -> list[str]:
    """Tabulate the settings in which engines differ, or that a streaming head's cache hangs on."""
    names = ["attention", "head_map", "prefill", "window_min", "window_ratio", "window_max"]
    names += ["sink_tokens", "block", "compensation"]
    rows = [["method", *names]]
    for method in run.methods:
        engine = run.engines[method]
        if "press" not in engine:
            values = ["-" if (v := engine.get(n)) is None else str(v) for n in names]
            rows.append([method, *values])
    return ["## Engines", markdown(rows)] if len(rows) > 1 else []


def _presses(run: NeedleRun) -> list[str]:
    """Tabulate what kvpress's methods are given and ours are not."""
    rows = [["method", "class", "may keep", "sees the question before it drops anything"]]
    after = run.settings["query"] == "after"
    for method in run.methods:
        engine = run.engines[method]
        if "press" in engine:
            press, part = PRESSES[method], engine["kv_budget"]
            budget = "razor's bytes on one rank" if part is None else f"{part:g} of full attention"
            sees = "yes" if press.with_question or not after else "no"
            rows.append([method, press.name, budget, sees])
    if len(rows) == 1:
        return []
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
    return ["## Baselines", markdown(rows), note]


def _wrong(run: NeedleRun) -> list[str]:
    """Tabulate some of the answers that are not what was expected."""
    wrong = [cell for cell in run.cells if cell.score < 1]
    if not wrong:
        return []
    rows = [["method", "tokens", "depth", "expected", "answer", "score"]]
    for cell in wrong[:_WRONG_SHOWN]:
        answer = " ".join(cell.answer.split()).replace("|", "\\|")[:120]
        place = [short_length(cell.length), f"{cell.depth:g} %"]
        rows.append([cell.method, *place, cell.expected, answer, _mean(cell.score)])
    title = f"## Answers with a score below 1 ({min(len(wrong), _WRONG_SHOWN)} of {len(wrong)})"
    return [title, markdown(rows)]


def _draw(runs: Sequence[NeedleRun], folder: Path) -> list[str]:
    """Draw the pictures that there are numbers for; return their names."""

    def panels(difference: bool) -> list[Panel]:
        return [
            Panel(
                f"{run.name}: {title}" if len(runs) > 1 else title,
                run.lengths,
                run.depths,
                run.differences(method) if difference else run.scores(method),
                run.unfinished(*([FULL] if difference else []), method),
            )
            for run in runs
            for method in run.answered
            if not difference or (FULL in run.answered and method != FULL)
            for title in [f"full - {method}" if difference else method]
        ]

    written = []
    for name, difference, label in (
        (HEATMAP, False, "mean score"),
        (DIFFERENCE, True, "full attention's score less the method's"),
    ):
        (folder / name).unlink(missing_ok=True)
        if found := panels(difference):
            draw(found, folder / name, label=label, difference=difference)
            written.append(name)
    return written


def _shown(pictures: Sequence[str]) -> list[str]:
    titles = {HEATMAP: "Scores by depth and length", DIFFERENCE: "Full attention less the others"}
    return [f"![{titles[name]}]({name})" for name in pictures]
