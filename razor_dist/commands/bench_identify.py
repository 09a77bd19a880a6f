"""``razor-dist bench-identify``: what finding heads costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from razor_dist.config.errors import ConfigError
from razor_dist.files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from razor_dist.evals.bench_identify import CostResults
    from razor_dist.evals.identify_cost import Work


def bench_identify(
    model: Annotated[
        str | None, typer.Option(help="smollm2 (embedded, the default), a local folder or hub id.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Instead: random weights at the sizes of this config.json."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Random tokens of the probe, whatever the model's context.")
    ] = 2500,
    repeats: Annotated[int, typer.Option(help="How often they are repeated.")] = 4,
    training: Annotated[
        bool, typer.Option("--training", help="Also steps of DuoAttention's gate training.")
    ] = False,
    train_tokens: Annotated[
        int, typer.Option(help="With --training: tokens of each sample.")
    ] = 32768,
    steps: Annotated[int, typer.Option(help="With --training: steps.")] = 100,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's own.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where it runs.")] = "auto",
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="auto: fp32 on cpu, bf16 on cuda.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File to write (JSON).")
    ] = None,
) -> None:
    """Time and peak memory of razor's probe, against one that holds attention matrices."""
    if model is not None and shape is not None:
        raise ConfigError("give --model or --shape, not both")
    check_writable(json_file)
    from rich.console import Console

    from razor_dist.evals.bench_identify import run
    from razor_dist.evals.identify_cost import CostSettings

    settings = CostSettings(
        model=shape or model or "smollm2",
        random_weights=shape is not None,
        tokens=tokens,
        repeats=repeats,
        train_tokens=train_tokens,
        steps=steps,
        threads=threads,
        device=device,
        dtype=dtype,
    )
    works: list[Work] = ["probe", "materialised"]
    if training:
        works.append("training")
    results = run(settings, works, lambda line: typer.echo(line, err=True))
    if json_file is not None:
        json_file.write_text(json.dumps(results.as_json(), indent=2) + "\n")
    console = Console(highlight=False)
    console.print(_table(results))
    for work, cost in results.costs.items():
        if isinstance(cost, str):
            console.print(f"{work} failed: {cost}", markup=False, soft_wrap=True)
    if results.difference is not None:
        console.print(f"scores differ by at most {results.difference:.1e} of the largest")
    if json_file is not None:
        console.print(f"wrote {json_file}", markup=False, soft_wrap=True)


def _table(results: CostResults) -> Table:
    from rich.table import Table

    settings = results.settings
    weights = ", random weights" if settings.random_weights else ""
    table = Table(title=f"{settings.model}{weights}", title_justify="left")
    for heading in ("", "tokens", "s", "memory before, MiB", "peak, MiB", "rise, MiB"):
        table.add_column(heading, justify="right" if heading else "left")
    names = {
        "probe": "razor probe",
        "materialised": "with attention matrices",
        "training": f"gate training, {settings.steps} steps",
    }
    for work, cost in results.costs.items():
        if isinstance(cost, str):
            table.add_row(names[work], "failed")
            continue
        sizes = (cost.before_bytes, cost.peak_bytes, cost.peak_bytes - cost.before_bytes)
        said = (f"{size / 2**20:,.0f}" for size in sizes)
        table.add_row(names[work], f"{cost.tokens:,}", f"{cost.seconds:.1f}", *said)
    return table
