"""``razor-dist eval needle`` and ``razor-dist eval report``: the needle test and its report."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from razor_dist.config_sources import load_config
from razor_dist.errors import ConfigError
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
    from razor_dist.evals.needle.report import note_run, write_report
    from razor_dist.evals.needle.task import NeedleTask
    from razor_dist.jobs.launch import run_job

    began = datetime.now(UTC)
    summary = run_job(NeedleTask.plan(config), config, out)
    note_run(summary.folder, config, began)
    typer.echo(write_report(summary.folder))
    typer.echo(f"wrote {summary.folder}")
    if summary.failed:
        typer.echo(f"{summary.failed} documents failed; --retry-failed tries them again", err=True)
        raise typer.Exit(1)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the comparison of several runs.")
    ] = None,
) -> None:
    """Rebuild the report of each folder, and compare them if there are several."""
    from razor_dist.evals.needle.report import compare, write_report

    if (len(folders) > 1) != (out is not None):
        raise ConfigError(
            "give --out, a folder for the comparison of several runs"
            if out is None
            else "--out is for the comparison of several runs; a single one is its own folder's"
        )
    pages = [write_report(folder) for folder in folders]
    typer.echo(pages[0] if out is None else compare(folders, out))
