"""``razor-dist serve``."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from razor_dist.commands.options import with_config_flags
from razor_dist.config.errors import ConfigError, RazorError
from razor_dist.config.schema import ServerConfig
from razor_dist.config.sources import Setting, load_config
from razor_dist.server.torchrun import HOLD_BACK_SECONDS, Torchrun, serve_as_rank


@with_config_flags(ServerConfig)
def serve(
    config_file: str | None,
    flags: dict[str, Any],
    model_name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)
    ] = None,
) -> None:
    """Serve a model with OpenAI's API.

    Starts the ranks itself, unless torchrun started several processes: then each is a rank.
    """
    if model_name is not None:
        if flags["model"] not in (None, model_name):
            raise ConfigError(f"the model is given twice: {model_name} and {flags['model']}")
        flags["model"] = model_name
    torchrun = Torchrun.of(os.environ)
    if torchrun is not None:
        code = _serve_under(torchrun, config_file, flags)
    else:
        config = load_config(ServerConfig, flags, os.environ, config_file)
        from razor_dist.server.main import serve as serve_http

        code = serve_http(config)
    raise typer.Exit(code)


def _serve_under(torchrun: Torchrun, config_file: str | None, flags: dict[str, Any]) -> int:
    try:
        implied = {"world_size": Setting(torchrun.world_size, "torchrun")}
        config = load_config(ServerConfig, flags, os.environ, config_file, implied=implied)
        torchrun.check(config)
        from razor_dist.engine.worker import run_rank

        return serve_as_rank(config, torchrun, run_rank)
    except RazorError:
        if torchrun.rank == 0:
            raise
        time.sleep(HOLD_BACK_SECONDS)
        # Reached only on other nodes than rank 0's, each of which has its own output.
        if torchrun.local_rank == 0:
            raise
        return 2
