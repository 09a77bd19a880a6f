"""The page of commands and flags, made from what ``--help`` shows.

``python docs/flags.py > docs/flags.md``; a test compares the page with what would be made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click
import typer

from razor_dist.cli import COMMANDS, command_line
from razor_dist.config.schema import EngineConfig, JobConfig, ServerConfig

_INTRODUCTION = """\
# Commands and flags

`razor-dist COMMAND --help` shows the same; both are made from the code (`python docs/flags.py`).
[Serving](serving.md) explains the settings that need more than a sentence.

Every setting of the engine, the server and a job may stand in a YAML file (`--config`) under its
name with underscores (`max_num_seqs: 4`), or in the environment (`RAZOR_MAX_NUM_SEQS=4`). The
command line wins over the environment, the environment over YAML, and YAML over the defaults
shipped for the model in `configs/models/`. Settings of the server and of jobs are passed over by
other commands, in a file with a warning, so that `serve` and `prefill` may share one; other names
are refused.
`LLM(...)` and `AsyncLLM` look at neither. `serve`, `eval`, `summarize`, `batch` and `prefill` take
the engine's settings; `plan` takes them from YAML and the environment, and has flags for those that
a plan depends on. A SIZE may have a unit: `8K` is 8192, `8k` is 8000, `1M` is 1,048,576. [The last
table](#flags-of-each-command) names every flag of every command.
"""

_NAMES = """\
## Flags of each command

"Settings of the engine" and the like stand for all flags in the table of that name. The command's
`--help` says what the other flags do, and which defaults differ.

| command | flags |
|---|---|
"""

# Commands whose own flags have a table: those of daily use.
_TABLES = {"serve", "summarize", "batch", "prefill", "store", "plan"}


def page() -> str:
    """Return the page as Markdown."""
    commands = dict(_commands())
    lines, shared, settings = [_INTRODUCTION], set[str](), dict[str, list[str]]()
    for title, name, cls in (
        ("Settings of the engine", "serve", EngineConfig),
        ("Settings of the server", "serve", ServerConfig),
        ("Settings of jobs", "batch", JobConfig),
    ):
        fields = [p for p in commands[name].params if p.name in cls.model_fields]
        own = [p for p in fields if shared.isdisjoint(_rows([p]))]
        settings[title.lower()] = _names(own)
        shared.update(_rows(own))
        lines += [f"## {title}\n", *_table(_rows(own))]
    lines += ["## Commands\n", "| command | what it does |", "|---|---|"]
    lines += [f"| `razor-dist {name}` | {_summary(each)} |" for name, each in commands.items()]
    lines.append("")
    for name in commands:
        if name.split()[0] in _TABLES:
            rows = [row for row in _rows(commands[name].params) if row not in shared]
            lines += [f"### razor-dist {name}\n", *_table(rows)]
    lines.append(_NAMES.rstrip())
    lines += [f"| `{name}` | {_flags(each, settings)} |" for name, each in commands.items()]
    return "\n".join(lines).rstrip() + "\n"


def _commands() -> Iterator[tuple[str, Any]]:
    for name in COMMANDS:
        app: Any = typer.main.get_command(command_line([name]))
        command = app.commands[name]
        if group := getattr(command, "commands", None):
            yield from ((f"{name} {each}", found) for each, found in group.items())
        else:
            yield name, command


def _summary(command: Any) -> str:
    return " ".join(command.help.split("\n\n")[0].split())


def _rows(parameters: Iterable[Any]) -> list[str]:
    """Rows of flags as ``--help`` shows them: names, sentence, default."""
    rows = []
    for parameter in parameters:
        record = parameter.get_help_record(click.Context(click.Command("razor-dist")))
        if record is None:
            continue
        names, text = (" ".join(part.split()) for part in record)
        text, _, default = text.partition("[default: ")
        default = f"`{default.removesuffix(']')}`" if default else ""
        if "[required]" in text:
            text, default = text.replace("[required]", "").strip(), "required"
        cells = (f"`{names}`", text.strip(), default)
        # A bar ends a cell, and site and GitHub differ in how one is escaped within code.
        rows.append(" | ".join(cell.replace("|", ", ") for cell in cells))
    return rows


def _names(parameters: Iterable[Any]) -> list[str]:
    """Names of flags, ``--no-...`` after its opposite; old names are hidden."""
    shown = (p for p in parameters if p.param_type_name == "option" and not p.hidden)
    return [name for p in shown for name in [*p.opts, *p.secondary_opts]]


def _flags(command: Any, settings: dict[str, list[str]]) -> str:
    """All flags of a command; a title stands for its settings if one of them is missing at most."""
    names, parts = _names(command.params), list[str]()
    for title, members in settings.items():
        missing = [f"`{name}`" for name in members if name not in names]
        if len(missing) < 2:
            names = [name for name in names if name not in members]
            parts.append(" except ".join([title, *missing]))
    return ", ".join([*(f"`{name}`" for name in names), *parts]) or "none"


def _table(rows: list[str]) -> Iterator[str]:
    if rows:
        yield "| flag | what it does | default |"
        yield "|---|---|---|"
        yield from (f"| {row} |" for row in rows)
        yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
