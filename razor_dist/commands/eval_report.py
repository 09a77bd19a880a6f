"""``razor-dist eval report``: what a folder of results tells, written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from razor_dist.config.errors import ConfigError


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the comparison of several needle tests.")
    ] = None,
) -> None:
    """Rebuild the report of each folder, and compare needle tests if there are several."""
    from razor_dist.evals.needle.report import compare
    from razor_dist.evals.needle.report import write_report as write_needle
    from razor_dist.evals.needle.results import KIND as NEEDLE
    from razor_dist.evals.ruler.job import KIND as RULER
    from razor_dist.evals.ruler.report import write_report as write_ruler
    from razor_dist.jobs.results import read_job

    if (len(folders) > 1) != (out is not None):
        raise ConfigError(
            "give --out, a folder for the comparison of several runs"
            if out is None
            else "--out is for the comparison of several runs; a single one is its own folder's"
        )
    writers = {NEEDLE: write_needle, RULER: write_ruler}
    kinds = {folder: read_job(folder).settings["task"].get("kind") for folder in folders}
    for folder, kind in kinds.items():
        if kind not in writers:
            raise ConfigError(f"{folder} holds results of another job than eval needle or ruler")
        if out is not None and kind != NEEDLE:
            raise ConfigError(
                f"{folder} holds results of RULER, and only needle tests are compared; "
                "give such a folder by itself"
            )
    pages = [writers[kinds[folder]](folder) for folder in folders]
    typer.echo(pages[0] if out is None else compare(folders, out))
