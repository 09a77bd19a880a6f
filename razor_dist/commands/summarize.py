"""``razor-dist summarize``: summaries of many documents of any length."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from razor_dist.commands.options import (
    EXIT_SOME_FAILED,
    Encoding,
    documents,
    hint_at_retry,
    log_from,
    with_config_flags,
)
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.config.sources import read_text
from razor_dist.jobs.style import Style

# Disk limit of one engine's prefixes while the job runs, in GiB. All engines together take at most
# a quarter of the free space.
_MOST_GB = 32.0
# Subfolder of the results that holds the prefixes until the job is done.
_PREFIXES = ".prefixes"


class SummaryConfig(JobConfig):
    """The settings; ``prefix_store_gb`` alone bounds the store that the command makes itself."""

    makes_store: ClassVar[bool] = True


@with_config_flags(SummaryConfig)
def summarize(
    config: SummaryConfig,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IN...",
            help="Folders, files or patterns; txt, md, rst, html, pdf, epub, docx, also with .gz, "
            "and jsonl with an id and a text in each line.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results; what is there is kept.")],
    style: Style,
    template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The prompt, with {document} and, if wanted, {kind}, {words} and {language}.",
        ),
    ] = None,
    encoding: Encoding = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Also write a page for each document.")
    ] = False,
) -> None:
    """Summarise documents, each in one prompt if it fits the model's context.

    Documents that cannot be read are skipped and named at the end; the exit code is 3 then.
    """
    from razor_dist.jobs.job import run_job
    from razor_dist.jobs.results import PARTS, RESULTS, read_job
    from razor_dist.jobs.summarize import SummaryTask
    from razor_dist.jobs.summary_pages import write_pages

    if template is not None:
        style = replace(style, template=read_text(template, "the --template file"))
    sources = documents(inputs, encoding)
    log_from("info")
    engines: dict[str, EngineConfig] = {"default": config}
    task = SummaryTask(engines, replace(style, seed=config.seed or 0), sources)

    def keep_prefixes(folder: Path) -> None:  # no engine is open yet
        engines["default"] = resuming(config, folder.absolute() / _PREFIXES, len(sources))

    def drop_prefixes(folder: Path) -> None:
        if not (folder / PARTS).exists():
            shutil.rmtree(folder / _PREFIXES, ignore_errors=True)

    folder = run_job(task, config, out, on_open=keep_prefixes, on_done=drop_prefixes).folder
    found = {record["id"]: record for record in read_job(folder).records}
    records = [found[item.id] for item in task.items()]
    count = len(write_pages(records, folder / "pages")) if markdown else 0
    pages = f" and {count} pages beside it" if markdown else ""
    _name_failures([source.id for source in sources], records)
    done = sum(record["error"] is None for record in records)
    if (kept := folder / _PREFIXES).exists():
        size = _gigabytes(kept)
        typer.echo(f"kept {kept} ({size:.1f} GiB) for documents that are not done", err=True)
    summarised = f"{done} of {len(records)} documents summarised"
    typer.echo(f"{summarised}; wrote {folder / RESULTS}{pages}")
    raise typer.Exit(EXIT_SOME_FAILED if done < len(records) else 0)


def _name_failures(ids: Sequence[str], records: Sequence[dict[str, Any]]) -> None:
    from razor_dist.jobs.summarize import loops

    for id_, record in zip(ids, records, strict=True):
        if (error := record["error"]) is not None:
            typer.echo(f"skipped {id_}: {error['message'] or error['type']}", err=True)
        elif loops(record["result"]):
            typer.echo(f"{id_}: the summary, or that of a part, is cut at a loop", err=True)
    hint_at_retry(records)


def _gigabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**30


def _ranks_of_own_ray(config: JobConfig) -> int:
    """Return the number of ranks that a Ray of this job's own has processors and GPUs for."""
    import torch  # --help does not wait for it

    ranks = int((os.cpu_count() or 1) / config.cpus_per_rank)
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    return min(ranks, gpus) if gpus else ranks


def resuming(config: JobConfig, folder: Path, documents: int) -> JobConfig:
    """Let engines store prefixes in ``folder`` for the next run, where that is possible.

    On a cluster that is joined, the engines' nodes may have no such folder. Ranks that share the
    steps of an answer keep no prefixes, and a store would end that (`why_replicated`).
    """
    if config.prefix_store is not None:
        return config
    shares = config.world_size > 1 and config.decode != "replicated"
    if not config.caches_prefixes or shares or config.cluster:
        if config.prefix_store_gb is not None:
            raise ConfigError("prefix_store_gb bounds a store, and this job makes none by itself")
        return config
    engines = config.engines or 1
    if config.ray and config.engines is None:
        engines = _ranks_of_own_ray(config) // config.world_size
    engines = max(1, min(engines, documents))
    # Prefixes of an earlier run, perhaps of more engines, count as free space, as they did then.
    free = shutil.disk_usage(folder.parent).free / 2**30 + _gigabytes(folder)
    own = sum(_gigabytes(folder / str(number)) for number in range(engines))
    shared = (free / 4 - (_gigabytes(folder) - own)) / engines
    most = min(_MOST_GB, shared, config.prefix_store_gb or math.inf)
    store = {"prefix_store": str(folder / "{engine}"), "prefix_store_gb": max(most, 1e-3)}
    return config.model_copy(update=store)
