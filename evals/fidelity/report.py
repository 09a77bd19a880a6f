"""The report of ``eval fidelity``: a folder's results as JSON, tables and a picture."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from razor_dist.evals.fidelity.task import GROUP, KIND
from razor_dist.evals.report import (
    INTERVAL,
    Run,
    draw_legend,
    failures,
    grouped,
    interval,
    markdown,
    save_picture,
    table,
    write_json,
    write_page,
)

SUMMARY, PAGE, PICTURE = "fidelity.json", "report.md", "fidelity.svg"
Result = Mapping[str, Any]
_NOTE = (
    "Loss is that above full attention's, in nats per token, with the standard error of its mean; "
    "KL the mean divergence from full attention's distribution, in nats, and what 99 % of tokens "
    "do not exceed; same, how often the likeliest token is the same. KV is what one rank keeps of "
    "the text, measured, and its part of full attention's."
)
_TEXT = "{text}, {tokens} tokens, compared from {prompt_tokens}"
_STEPS = {
    "prefill": "in chunks, as a prompt that is continued",
    "decode": "one token at a time, as an answer",
}


# Columns by title, as formats of what `_row` returns.
_HEADS = {"method": "{method}", "heads": "{heads}"}
_COLUMNS = {
    **_HEADS,
    "KV, MiB": "{mib:.1f}",
    "of full": "{part:.1%}",
    "loss": "{change:+.4f} ± {loss_change_error:.4f}",
    "KL": "{kl:.4f}",
    "KL, 99 %": "{kl_99:.3f}",
    "same": "{same:.2%}",
}
_COPIED = {
    "method": "{method}",
    "read, text": "{text_blocks}",
    "by 16": "{text_tiles}",
    "read, copy": "{copy_blocks}",
    "by 16 ": "{copy_tiles}",
    "copy: right": "{right}",
    "full": "{right_full}",
    "copy: loss": "{loss}",
    "text: KL": "{kl}",
    "text: same": "{same}",
}
_MEANS = {
    **_HEADS,
    "KV of full": "{part:.1%}",
    "loss": "{change:+.4f}",
    "KL": "{kl:.4f}",
    "same": "{same:.2%}",
}
_COPYING = (
    "Copying, and the blocks that are chosen for it, in the last {tokens} tokens, which repeat a "
    f"passage. Right is how often the likeliest token is the text's, with its {INTERVAL} "
    "over runs of {group} tokens, as if these were independent: neighbours are alike, so less is "
    "known than it says. Loss is above full attention's. Read is the share of blocks of 128 keys "
    "before a query that it reads, and that the union of 16 queries reads, means over retrieval "
    "heads. KL and same are of all text that is no copy."
)


def write_report(folder: Path) -> str:
    """Read a folder's results and write all that follows from them; returns the Markdown."""
    run = Run(folder, KIND, "eval fidelity")
    untimed = [{k: v for k, v in result.items() if k != "timing"} for result in run.results]
    write_json(folder / SUMMARY, {"settings": run.settings, "results": untimed})
    texts = grouped(_named_apart(run.results), _TEXT.format_map)
    picture = ""
    if run.results:
        draw(texts, folder / PICTURE)
        picture = f"![KL by position, and by the bytes of the KV cache]({PICTURE})"
    return write_page(
        folder / PAGE,
        f"# Fidelity: {run.settings['model']}",
        _NOTE + f" What is compared is read {_STEPS[run.settings['steps']]}.",
        _means(texts) if len(texts) > 1 else "",
        *_copying(texts),
        picture,
        *(page for text, own in texts.items() for page in _pages(text, own)),
        failures(run.failed),
    )


def _named_apart(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Add a digest to the name of a text or method where a folder has another of that name."""
    found = [dict(result) for result in results]
    for name, content in (("text", "digest"), ("method", "fingerprint")):
        kinds = {(result[name], result.get(content)) for result in results}
        twice = Counter(own for own, _ in kinds)
        for result in found:
            if twice[result[name]] > 1:
                result[name] = f"{result[name]} ({result.get(content, 'of before')})"
    return found


def _row(result: Result) -> dict[str, Any]:
    heads, all_ = result["retrieval_heads"], result["all"]
    return {
        "method": result["method"],
        "heads": "-" if heads is None else heads,
        "mib": result["kv_bytes"] / 2**20,
        "part": result["kv_bytes"] / result["kv_bytes_full"],
        "change": all_["loss"] - all_["loss_full"],
        **all_,
    }


def _means(texts: Mapping[str, Sequence[Result]]) -> str:
    """Tabulate the methods that read every text by their means over texts, the best KL first."""
    every = map(_row, itertools.chain.from_iterable(texts.values()))
    keys = ("part", "change", "kl", "same")
    rows = [
        rows[0] | {key: fmean(row[key] for row in rows) for key in keys}
        for rows in grouped(every, itemgetter("method")).values()
        if len(rows) == len(texts)
    ]
    rows.sort(key=lambda row: row["kl"])
    return f"Means over {len(texts)} texts:\n\n{table(_MEANS, rows, 'numbers')}"


def _copying(texts: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Yield tables of copies beside text: means over those that have copies at the same places.

    Only methods that read each of these are in them.
    """
    every = itertools.chain.from_iterable(texts.values())
    copies = [r for r in every if any("copied" in part for part in r["ranges"])]
    by_ends = grouped(copies, lambda r: tuple(part["end"] for part in r["ranges"]))
    for ends, alike in by_ends.items():
        found = grouped(alike, itemgetter("method"))
        most = max(map(len, found.values()))
        own = {name: results for name, results in found.items() if len(results) == most}
        first = next(iter(own.values()))[0]["ranges"]
        yield _COPYING.format(tokens=ends[-1] - first[-1]["begin"] + 1, group=GROUP)
        rows = [_copying_row(name, results) for name, results in own.items()]
        yield table(_COPIED, rows, "numbers")
        yield "By length: of text the share of blocks read and KL, of copies the share and right."
        kinds = ("copy" if "copied" in part else "text" for part in first)
        head = ["method", *(f"{kind} to {end}" for kind, end in zip(kinds, ends, strict=True))]
        yield markdown([head, *(_by_length(*item) for item in own.items())], "numbers")


def _copying_row(name: str, results: Sequence[Result]) -> dict[str, str]:
    copies = [result["ranges"][-1] for result in results]
    texts = [[part for part in r["ranges"] if "copied" not in part] for r in results]
    text = list(itertools.chain.from_iterable(texts))
    low, high = interval([group for copy in copies for group in copy["copied"]])
    weights = [part["tokens"] for part in text]
    ends = {"text": [own[-1] for own in texts if own], "copy": copies}
    read = {
        f"{kind}_{what}": f"{fmean(p[what] for p in parts):.1%}"
        if parts and what in parts[0]
        else "-"
        for kind, parts in ends.items()
        for what in ("blocks", "tiles")
    }
    return read | {
        "method": name,
        "right": f"{fmean(c['right'] for c in copies):.3f} ({low:.3f}-{high:.3f})",
        "right_full": f"{fmean(c['right_full'] for c in copies):.3f}",
        "loss": f"{fmean(c['loss'] - c['loss_full'] for c in copies):+.3f}",
        "kl": f"{fmean((part['kl'] for part in text), weights):.4f}" if text else "-",
        "same": f"{fmean((part['same'] for part in text), weights):.3f}" if text else "-",
    }


def _by_length(name: str, results: Sequence[Result]) -> list[str]:
    cells = [name]
    for parts in zip(*(result["ranges"] for result in results), strict=True):
        read = f"{fmean(p['blocks'] for p in parts):.1%}" if "blocks" in parts[0] else "-"
        key, form = ("right", ".3f") if "copied" in parts[0] else ("kl", ".4f")
        cells.append(f"{read}, {fmean(p[key] for p in parts):{form}}")
    return cells


def _pages(text: str, results: Sequence[Result]) -> Iterator[str]:
    """Yield a text's heading, its figures, and those of each range of positions."""
    yield f"## {text}"
    yield f"Full attention's loss: {results[0]['all']['loss_full']:.4f} nats per token."
    yield table(_COLUMNS, map(_row, results), "numbers")
    yield "KL, and loss above full attention's, by positions:"
    rows = [["method", *(f"{r['begin']}-{r['end']}" for r in results[0]["ranges"])]]
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
    figure = Figure((4.2 * columns + 2.4, height), layout="constrained")
    *panels, last = figure.subplots(1, columns, squeeze=False)[0]
    for axis, (text, results) in zip(panels, texts.items(), strict=True):
        for result in results:
            name, ranges = result["method"], result["ranges"]
            middles = [(r["begin"] + r["end"]) / 2 for r in ranges]
            axis.plot(middles, [r["kl"] for r in ranges], markersize=4, label=name, **styles[name])
            kept = 100 * result["kv_bytes"] / result["kv_bytes_full"]
            last.plot(kept, result["all"]["kl"], linestyle="", **styles[name])
        axis.set_title(text, fontsize=10)
        axis.set(xlabel="position", ylabel="KL from full attention, nats")
    last.set_title("all positions", fontsize=10)
    last.set_xlabel("KV, % of full attention's")
    for axis in (*panels, last):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    draw_legend(figure)
    save_picture(figure, path, "svg")
