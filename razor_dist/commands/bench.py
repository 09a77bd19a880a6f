"""``razor-dist bench``: speed and memory side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import typer

from razor_dist.commands.bench_options import BenchOptions
from razor_dist.commands.options import with_options

if TYPE_CHECKING:
    from rich.table import Table

    from razor_dist.evals.bench import Ratio, Results
    from razor_dist.evals.bench_shape_results import ShapeResults
    from razor_dist.evals.timing import Timing


@with_options(BenchOptions)
def bench(options: BenchOptions, given: AbstractSet[str]) -> None:
    """Measure speed and memory: transformers' generate, our engine, and our ranks."""
    options.check(given)
    results: Results | ShapeResults
    if options.shape is None:
        results, tables = _compare(options.settings())
    else:
        results = _compare_shape(options.settings())
        tables = [page := results.markdown()]
    from rich.console import Console

    console = Console(highlight=False)
    for table in tables:  # first: whatever becomes of the files, the figures are there
        console.print(table)
    if options.markdown is not None:
        options.markdown.write_text(page)
    if options.json is not None:
        options.json.write_text(json.dumps(results.as_json(), indent=2) + "\n")
    for file in options.files:
        console.print(f"wrote {file}", markup=False, soft_wrap=True)


def _say(line: str) -> None:
    """Every run is told on stderr: a bench that is silent for minutes looks stuck."""
    typer.echo(line, err=True)


# Both import what they need themselves, so that --help does not wait for torch.


def _compare(settings: dict[str, Any]) -> tuple[Results, list[Table | str]]:
    """transformers, our engine and its ranks."""
    from razor_dist.evals.bench import run
    from razor_dist.evals.timing import BenchSettings

    results = run(BenchSettings(**settings), _say)
    s = results.settings
    title = (
        f"{s.model}: {s.tokens} random token ids, {s.new_tokens} new tokens, {s.threads} threads"
    )
    times = _times(title, [results.single, results.parallel])
    same = "the same tokens as" if results.same_tokens else "other tokens than"
    verdict = f"full attention generates {same} transformers"
    return results, [times, _bytes(results), _ratios(results.ratios), verdict]


def _compare_shape(settings: dict[str, Any]) -> ShapeResults:
    """Razor and full attention with random weights."""
    from razor_dist.evals.bench_shape import ShapeSettings, run

    return run(ShapeSettings(**settings), _say)


def _table(title: str, *headings: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
    return table


def _times(title: str, groups: Sequence[Mapping[str, Timing]]) -> Table:
    table = _table(title, "", "prefill, s", "decode, ms/token")
    for group in groups:
        for timing in group.values():
            table.add_row(timing.name, f"{timing.prefill:.2f}", f"{1000 * timing.decode:.1f}")
        table.add_section()
    return table


# What is sent in each phase; the other counters stay at zero.
_PREFILL = ("ring", "halo", "sinks", "compensation", "control")
_DECODE = ("merge", "control")


def _bytes(results: Results) -> Table:
    timings = list(results.parallel.values())
    table = _table("bytes, measured; sent by all ranks together", "", *(t.name for t in timings))
    kept = (f"{max(t.stats['kv_bytes_per_rank']) / 1e6:.1f}" for t in timings)
    table.add_row("KV on the fullest rank, MB", *kept)
    table.add_section()
    for purpose in _PREFILL:
        sent = (t.stats["prefill_bytes"][purpose] / results.settings.tokens for t in timings)
        table.add_row(f"prefill: {purpose}, B/token", *(f"{n:,.0f}" for n in sent))
    table.add_section()
    for purpose in _DECODE:
        sent = (t.stats["decode_bytes"][purpose] for t in timings)
        table.add_row(f"decode: {purpose}, B/token", *(f"{n:,.0f}" for n in sent))
    return table


def _ratios(ratios: Sequence[Ratio]) -> Table:
    table = _table("ratios of medians", "", "ratio", "bar", "")
    verdict = {None: "", True: "met", False: "missed"}
    for ratio in ratios:
        bar = "" if ratio.bar is None else f"≤ {ratio.bar:g}"
        table.add_row(ratio.name, f"{ratio.value:.2f}", bar, verdict[ratio.met])
    return table
