"""``razor-dist plan``: what a deployment would need."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from razor_dist.commands.options import with_config_flags
from razor_dist.config.schema import EngineConfig, ServerConfig
from razor_dist.config.sizes import parse_size
from razor_dist.config.sources import load_config

# Given by plan's own argument and option; without effect on a plan; and weights, since the planner
# knows replicated ones only.
_LEFT_OUT = """
    model device threads collective_timeout heartbeat_timeout seed generation_config ring
    cuda_graphs shared_memory weights max_step_ms scheduling_policy source_heads
    repetition_detection default_max_tokens speculative_config
"""


@with_config_flags(EngineConfig, leave_out=frozenset(_LEFT_OUT.split()))
def plan(
    config_file: str | None,
    flags: dict[str, Any],
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="smollm2, a folder or a hub id; only its config.json is read."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Of every rank: a name in configs/devices, or a YAML file like those."),
    ] = "h200",
    context: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Tokens of the prompt: 1k is 1000, 1K is 1024, 1M is 1048576. [default: "
            "--max-model-len, else the model's own limit]",
        ),
    ] = None,
    retrieval: Annotated[
        float | None,
        typer.Option(help="Instead of a head map: fraction of KV heads that keep everything."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan memory, time and traffic of MODEL; reads no weights.

    Takes the engine's settings as serve does, also from a YAML file made for it. The exit code is 1
    if the deployment does not fit, or the engine refuses its settings.
    """
    config = load_config(ServerConfig, flags | {"model": model}, os.environ, config_file)
    length = None if context is None else parse_size(context)
    # Imported here, so that --help and mistakes in settings do not wait for torch.
    from razor_dist.plan.devices import load_device
    from razor_dist.plan.planner import plan as make_plan

    found = make_plan(config, load_device(device), context=length, retrieval=retrieval)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        from rich.console import Console

        from razor_dist.plan.tables import tables

        Console(highlight=False).print(tables(found))
    for warning in found.warnings:
        typer.secho(f"warning: {warning}", fg=typer.colors.YELLOW, err=True)
    if not found.fits:
        raise typer.Exit(1)
