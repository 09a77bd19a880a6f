"""The command line ``razor-dist``: a thin shell over the library.

Only the module of the command that is asked for is imported, so the list of commands appears at
once and ``serve`` does not load what ``identify`` plots with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
import typer.core

import razor_dist
from razor_dist.config.cores import set_library_defaults
from razor_dist.config.errors import (
    ClusterError,
    ConfigError,
    EngineError,
    RazorError,
    RefusedError,
)
from razor_dist.config.foreign import FOREIGN_SETTINGS

# `name` of `razor_dist.commands.name` (a hyphen is an underscore there), a function or, for a group
# of commands, a typer app; and its line in the list of commands.
COMMANDS = {
    "demo": "Answer a question about a long document, on this machine.",
    "serve": "Serve a model with OpenAI's API.",
    "identify": "Find a model's retrieval heads.",
    "heads": "Import, export, compare and show head maps.",
    "needle-model": "Write a small model that tests long prompts.",
    "eval": "Measure what is found in long documents.",
    "summarize": "Summarise documents of any length.",
    "batch": "Answer the requests of a batch file.",
    "prefill": "Read documents ahead of time, into a store.",
    "store": "List, verify and prune stored prefixes.",
    "plan": "Plan memory, time and traffic without weights.",
    "bench": "Measure speed, memory and cost side by side.",
}


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


# Flags that users of vLLM, SGLang and llama-server may try, and ours for the same end.
FOREIGN_FLAGS = {
    **{_flag(name): _flag(ours) for name, ours in FOREIGN_SETTINGS.items()},
    **dict.fromkeys(("-tp", "-pp", "-dp"), "--world-size"),
    **dict.fromkeys(("--enforce-eager", "--disable-cuda-graph"), "--no-cuda-graphs"),
}


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help lists its flags under their headings, readable in 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all options, those without a heading first."""
        groups: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                other = "Arguments" if parameter.param_type_name == "argument" else "Options"
                heading = getattr(parameter, "rich_help_panel", None) or other
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    The code is 2 after a mistake of the user's and 1 where the engine or the cluster failed; either
    is one line on standard error.
    """
    arguments = list(map(_expanded, sys.argv[1:] if arguments is None else arguments))
    set_library_defaults(os.environ)  # before a command loads torch
    if isinstance(sys.stdout, TextIOWrapper):  # None if it is closed
        # Names of models, files and documents may hold what a locale lacks, or half a character.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _refuse_foreign(arguments)
        command_line(arguments or _being_completed())(arguments, prog_name="razor-dist")
    except RazorError as error:
        typer.secho(f"razor-dist: {error}", fg=typer.colors.RED, err=True)
        failed = isinstance(error, EngineError | ClusterError)
        return 1 if failed and not isinstance(error, RefusedError) else 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _expanded(argument: str) -> str:
    """Expand the ``~`` of ``--out=~/x``: shells do so only at the beginning of a word."""
    flag, equals, value = argument.partition("=")
    return flag + equals + os.path.expanduser(value) if flag.startswith("--") else argument


def command_line(arguments: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_callback,
    )
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = _not_loaded
        if name == wanted:
            module = name.replace("-", "_")
            command = getattr(import_module(f"razor_dist.commands.{module}"), module)
        if isinstance(command, typer.Typer):
            for registered in command.registered_commands:
                registered.cls = GroupedCommand
            app.add_typer(command, name=name, short_help=summary)
        else:
            # The flags that the demo does not know are serve's.
            settings = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(
                name,
                cls=GroupedCommand,
                short_help=summary,
                context_settings=settings if name == "demo" else None,
            )(command)
    return app


def _not_loaded() -> None:
    """Stand in the list for a command that is not the one asked for."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"razor-dist {razor_dist.__version__}")
        raise typer.Exit


def _callback(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Distributed inference for long contexts."""


def _being_completed() -> list[str]:
    """Return the words of the command line that a shell asks to complete; none otherwise."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return words.split()[1:] if "_RAZOR_DIST_COMPLETE" in os.environ else []


def _refuse_foreign(arguments: Sequence[str]) -> None:
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in FOREIGN_FLAGS:
            raise ConfigError(f"unknown flag {flag}; did you mean {FOREIGN_FLAGS[flag]}?")
