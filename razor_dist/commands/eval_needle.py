"""``razor-dist eval needle``: the needle test, by methods side by side."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from razor_dist.config.sources import load_config
from razor_dist.evals.needle.config import NeedleConfig


def needle(
    config_file: str | None,
    flags: dict[str, Any],
    out: Annotated[
        Path, typer.Option(help="Folder for results and report; what is there is not run again.")
    ],
) -> None:
    """Hide sentences in long documents and see which methods find them."""
    config = load_config(NeedleConfig, flags, os.environ, config_file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    from razor_dist.evals.needle.report import write_report
    from razor_dist.evals.needle.task import NeedleTask
    from razor_dist.evals.run_notes import note_run
    from razor_dist.jobs.job import run_job

    task = NeedleTask.plan(config)
    summary = run_job(task, config, out, on_open=partial(note_run, config=config))
    typer.echo(write_report(summary.folder))
    typer.echo(f"wrote {summary.folder}")
    if summary.failed:
        typer.echo(f"{summary.failed} documents failed; --retry-failed tries them again", err=True)
        raise typer.Exit(1)
