"""``razor-dist identify --method alibi``: the scopes of heads biased by distance."""

from __future__ import annotations

import time
from typing import Any

import typer

from razor_dist.commands.identification.model import Model
from razor_dist.commands.identification.options import IdentifyOptions
from razor_dist.commands.identification.report import kept, progress_bar
from razor_dist.heads import scope
from razor_dist.heads.head_map import HeadMap


def find(model: Model, options: IdentifyOptions) -> HeadMap:
    """See `razor_dist.heads.scope`."""
    settings = scope.ScopeSettings(options.epsilon, options.bound, options.context_tokens)
    loaded: Any = model.load()
    began = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("measuring layers", total=loaded.config.num_hidden_layers)
        measured = scope.measure(loaded, settings, lambda _: bar.advance(task))
    seconds = time.monotonic() - began
    found = scope.head_map(model.name, loaded.config, measured, settings, model.dtype)
    typer.echo(f"scopes at epsilon {settings.epsilon:g}, {settings.bound} bound; {seconds:.1f} s")
    typer.echo(f"kept {kept(found)}: window of {found.settings['context']} tokens or more")
    windows = sorted(w for row in found.windows or () for w in row if w is not None)
    if windows:
        typer.echo(
            f"windows of streaming heads: {windows[0]} to {windows[-1]} tokens, "
            f"{sum(windows) / len(windows):.0f} on average"
        )
    return found
