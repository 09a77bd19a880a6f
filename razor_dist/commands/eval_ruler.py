"""``razor-dist eval ruler``: RULER's tasks at any length, by methods side by side."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from razor_dist.config.sources import load_config
from razor_dist.evals.ruler.config import RulerConfig


def ruler(
    config_file: str | None,
    flags: dict[str, Any],
    out: Annotated[
        Path, typer.Option(help="Folder for results and table; what is there is not run again.")
    ],
) -> None:
    """Ask RULER's questions about long texts, and see how each method answers them."""
    config = load_config(RulerConfig, flags, os.environ, config_file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    from razor_dist.evals.ruler.job import RulerTask
    from razor_dist.evals.ruler.report import PAGE, write_report
    from razor_dist.evals.run_notes import note_run
    from razor_dist.jobs.job import run_job

    task = RulerTask.plan(config)
    summary = run_job(task, config, out, on_open=partial(note_run, config=config))
    typer.echo(write_report(summary.folder))
    typer.echo(f"wrote {summary.folder / PAGE}")
    if summary.failed:
        typer.echo(f"{summary.failed} samples failed; --retry-failed tries them again", err=True)
        raise typer.Exit(1)
