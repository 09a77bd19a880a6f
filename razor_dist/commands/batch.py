"""``razor-dist batch``: OpenAI's batch files, answered offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from razor_dist.commands.options import EXIT_SOME_FAILED, hint_at_retry, log_from, with_config_flags
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import JobConfig
from razor_dist.files import replacing

if TYPE_CHECKING:
    from razor_dist.jobs.batch import BatchLine


@with_config_flags(JobConfig)
def batch(
    config: JobConfig,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSONL: custom_id, method, url, body.")
    ],
    out: Annotated[
        Path,
        typer.Option(help="JSONL with the answers; FILE.job beside it keeps them for a rerun."),
    ],
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the bodies. [default: that of --model]")
    ] = None,
    unknown_fields: Annotated[
        Literal["refuse", "warn"],
        typer.Option(help="Fields that are not supported; warn: ignored, and logged once."),
    ] = "refuse",
) -> None:
    """Answer the requests of a batch file.

    Malformed lines and refused requests are reported; the exit code is then 3.
    """
    from razor_dist.jobs.batch import BatchTask, output_lines, read_batch
    from razor_dist.jobs.job import run_job
    from razor_dist.jobs.results import RESULTS, json_line, read_job

    try:
        if out.is_dir():
            raise ConfigError(f"--out must be a file for the answers, and {out} is a folder")
        work = out.with_name(f"{out.name}.job")
        if not work.exists():
            _refuse_existing(out)
    except OSError as denied:  # a name that is too long, or a folder without access
        raise ConfigError(f"cannot write --out {out}: {denied.strerror}") from None
    entries = read_batch(file)
    if not entries:
        raise ConfigError(f"{file} holds no line")
    log_from("info")
    model = served_model_name or config.model
    task = BatchTask({"default": config}, model, entries, unknown_fields)

    def choose_file(folder: Path) -> None:
        nonlocal out
        if folder != work:  # a new folder, such as a.jsonl.job-2: its answers are a-2.jsonl
            out = out.with_stem(out.stem + folder.name.removeprefix(work.name))
            if not (folder / RESULTS).stat().st_size:
                _refuse_existing(out)

    folder = run_job(task, config, work, on_open=choose_file).folder
    records = {record["id"]: record for record in read_job(folder).records}
    failed = 0
    with replacing(out) as draft, draft.open("wb") as target:
        for entry, line in zip(entries, output_lines(entries, records), strict=True):
            target.write(json_line(line))
            if (problem := _problem(entry, line)) is not None:
                failed += 1
                typer.echo(f"{file}: {problem}", err=True)
    hint_at_retry(records[entry.item_id] for entry in entries if entry.problem is None)
    typer.echo(f"{len(entries) - failed} of {len(entries)} requests answered; wrote {out}")
    raise typer.Exit(EXIT_SOME_FAILED if failed else 0)


def _problem(entry: BatchLine, line: Mapping[str, Any]) -> str | None:
    """Return why a request was not answered; None if it was."""
    if line["error"] is not None:
        return str(line["error"]["message"])
    response = line["response"]
    if response["status_code"] == 200:
        return None
    return f"line {entry.line.number}: {response['body']['error']['message']}"


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} is there and no earlier run of this command wrote it")
