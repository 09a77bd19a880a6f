"""``razor-dist needle-model``: write the test instrument for long prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from razor_dist.config.errors import ConfigError


def needle_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; made if missing.")],
) -> None:
    """Write the needle model to OUT: GLM's architecture, a test instrument for long prompts.

    Its weights are constructed, not trained. It copies a hidden answer exactly, at any length up to
    2,097,152 tokens, and can do nothing else.
    """
    from razor_dist.evals.needle.model import HEAD_MAP, build_needle_model

    try:
        folder = build_needle_model(out)
    except OSError as error:
        raise ConfigError(f"cannot write the model to {out}: {error.strerror}") from error
    typer.echo(f"wrote {folder}, with its head map {folder / HEAD_MAP}")
