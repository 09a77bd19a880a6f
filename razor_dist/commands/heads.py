"""``razor-dist heads``: import, export, compare and show head maps."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import build_config

if TYPE_CHECKING:
    from rich.table import Table

    from razor_dist.heads.compare import Comparison, Overlap

heads = typer.Typer(
    help="Import, export, compare and show head maps.", no_args_is_help=True, rich_markup_mode=None
)


@heads.command("import")
def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="DuoAttention pattern, a folder of full_attention_heads.tsv and config.json; or "
            "KVzip's score files of one model (.pt).",
        ),
    ],
    model: Annotated[
        str, typer.Option(help="smollm2, a folder or a hub id; only its config.json is read.")
    ],
    out: Annotated[Path, typer.Option(help="Head map to write (JSON).")],
    sparsity: Annotated[
        float | None,
        typer.Option(
            help="Fraction of KV heads to stream, 0 to 1. [default: the pattern's own, else "
            "0.5, or 0.75 without grouped heads, as published; of KVzip's files 0.4]"
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Instead: keep the KV heads that score at least this, 0 to 1."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the model.")
    ] = False,
    rope_scaling: Annotated[
        str | None, typer.Option(help="YaRN, as serve has it: a map is for its frequencies.")
    ] = None,
) -> None:
    """Make a head map from published scores: DuoAttention's pattern, or KVzip's files."""
    # Imported here, like below, so that --help does not wait.
    from razor_dist.heads.compare import HeadMapSummary
    from razor_dist.identify.duo import pattern as duo_pattern

    how = build_config(
        EngineConfig, model=model, trust_remote_code=trust_remote_code, rope_scaling=rope_scaling
    ).model_options
    files = all(path.suffix == ".pt" for path in paths)
    if not files and len(paths) > 1:
        raise ConfigError("give one folder of a pattern, or .pt files of KVzip's scores")
    pattern = None if files else duo_pattern.read_pattern(paths[0])
    # Transformers takes seconds to import: first the pattern.
    from razor_dist.identify import kvzip
    from razor_dist.models.loader import read_config
    from razor_dist.models.registry import config_folder, display_name

    config, name = read_config(config_folder(model), **how), display_name(model)
    rule = {"sparsity": sparsity, "threshold": threshold}
    if pattern is None:
        found = kvzip.imported_map(paths, name, config, **rule)
    else:
        found = duo_pattern.head_map(pattern, name, config, **rule)
    found.save(out)
    if pattern is not None and pattern.clipped:
        typer.echo(f"clipped {pattern.clipped} gates a little outside [0, 1]")
    by = next(name for name in rule if name in found.settings)
    typer.echo(f"{by} {found.settings[by]:g}: kept {HeadMapSummary.of(str(out), found)}")
    typer.echo(f"wrote {out}")


@heads.command("export")
def export(
    head_map: Annotated[Path, typer.Argument(metavar="MAP", help="Head map (JSON).")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; made if missing.")],
) -> None:
    """Write a head map as a pattern of DuoAttention's form."""
    from razor_dist.heads.head_map import HeadMap
    from razor_dist.identify.duo.pattern import write_pattern

    own = write_pattern(HeadMap.load(head_map), folder)
    what = "the map's gates" if own else "1 for every KV head that keeps the whole context, else 0"
    typer.echo(f"wrote {folder}: {what}")


@heads.command("compare")
def compare(
    head_maps: Annotated[list[Path], typer.Argument(metavar="MAP...", help="Head maps (JSON).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare two head maps or more: what they keep, what they share."""
    from rich.console import Console

    from razor_dist.heads import compare as comparing
    from razor_dist.heads.head_map import HeadMap

    result = comparing.compare([(str(path), HeadMap.load(path)) for path in head_maps])
    for warning in result.warnings:
        typer.secho(f"warning: {warning}", fg=typer.colors.YELLOW, err=True)
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
        return
    console = Console(highlight=False)
    for table in (_map_table(result), _pair_table(result)):
        console.print(table)


@heads.command("show")
def show(
    head_map: Annotated[Path, typer.Argument(metavar="MAP", help="Head map (JSON).")],
    plot: Annotated[Path | None, typer.Option(help="Picture to write as well (PNG).")] = None,
) -> None:
    """Print a head map: its model, method, settings, and a row per layer."""
    from razor_dist.heads.compare import HeadMapSummary, drawn_rows
    from razor_dist.heads.head_map import HeadMap

    found = HeadMap.load(head_map)
    if plot is not None:  # before anything is printed: it may be refused
        if plot.exists() and plot.samefile(head_map):
            raise ConfigError(f"--plot {plot} is the head map itself; name another file")
        from razor_dist.heads.plot import plot_head_map

        plot_head_map(found, plot)
    summary = HeadMapSummary.of(str(head_map), found)
    typer.echo(f"model   {found.model} ({found.fingerprint})")
    typer.echo(f"method  {found.method}")
    for key, value in found.settings.items():
        typer.echo(f"  {key}: {value if isinstance(value, str) else json.dumps(value)}")
    for name, scores in (("query", found.scores), ("KV", found.kv_scores)):
        for kind in scores:
            typer.echo(f"scores  {kind}, of {name} heads")
    if summary.selected is not None:
        query_heads = summary.layers * found.query_heads
        chosen = round(summary.selected * query_heads)
        typer.echo(f"selected {chosen} of {query_heads} query heads ({summary.selected:.1%})")
    typer.echo(f"kept {summary}")
    if found.verification is not None:
        typer.echo(f"verified on {found.verification}")
    if found.windows is not None:
        own = sorted({window for row in found.windows for window in row if window is not None})
        typer.echo(f"windows of streaming heads, in tokens: {', '.join(map(str, own)) or 'none'}")
    typer.echo("layer by KV head: ■ keeps the whole context, · is streaming")
    for row in drawn_rows(found):
        typer.echo(row)
    if plot is not None:
        typer.echo(f"wrote {plot}")


def _map_table(result: Comparison) -> Table:
    table = _table("head maps", "|file|method", "query heads selected|KV heads kept|layers")
    for number, one in enumerate(result.maps, start=1):
        kept = f"{one.kept_heads} ({one.kept:.1%})"
        layers = f"{one.touched} of {one.layers}"
        table.add_row(str(number), one.name, one.method, _figure(one.selected, ".1%"), kept, layers)
    return table


def _pair_table(result: Comparison) -> Table:
    # Numbers for the maps, since two paths a row would leave no room for anything else.
    kinds = list(dict.fromkeys(kind for pair in result.pairs for kind in pair.correlations))
    figures = ["in both", "Jaccard", "A in B", "B in A", *(f"Spearman {kind}" for kind in kinds)]
    table = _table("pairs", "A, B|heads", "|".join(figures))
    numbers = combinations(range(1, len(result.maps) + 1), 2)
    for (a, b), pair in zip(numbers, result.pairs, strict=True):
        ranks = [_figure(pair.correlations.get(kind)) for kind in kinds]
        table.add_row(f"{a}, {b}", "KV, kept", *_overlap(pair.kv_heads), *ranks)
        if pair.query_heads is not None:
            table.add_row("", "query, selected", *_overlap(pair.query_heads))
    return table


def _overlap(overlap: Overlap) -> tuple[str, ...]:
    shares = (_figure(share, ".1%") for share in (overlap.a_in_b, overlap.b_in_a))
    return (str(overlap.both), _figure(overlap.jaccard), *shares)


def _figure(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _table(title: str, words: str, numbers: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in words.split("|"):
        # A path that does not fit goes on in the next line rather than lose its end.
        table.add_column(heading, overflow="fold")
    for heading in numbers.split("|"):
        table.add_column(heading, justify="right", overflow="fold")
    return table
