"""``razor-dist identify``: find a model's retrieval heads and write its head map."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from razor_dist.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from razor_dist.heads.head_map import HeadMap
    from razor_dist.heads.razor import ProbeScores, RazorSettings


def identify(
    model: Annotated[
        str, typer.Argument(help="smollm2 (embedded), a local folder or a hub id org/name.")
    ],
    out: Annotated[Path, typer.Option(help="Head map to write (JSON).")],
    method: Annotated[
        Literal["razor"], typer.Option(help="razor: RazorAttention's induction and echo scores.")
    ] = "razor",
    induction: Annotated[
        float, typer.Option(help="Query heads to choose by induction score, in percent.")
    ] = 14.0,
    echo: Annotated[
        float, typer.Option(help="Query heads to choose by echo score, in percent.")
    ] = 1.0,
    tokens: Annotated[
        int, typer.Option(help="Random tokens; fewer if the model's context is short.")
    ] = 2500,
    repeats: Annotated[int, typer.Option(help="How often they are repeated.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Picture to write as well (PNG).")] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="auto: fp32 on cpu, bf16 on cuda.")
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Find the retrieval heads of MODEL and write its head map."""
    # Imported here, so that --help does not wait for torch.
    from razor_dist.config import EngineConfig
    from razor_dist.engine.build import torch_device, torch_dtype
    from razor_dist.heads import razor
    from razor_dist.heads.plot import plot_head_map
    from razor_dist.models.loader import load_model
    from razor_dist.models.registry import resolve_model

    assert method == "razor"  # the only one so far; typer refuses others
    settings = razor.RazorSettings(induction, echo, tokens, repeats, seed)
    for file in (out, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {file.absolute().parent}")
    config = EngineConfig(model=model, device=device, dtype=dtype)
    where = torch_device(config, 0)
    precision = torch_dtype(config, where)
    path = resolve_model(model, trust_remote_code=trust_remote_code)
    loaded = load_model(path, device=where, dtype=precision, trust_remote_code=trust_remote_code)
    start = time.monotonic()
    result = _probe(loaded, razor.plain_vocabulary(path, loaded.config), settings)
    seconds = time.monotonic() - start
    name = path.name if Path(model).is_dir() else model
    found = razor.head_map(name, loaded.config, result, settings, precision)
    found.save(out)
    if plot is not None:
        plot_head_map(found, plot)
    _report(found, result, settings, seconds)
    typer.echo(f"wrote {out}" + (f" and {plot}" if plot is not None else ""))


def _probe(model: PreTrainedModel, vocabulary: Tensor, settings: RazorSettings) -> ProbeScores:
    """The probe, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from razor_dist.heads.razor import probe

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("probing layers", total=model.config.num_hidden_layers)
        return probe(model, vocabulary, settings, lambda layer: progress.advance(task))


def _report(found: HeadMap, result: ProbeScores, settings: RazorSettings, seconds: float) -> None:
    """Say on stdout what was used, what was chosen and how sure the choice is."""
    heads = len(found.retrieval) * found.query_heads
    kv_heads = len(found.retrieval) * len(found.retrieval[0])
    kept = sum(map(sum, found.retrieval))
    touched = sum(map(any, found.retrieval))
    chosen = round(found.selected_fraction * heads)
    limit = (
        "" if result.tokens == settings.tokens else f", the most that fit; {settings.tokens} asked"
    )
    typer.echo(f"{result.tokens} random tokens x {settings.repeats}{limit}; {seconds:.1f} s")
    for kind, pairs in found.selected.items():
        typer.echo(f"{kind}: {len(pairs)} of {heads} query heads" + _threshold(found, kind))
    typer.echo(
        f"selected {chosen} of {heads} query heads ({found.selected_fraction:.1%}), which promote "
        f"{kept} of {kv_heads} KV heads ({found.kv_fraction:.1%}) on {touched} of "
        f"{len(found.retrieval)} layers"
    )
    chosen_here, chosen_there = result.decide(settings, heads // kv_heads)
    differ = sum(
        a != b
        for here, there in zip(chosen_here.retrieval, chosen_there.retrieval, strict=True)
        for a, b in zip(here, there, strict=True)
    )
    typer.echo(f"the per-token reading of the scores would decide {differ} KV heads otherwise")


def _threshold(found: HeadMap, kind: str) -> str:
    """The lowest chosen score and the highest left out."""
    ranked = sorted((score for row in found.scores[kind] for score in row), reverse=True)
    count = len(found.selected[kind])
    if not 0 < count < len(ranked):
        return ""
    return f", down to {ranked[count - 1]:.3g} (the next has {ranked[count]:.3g})"
