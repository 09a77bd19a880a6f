"""The report of ``eval fidelity``: a folder's results as JSON, tables and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from razor_dist.config.errors import ConfigError
from razor_dist.evals.fidelity.task import KIND
from razor_dist.evals.run_notes import markdown, write_json, write_page
from razor_dist.jobs.results import read_job

SUMMARY, PAGE, PICTURE = "fidelity.json", "report.md", "fidelity.svg"
Result = Mapping[str, Any]
_NOTE = (
    "Loss is that above full attention's, in nats per token, with the standard error of its mean; "
    "KL the mean divergence from full attention's distribution, in nats, and what 99 % of tokens "
    "do not exceed; same, how often the likeliest token is the same. KV is what one rank keeps of "
    "the text, measured, and its part of full attention's."
)
_STEPS = {
    "prefill": "in chunks, as a prompt that is continued",
    "decode": "one token at a time, as an answer",
}


def write_report(folder: Path) -> str:
    """Read a folder's results and write all that follows from them; returns the Markdown."""
    job = read_job(folder)
    task = job.settings["task"]
    if task.get("kind") != KIND:
        raise ConfigError(f"{folder} holds results of another job than eval fidelity")
    results = [record["result"] for record in job.records if record["status"] == "done"]
    failed = [
        f"- `{r['id']}`: {r['error']['type']}: {' '.join(r['error']['message'].split())}"
        for r in job.records
        if r["status"] == "failed"
    ]
    untimed = [{k: v for k, v in result.items() if k != "timing"} for result in results]
    write_json(folder / SUMMARY, {"settings": task, "results": untimed})
    texts = _by_text(results)
    pictures = []
    if results:
        draw(texts, folder / PICTURE)
        pictures = [f"![KL by position, and by the bytes of the KV cache]({PICTURE})"]
    return write_page(
        folder / PAGE,
        f"# Fidelity: {task['model']}",
        _NOTE + f" What is compared is read {_STEPS[task['steps']]}.",
        *([_means(texts)] if len(texts) > 1 else []),
        *pictures,
        *(page for text, own in texts.items() for page in _pages(text, own)),
        *(["## Failed", "\n".join(failed)] if failed else []),
    )


def _by_text(results: Sequence[Result]) -> dict[str, list[Result]]:
    texts: dict[str, list[Result]] = {}
    for result in results:
        name = (
            f"{result['text']}, {result['tokens']} tokens, compared from {result['prompt_tokens']}"
        )
        texts.setdefault(name, []).append(result)
    return texts


def _means(texts: Mapping[str, Sequence[Result]]) -> str:
    """Tabulate the methods that read every text by their means over texts, the best KL first."""
    every: dict[str, list[Result]] = {}
    for own in texts.values():
        for result in own:
            every.setdefault(result["method"], []).append(result)
    whole = {name: own for name, own in every.items() if len(own) == len(texts)}
    order = sorted(whole, key=lambda name: _mean(whole[name], "kl"))
    rows = [["method", "heads", "KV of full", "loss", "KL", "same"]]
    for name in order:
        own = whole[name]
        part = fmean(r["kv_bytes"] / r["kv_bytes_full"] for r in own)
        loss = _mean(own, "loss") - _mean(own, "loss_full")
        figures = [f"{loss:+.4f}", f"{_mean(own, 'kl'):.4f}", f"{_mean(own, 'same'):.2%}"]
        rows.append([name, _heads(own[0]), f"{part:.1%}", *figures])
    return f"Means over {len(texts)} texts:\n\n{markdown(rows, 'numbers')}"


def _mean(results: Sequence[Result], key: str) -> float:
    return fmean(result["all"][key] for result in results)


def _heads(result: Result) -> str:
    return "-" if result["retrieval_heads"] is None else str(result["retrieval_heads"])


def _pages(text: str, results: Sequence[Result]) -> Iterator[str]:
    """Yield a text's heading, its figures, and those of each range of positions."""
    yield f"## {text}"
    yield f"Full attention's loss: {results[0]['all']['loss_full']:.4f} nats per token."
    rows = [["method", "heads", "KV, MiB", "of full", "loss", "KL", "KL, 99 %", "same"]]
    for result in results:
        all_, kv = result["all"], result["kv_bytes"]
        rows.append(
            [
                result["method"],
                _heads(result),
                f"{kv / 2**20:.1f}",
                f"{kv / result['kv_bytes_full']:.1%}",
                f"{all_['loss'] - all_['loss_full']:+.4f} ± {all_['loss_change_error']:.4f}",
                f"{all_['kl']:.4f}",
                f"{all_['kl_99']:.3f}",
                f"{all_['same']:.2%}",
            ]
        )
    yield markdown(rows, "numbers")
    yield "KL, and loss above full attention's, by positions:"
    ranges = results[0]["ranges"]
    rows = [["method", *(f"{r['begin']}-{r['end']}" for r in ranges)]]
    for result in results:
        cells = (f"{r['kl']:.4f}, {r['loss'] - r['loss_full']:+.4f}" for r in result["ranges"])
        rows.append([result["method"], *cells])
    yield markdown(rows, "numbers")


def draw(texts: Mapping[str, Sequence[Result]], path: Path) -> None:
    """Draw KL against position, a panel for each text, and against KV bytes, all texts together."""
    names = list(dict.fromkeys(r["method"] for own in texts.values() for r in own))
    many = len(names) > 10
    colours = mpl.colormaps["viridis" if many else "tab10"]
    styles = {
        name: {
            "color": colours(number / (len(names) - 1) if many else number),
            "marker": "osD^v"[number % 5],
        }
        for number, name in enumerate(names)
    }
    columns = len(texts) + 1
    height = max(3.6, 0.2 * len(names) + 0.6)
    # Fixed identifiers and no date: equal results give equal files.
    with mpl.rc_context({"svg.hashsalt": "razor_dist", "svg.fonttype": "none"}):
        figure = Figure((4.2 * columns + 2.4, height), layout="constrained")
        *panels, last = figure.subplots(1, columns, squeeze=False)[0]
        for axis, (text, results) in zip(panels, texts.items(), strict=True):
            _by_position(axis, text, results, styles)
            for result in results:
                kept = 100 * result["kv_bytes"] / result["kv_bytes_full"]
                last.plot(kept, result["all"]["kl"], linestyle="", **styles[result["method"]])
        last.set_title("all positions", fontsize=10)
        last.set_xlabel("KV, % of full attention's")
        for axis in (*panels, last):
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _by_position(
    axis: Axes, text: str, results: Sequence[Result], styles: Mapping[str, Mapping[str, Any]]
) -> None:
    for result in results:
        ranges = result["ranges"]
        middles = [(r["begin"] + r["end"]) / 2 for r in ranges]
        name = result["method"]
        axis.plot(middles, [r["kl"] for r in ranges], markersize=4, label=name, **styles[name])
    axis.set_title(text, fontsize=10)
    axis.set_xlabel("position")
    axis.set_ylabel("KL from full attention, nats")
