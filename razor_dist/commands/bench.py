"""``razor-dist bench``: speed and memory side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from razor_dist.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from razor_dist.evals.bench import Results


def bench(
    model: Annotated[
        str, typer.Option(help="smollm2 (embedded), a local folder or a hub id.")
    ] = "smollm2",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 7000,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated after it.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each engine.")] = 3,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of one rank; several ranks share them.")
    ] = 2,
    world_sizes: Annotated[
        str, typer.Option(help="Numbers of ranks; the others are compared with the first.")
    ] = "1,8",
    seed: Annotated[int, typer.Option(min=0, help="Of the prompt's random token ids.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File to write (JSON).")
    ] = None,
) -> None:
    """Measure speed and memory: transformers' generate, our engine, and our ranks."""
    sizes = _sizes(world_sizes)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {json_file}: there is no such folder")
    # Imported here, so that --help does not wait for torch.
    from rich.console import Console

    from razor_dist.evals.bench import run
    from razor_dist.evals.timing import BenchSettings

    settings = BenchSettings(model, tokens, new_tokens, repeats, threads, sizes, seed)
    # Every run is told on stderr: a bench that is silent for minutes looks stuck.
    results = run(settings, lambda line: typer.echo(line, err=True))
    if json_file is not None:
        json_file.write_text(json.dumps(results.as_json(), indent=2) + "\n")
    console = Console(highlight=False)
    for table in (_times(results), _bytes(results), _ratios(results)):
        console.print(table)
    same = "the same tokens as" if results.same_tokens else "other tokens than"
    console.print(f"full attention generates {same} transformers")
    if json_file is not None:
        console.print(f"wrote {json_file}", markup=False, soft_wrap=True)


def _sizes(text: str) -> tuple[int, ...]:
    """The numbers in ``--world-sizes``."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"world_sizes is {text!r}; give positive integers such as 1,8")
    sizes = tuple(int(word) for word in words)
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"world_sizes is {text!r}; give each number once")
    return sizes


def _table(title: str, *headings: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
    return table


def _times(results: Results) -> Table:
    s = results.settings
    table = _table(
        f"{s.model}: {s.tokens} random token ids, {s.new_tokens} new tokens, {s.threads} threads",
        "",
        "prefill, s",
        "decode, ms/token",
    )
    for group in (results.single, results.parallel):
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


def _ratios(results: Results) -> Table:
    table = _table("ratios of medians", "", "ratio", "bar", "")
    verdict = {None: "", True: "met", False: "missed"}
    for ratio in results.ratios:
        bar = "" if ratio.bar is None else f"≤ {ratio.bar:g}"
        table.add_row(ratio.name, f"{ratio.value:.2f}", bar, verdict[ratio.met])
    return table
