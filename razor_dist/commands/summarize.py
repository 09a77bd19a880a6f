"""``razor-dist summarize``: summaries of many documents of any length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from razor_dist.commands.options import with_config_flags
from razor_dist.config.errors import ConfigError
from razor_dist.config.sources import load_config
from razor_dist.jobs.config import JobConfig
from razor_dist.jobs.style import Style


@with_config_flags(JobConfig)
def summarize(
    config_file: str | None,
    flags: dict[str, Any],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IN...",
            help="Folders, files or patterns; txt, md, rst, html, pdf, epub, docx, also with .gz, "
            "and jsonl with an id and a text in each line.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results; what is there is kept.")],
    words: Annotated[int, typer.Option(help="Length asked for.")] = Style.words,
    language: Annotated[str, typer.Option(help="Such as French.")] = Style.language,
    template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The prompt, with {document} and, if wanted, {kind}, {words} and {language}.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Where a summary is cut off. [default: 3 for each word]")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Of the draws; 0 is greedy.")
    ] = Style.temperature,
    encoding: Annotated[
        str | None, typer.Option(help="Of plain text that is not UTF-8, such as latin-1.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Also write a page for each document.")
    ] = False,
) -> None:
    """Summarise documents, each in one prompt if it fits the model's context.

    Documents that cannot be read are told of in the end and skipped; the exit code is 1 then.
    """
    config = load_config(JobConfig, flags, os.environ, config_file)
    from razor_dist.config.schema import EngineConfig
    from razor_dist.documents.collect import collect
    from razor_dist.documents.read import require_readers
    from razor_dist.jobs.host_engine import settings_of
    from razor_dist.jobs.job import run_job
    from razor_dist.jobs.results import RESULTS, read_job
    from razor_dist.jobs.summarize import SummaryTask, loops, write_pages
    from razor_dist.server.logs import set_up_logging

    style = Style(
        words=words,
        language=language,
        template=Style.template if template is None else _read(template),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=config.seed or 0,
    )
    sources, left_out = collect(inputs, encoding)
    require_readers(source.kind for source in sources)
    for path in left_out:
        typer.echo(f"{path}: left out, not a kind of document that can be read", err=True)
    set_up_logging("info")
    engine = EngineConfig(**settings_of(config))
    task = SummaryTask(engine, style, sources)
    folder = run_job(task, config, out).folder
    found = {record["id"]: record for record in read_job(folder).records}
    records = [found[item.id] for item in task.items()]
    written = [folder / RESULTS]
    if markdown:
        written += write_pages(records, folder / "pages")
    skipped = [
        (source, record["error"])
        for source, record in zip(sources, records, strict=True)
        if record["status"] == "failed"
    ]
    for source, error in skipped:
        typer.echo(f"skipped {source.id}: {error['message'] or error['type']}", err=True)
    pages = f" and {len(written) - 1} pages beside it" if markdown else ""
    looped = [r["result"]["id"] for r in records if r["status"] == "done" and loops(r["result"])]
    for id in looped:
        typer.echo(f"{id}: the summary, or that of a part, repeats itself", err=True)
    done = len(records) - len(skipped)
    typer.echo(f"{done} of {len(records)} documents summarised; wrote {written[0]}{pages}")
    raise typer.Exit(1 if skipped else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the file {path} (--template): {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the file {path} (--template) is not UTF-8 text") from None
