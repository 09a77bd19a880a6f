"""The runs of `razor_dist.evals.million` as tables, and their slopes beside the expected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from razor_dist.config.sizes import tokens
from razor_dist.evals.markdown import markdown
from razor_dist.evals.needle.model import RETRIEVAL, needle_config
from razor_dist.models.shape import ModelShape

Run = Mapping[str, Any]

_ITEMSIZE = 4  # float32
_PURPOSES = ("ring", "halo", "sinks", "compensation", "control")


def polynomial(lengths: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Coefficients (a, b) of the least-squares fit a n + b n², neither below 0."""
    n, y = np.asarray(lengths, dtype=np.float64), np.asarray(values, dtype=np.float64)
    unit = n.max()  # the columns' sizes would differ by 10^6
    columns = np.stack([n / unit, (n / unit) ** 2], axis=1)
    a, b = np.linalg.lstsq(columns, y, rcond=None)[0]
    # Either alone, if both together would need one of them below 0.
    if a < 0:
        a, b = 0.0, float(columns[:, 1] @ y / (columns[:, 1] @ columns[:, 1]))
    elif b < 0:
        a, b = float(columns[:, 0] @ y / (columns[:, 0] @ columns[:, 0])), 0.0
    return float(a / unit), float(b / unit**2)


def line(lengths: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Offset, slope and the largest distance from the least-squares line."""
    slope, offset = np.polyfit(lengths, values, 1)
    left = np.asarray(values) - offset - slope * np.asarray(lengths)
    return float(offset), float(slope), float(np.abs(left).max())


def is_exact(run: Run) -> bool:
    """Whether a run answered all of its questions to the letter, and stopped there."""
    return all(answer["exact"] for answer in run["answers"])


def retrieval_heads(attention: str) -> int:
    """KV heads of the needle model that keep the whole context."""
    flags = [flag for row in RETRIEVAL for flag in row]
    return len(flags) if attention == "full" else sum(flags)


def table(runs: Sequence[Run]) -> str:
    """Markdown: what was measured, by length; then the slopes of runs that differ in length only.

    Runs with a wrong answer are listed, the answer marked, and are in no slope.

    Parameters
    ----------
    runs : sequence of mapping
        Lines of ``runs.jsonl``, in any order.
    """
    if not runs:
        return "No run has ended yet.\n"
    ordered = sorted(runs, key=lambda r: (r["settings"]["attention"] != "razor", _length(r)))
    parts = [_measured(ordered), _bytes(ordered), _answers(ordered)]
    groups: dict[str, list[Run]] = {}
    for run in filter(is_exact, ordered):
        groups.setdefault(_same_but_length(run), []).append(run)
    several = [group for group in groups.values() if len(group) > 1]
    if several:
        parts.append(_slopes(several))
    return "\n\n".join(parts) + "\n"


def _length(run: Run) -> int:
    length: int = run["settings"]["length"]
    return length


def _same_but_length(run: Run) -> str:
    return repr({k: v for k, v in run["settings"].items() if k != "length"})


def _name(run: Run) -> list[str]:
    settings = run["settings"]
    return [f"{settings['attention']}, {settings['world_size']} ranks", tokens(_length(run))]


def _measured(runs: Sequence[Run]) -> str:
    headings = (
        "attention", "tokens", "exact answers", "prefill, s", "CPU s of all ranks",
        "first token of an answer, s", "decode, ms/token", "RSS per rank loaded, MB",
        "RSS per rank at most, MB", "KV per rank, MB",
    )  # fmt: skip
    rows = []
    for run in runs:
        answers = run["answers"]
        count = f"{sum(a['exact'] for a in answers)} of {len(answers)}"
        rows.append(
            [
                *_name(run),
                count if is_exact(run) else f"**{count}**",
                f"{run['prefill_seconds']:.1f}",
                f"{run['prefill_cpu_seconds']:.1f}",
                f"{run['first_token_seconds']:.2f}",
                f"{1000 * run['decode_seconds']:.1f}",
                f"{max(run['rss_loaded']) / 1e6:.0f}",
                f"{max(run['rss_peak']) / 1e6:.0f}",
                f"{max(run['kv_bytes']) / 1e6:.2f}",
            ]
        )
    return markdown([headings, *rows], "numbers")


def _bytes(runs: Sequence[Run]) -> str:
    purposes = [p for p in _PURPOSES if any(run["prefill_bytes"][p] for run in runs)]
    headings = ["attention", "tokens", *(f"prefill: {p}, MB" for p in purposes)]
    headings += ["answers: merge, MB", "answers: all, MB"]
    rows = []
    for run in runs:
        sent, asked = run["prefill_bytes"], run["question_bytes"]
        cells = [f"{sent[p] / 1e6:.2f}" for p in purposes]
        rows.append(
            [*_name(run), *cells, f"{asked['merge'] / 1e6:.2f}", f"{sum(asked.values()) / 1e6:.2f}"]
        )
    return "Bytes sent by all ranks together:\n\n" + markdown([headings, *rows], "numbers")


def _answers(runs: Sequence[Run]) -> str:
    rows = [
        [
            *_name(run),
            f"{a['depth']} %",
            a["key"],
            a["wanted"],
            a["said"],
            "exact" if a["exact"] else "**wrong**",
        ]
        for run in runs
        for a in run["answers"]
    ]
    headings = ("attention", "tokens", "depth", "asked", "hidden", "answered", "that is")
    return markdown([headings, *rows], "numbers")


def _slopes(groups: Sequence[Sequence[Run]]) -> str:
    rows = [row for group in groups for row in _slopes_of(group)]
    headings = ("runs", "what", "fitted", "expected", "farthest from the fit")
    return "Slopes over the length n:\n\n" + markdown([headings, *rows], "numbers")


def _slopes_of(group: Sequence[Run]) -> list[list[str]]:
    settings = group[0]["settings"]
    attention, ranks = settings["attention"], settings["world_size"]
    shape = ModelShape.from_config(needle_config())
    kept, dim = retrieval_heads(attention), shape.head_dim
    n = [_length(run) for run in group]
    stored = 2 * dim * _ITEMSIZE * kept  # bytes of a token's retrieval keys and values
    rows = []

    def add(what: str, fitted: str, expected: str, left: str = "") -> None:
        rows.append([f"{attention}, {ranks} ranks", what, fitted, expected, left])

    for what, key in (("prefill", "prefill_seconds"), ("prefill, CPU", "prefill_cpu_seconds")):
        a, b = polynomial(n, [run[key] for run in group])
        # A query head visits n²/2 pairs, at 4 D flops each.
        heads = kept * shape.group
        rate = heads / 2 * 4 * dim / b / 1e9 if b else float("nan")
        add(
            f"{what}: a n + b n²",
            f"a = {1e6 * a:.1f} µs, b = {1e9 * b:.3f} ns ({rate:.0f} GFLOP/s)",
            f"b ∝ {heads} query heads",
        )
    for what, key, unit, expected in (
        ("KV per rank", "kv_bytes", "B/token", f"{stored / ranks:.0f}"),
        ("RSS per rank at most", "rss_peak", "B/token", f"{stored / ranks:.0f} (KV alone)"),
    ):
        values = [max(run[key]) for run in group]
        _, slope, left = line(n, values)
        add(what, f"{slope:.1f} {unit}", f"{expected} {unit}", f"{left / 1e6:.2f} MB")
    times = [run["decode_seconds"] for run in group]
    offset, slope, left = line(n, times)
    # A step is mostly the ranks' turns on the cores: what the length adds can drown in them.
    speed = f"{stored / slope / 1e9:.1f} GB/s of keys and values" if slope > 0 else "noise"
    add(
        "decode per token",
        f"{1e3 * offset:.1f} ms + {1e9 * slope:.2f} ns n ({speed})",
        f"∝ {kept} KV heads",
        f"{1e3 * left:.1f} ms",
    )
    _, slope, left = line(n, [run["prefill_bytes"]["ring"] for run in group])
    due = ring_bytes_per_token(attention, ranks)
    add("ring", f"{slope:.0f} B/token", f"{due} B/token", f"{left / 1e6:.2f} MB")
    return rows


def ring_bytes_per_token(attention: str, world_size: int) -> int:
    """Bytes that the ring moves per token of a long prompt, all ranks together.

    A chunk's own keys and values pass P - 1 ranks; so do its queries (pass-Q), and every rank sends
    back a float32 partial result with its log-sum-exp. The first chunks' earlier keys travel
    instead (pass-KV), which is less.
    """
    shape = ModelShape.from_config(needle_config())
    group, dim = shape.group, shape.head_dim
    keys, queries, partials = 2 * dim * _ITEMSIZE, dim * _ITEMSIZE, 4 * (dim + 1)
    kept = retrieval_heads(attention)
    return (world_size - 1) * kept * (keys + group * (queries + partials))
