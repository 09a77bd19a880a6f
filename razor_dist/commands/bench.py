"""``razor-dist bench``: speed, memory and cost, measured side by side."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from razor_dist.commands.options import with_options
from razor_dist.evals.bench import settings as given
from razor_dist.evals.bench.serve_settings import ServeBenchSettings

# The benches by name, which is their module's too.
BENCHES: Mapping[str, tuple[type[given.BenchSettings], str]] = {
    "engine": (given.EngineBenchSettings, "transformers' generate, our engine, and our ranks."),
    "batch": (given.BatchBenchSettings, "Several answers at once beside one; the embedded model."),
    "busy": (given.BusyBenchSettings, "The same beside processes that compute without end."),
    "shape": (
        given.ShapeBenchSettings,
        "Razor against full attention with random weights at the sizes in FOLDER, on one rank.",
    ),
    "probe": (given.ProbeBenchSettings, "Razor's probe against one that holds attention matrices."),
    "serve": (ServeBenchSettings, "Load on a server with OpenAI's API: ours, llama-server, vLLM."),
    "prefix": (
        given.PrefixBenchSettings,
        "What the prefix cache saves over HTTP, and after a kill.",
    ),
    "start": (given.RanksBenchSettings, "A server's start and its first prompts."),
    "drafts": (given.DraftsBenchSettings, "Answers about a document, with drafts and without."),
    "sources": (given.SourcesBenchSettings, "Cost of asking for an answer's sources."),
    "gpu": (
        given.GpuBenchSettings,
        "All that only a GPU can show, in nine minutes, without a network.",
    ),
}


class _BenchGroup(TyperGroup):
    """Flags without a subcommand are those of ``engine``, or of ``shape`` with ``--shape``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            former = "--shape" in args
            args = ["shape" if former else "engine", *(a for a in args if a != "--shape")]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=_BenchGroup,
    help="Measure speed, memory and cost side by side.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _add(name: str, kind: type[given.BenchSettings], summary: str) -> None:
    def run(settings: given.BenchSettings) -> None:
        # Every run is logged on stderr: a benchmark that is silent for minutes looks stuck.
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("razor_dist.evals.bench").setLevel(logging.INFO)
        # Imported here, so that --help does not wait for torch.
        record = import_module(f"razor_dist.evals.bench.{name}").run(settings)
        typer.echo(record.page())  # first: whatever becomes of the files, the figures are there
        record.write()
        for file in filter(None, settings.files):
            typer.echo(f"wrote {file}")

    bench.command(name, help=summary)(with_options(kind)(run))


for _name, (_kind, _summary) in BENCHES.items():
    _add(_name, _kind, _summary)
