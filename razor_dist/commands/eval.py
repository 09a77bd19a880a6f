"""``razor-dist eval``: what is found in long documents, by which heads and settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from razor_dist.commands.options import with_config_flags
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.evals.fidelity.config import FidelityConfig
from razor_dist.evals.needle.config import MapsConfig, NeedleConfig, NeedleGridConfig
from razor_dist.evals.settings import METHOD_SETTINGS, WINDOW
from razor_dist.evals.sources.config import CitationsConfig, SourcesConfig
from razor_dist.evals.suites.config import CONFIGS, SUITES, SuiteConfig

eval = typer.Typer(
    help="Measure what is found in long documents.", no_args_is_help=True, rich_markup_mode=None
)

# Attention is what methods differ in.
_ATTENTION = frozenset({"attention"})
_MODEL = {"model", "device", "dtype", "kv_dtype", "chunked_prefill_size", "threads"}
# A grid runs on one rank, and its methods decide the rest by themselves.
_NOT_GRID = frozenset(EngineConfig.model_fields) - _MODEL - {"trust_remote_code", "seed"}
_NOT_SOURCES = _NOT_GRID - set(WINDOW) - {"attention", "head_map", "source_heads", "prefill"}
# Those of a server with several ranks.
_NOT_CITATIONS = _NOT_SOURCES - {"world_size", "weights"}
# Maps are compared by what heads keep.
_NOT_MAPS = _NOT_GRID - set(WINDOW) - {"compensation", "prefill"} | {"kv_dtype"}
_NOT_METHODS = _NOT_GRID - set(METHOD_SETTINGS) | _ATTENTION
# One process compares, without a server's caches; job settings stay.
_NOT_FIDELITY = _NOT_METHODS | {"seed"}

Out: TypeAlias = Annotated[
    Path, typer.Option(help="Folder for results and report; what is there is not run again.")
]


@eval.command("needle")
@with_config_flags(NeedleConfig, leave_out=_ATTENTION)
def needle(config: NeedleConfig, out: Out) -> None:
    """Hide sentences in long documents and see which methods find them."""
    from razor_dist.evals.needle.report import write_report
    from razor_dist.evals.needle.task import NeedleTask

    _run_job(NeedleTask.plan(config), config, out, write_report)


def _run_suite(config: SuiteConfig, out: Out) -> None:
    from razor_dist.evals.suites.job import SuiteTask
    from razor_dist.evals.suites.report import write_report

    suite = config.suite
    write = partial(write_report, kind=suite.name, title=suite.title)
    _run_job(SuiteTask.plan(config), config, out, write)


for _name, _summary in {
    "ruler": "Ask RULER's questions about long texts, and see how each method answers them.",
    "shared": "Ask five questions about each document, which the prefix cache has after the first.",
    "nonliteral": "Ask for people by what the text says of them in other words than the question.",
    "graph": "Ask for children, grandchildren and parents of a node in a long list of edges.",
    "world": "Ask where people and things end up in a story that stands between other prose.",
    "nth": "Ask for the n-th answer to the same request in a long conversation, word for word.",
    "published": "Ask the questions of LongBench v2, InfiniteBench, HELMET or L-CiteEval in your "
    "files.",
}.items():
    _suite_command = with_config_flags(CONFIGS[_name], leave_out=_ATTENTION)(_run_suite)
    eval.command(_name, help=_summary)(_suite_command)


@eval.command("why")
def why(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a suite's run.")],
    out: Out,
    method: Annotated[str, typer.Option(help="The method that lost them.")] = "razor",
    most: Annotated[int, typer.Option(min=1, help="Lost answers, and as many kept ones.")] = 10,
) -> None:
    """Say why a method lost answers of a suite: its heads, its windows, or the model."""
    from razor_dist.evals.needle.task import run_here
    from razor_dist.evals.suites.why import WhyTask, config_of
    from razor_dist.evals.suites.why_report import write_report

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    task = WhyTask.plan(folder, config_of(folder), method, most)
    one_document = task.suite.config.suite.one_document
    typer.echo(write_report(out, method, run_here(task, out), one_document=one_document))
    typer.echo(f"wrote {out}")


@eval.command("fidelity")
@with_config_flags(FidelityConfig, leave_out=_NOT_FIDELITY)
def fidelity(
    config: FidelityConfig,
    out: Out,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TEXT...]",
            help="Files to read, documents or any plain text. [default: the needle tests' prose]",
        ),
    ] = None,
) -> None:
    """Measure how much a head map, a window or a KV dtype changes a model on any text."""
    from razor_dist.evals.fidelity.report import write_report
    from razor_dist.evals.fidelity.task import FidelityTask

    _run_job(FidelityTask.plan(config, texts or ()), config, out, write_report)


def _run_job(task: Any, config: JobConfig, out: Path, write_report: Any) -> None:
    from razor_dist.evals.report import note_run, refuse_others_config
    from razor_dist.jobs.job import run_job

    refuse_others_config(out)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    summary = run_job(task, config, out, on_open=partial(note_run, config=config))
    typer.echo(write_report(summary.folder))
    typer.echo(f"wrote {summary.folder}")
    if summary.failed:
        typer.echo(f"{summary.failed} items failed; --retry-failed tries them again", err=True)
        raise typer.Exit(1)


@eval.command("report")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the comparison of several needle tests.")
    ] = None,
) -> None:
    """Rebuild the report of each folder, and compare needle tests if there are several."""
    from razor_dist.evals.fidelity import report as fidelity
    from razor_dist.evals.fidelity.task import KIND as FIDELITY
    from razor_dist.evals.needle import report as needle
    from razor_dist.evals.needle.results import KIND as NEEDLE
    from razor_dist.evals.suites.report import write_report
    from razor_dist.jobs.results import HEADER, read_job

    if len(folders) > 1 and out is None:
        raise ConfigError("give --out, a folder for the comparison of several runs")
    if len(folders) == 1 and out is not None:
        raise ConfigError(
            "--out is for the comparison of several runs; a single one is its own folder's"
        )
    if out is not None and (out / HEADER).exists():
        raise ConfigError(
            f"--out {out} holds a run, whose own report the comparison would overwrite; "
            "give another folder"
        )
    writers: dict[str, Callable[[Path], str]] = {
        NEEDLE: needle.write_report,
        FIDELITY: fidelity.write_report,
        **{kind: partial(write_report, kind=kind, title=title) for kind, title in SUITES.items()},
    }
    kinds = {folder: read_job(folder).settings["task"].get("kind") for folder in folders}
    for folder, kind in kinds.items():
        if kind not in writers:
            raise ConfigError(
                f"{folder} holds results of another job than eval {', '.join(writers)}"
            )
        if out is not None and kind != NEEDLE:
            raise ConfigError(
                f"{folder} holds results of {kind}, and only needle tests are compared; "
                "give such a folder by itself"
            )
    try:
        pages = [writers[kinds[folder]](folder) for folder in folders]
        page = pages[0] if out is None else needle.compare(folders, out)
    except OSError as error:
        what = error.filename or "the report"
        raise ConfigError(f"cannot write {what}: {error.strerror}") from None
    typer.echo(page)


@eval.command("grid")
@with_config_flags(NeedleGridConfig, leave_out=_NOT_METHODS - {"weight_dtype"})
def grid(config: NeedleGridConfig, out: Out) -> None:
    """Ask the embedded model for one number at 50 places, with several windows and head maps."""
    from razor_dist.evals.grid import GridTask
    from razor_dist.evals.methods import methods_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    own = methods_of(config, config.method_settings, as_written=True)
    results = GridTask.plan(config, own, preset=config.preset).run_in(out)
    kept = {method.name: [method.kept] for method in own}
    _write_page(out / "report.md", results.table(kept, ["KV heads kept"]))


@eval.command("sources")
@with_config_flags(SourcesConfig, leave_out=_NOT_SOURCES)
def sources(config: SourcesConfig, out: Out) -> None:
    """See if an answer's sources hold what was asked for: of needles, of RULER's tasks."""
    from razor_dist.evals.needle.task import run_here
    from razor_dist.evals.report import write_json
    from razor_dist.evals.sources.report import SourcesReport, page
    from razor_dist.evals.sources.task import SourcesTask

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    task = SourcesTask.plan(config)
    found = SourcesReport.of(task, run_here(task, out)).summary()
    write_json(out / "sources.json", found)
    _write_page(out / "report.md", page(found, config.source_heads))


@eval.command("citations")
@with_config_flags(CitationsConfig, leave_out=_NOT_CITATIONS)
def citations(config: CitationsConfig, out: Out) -> None:
    """See if a server cites what the needle says, and nothing without it."""
    from razor_dist.evals.needle.task import run_here
    from razor_dist.evals.report import write_json
    from razor_dist.evals.sources.citations import CitationsTask, figures, page

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    results = run_here(CitationsTask.plan(config), out)
    write_json(out / "citations.json", results)
    _write_page(out / "report.md", page(figures(results)))


@eval.command("maps")
@with_config_flags(MapsConfig, leave_out=_NOT_MAPS)
def maps(
    config: MapsConfig,
    out: Out,
    criteria: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CRITERION|MAP...]",
            help="razor, onthefly, kvzip, reach: found first; paths of head maps (.json); "
            "fidelity: by the loss of each head alone. [default: all but paths]",
        ),
    ] = None,
) -> None:
    """Compare head maps at equal bytes, with two classes of heads and with a middle one."""
    from razor_dist.commands.maps_run import run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    typer.echo(run(config, criteria, out))
    typer.echo(f"wrote {out}")


def _write_page(path: Path, page: str) -> None:
    from razor_dist.evals.report import write_page

    typer.echo(write_page(path, page))
    typer.echo(f"wrote {path.parent}")
