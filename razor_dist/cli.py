"""The command line ``razor-dist``: a thin shell over the library.

Only the module of the command that is asked for is imported, so the list of commands appears at
once and ``serve`` does not load what ``identify`` plots with.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from razor_dist.config.errors import RazorError

# `name` of `razor_dist.commands.name` (a hyphen is an underscore there), a function or, for a group
# of commands, a typer app; and its line in the list of commands.
COMMANDS = {
    "serve": "Serve a model with OpenAI's API.",
    "identify": "Find a model's retrieval heads.",
    "heads": "Import, export, compare and show head maps.",
    "needle-model": "Write a small model that tests long prompts.",
    "eval": "Measure what is found in long documents.",
    "summarize": "Summarise documents of any length.",
    "batch": "Answer the requests of a batch file.",
    "plan": "Plan memory, time and traffic without weights.",
    "bench": "Measure speed and memory side by side.",
    "bench-identify": "Measure what finding heads costs.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        ``sys.argv[1:]`` if not given.

    Returns
    -------
    int
        Exit code; 2 after a mistake of the user's, which is one line on standard error.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _app(arguments)(arguments, prog_name="razor-dist")
    except RazorError as error:
        typer.secho(f"razor-dist: {error}", fg=typer.colors.RED, err=True)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _app(arguments: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        help="Distributed inference for long contexts.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = _not_loaded
        if name == wanted:
            module = name.replace("-", "_")
            command = getattr(import_module(f"razor_dist.commands.{module}"), module)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=summary)
        else:
            app.command(name, short_help=summary)(command)
    return app


def _not_loaded() -> None:
    """Stands in the list for a command that is not the one asked for."""
