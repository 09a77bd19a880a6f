"""``razor-dist demo``: ranks on this machine answer a question about a long document."""

from __future__ import annotations

from typing import Annotated

import typer

from razor_dist.config.cores import usable_cores

_MOST_RANKS = 8


def demo(
    context: typer.Context,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help=f"Ranks. [default: one for each core, from 2 to {_MOST_RANKS}]"),
    ] = None,
) -> None:
    """Find one sentence in a document of 7,000 tokens; other flags go to serve."""
    ranks = world_size or min(max(2, usable_cores()), _MOST_RANKS)
    # Imported here, so that --help does not wait for the demo's libraries.
    from razor_dist.evals.demo import main

    raise typer.Exit(main(ranks, context.args))
