"""Command-line flags made from the fields of a class.

Names, types and defaults exist once, in the class; a command asks for them here.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import typer
from typing_extensions import Doc

from razor_dist.config.errors import ConfigError
from razor_dist.config.logs import LOG_ENV, set_up_logging
from razor_dist.config.schema import RENAMED, EngineConfig, ServerConfig
from razor_dist.config.sizes import takes_sizes
from razor_dist.config.sources import Setting, load_config, shipped_names

if TYPE_CHECKING:
    from razor_dist.documents.collect import DocumentSource
    from razor_dist.jobs.results import Record

# Exit code of a command that has left out unusable inputs (documents, requests, prefixes) and done
# the others. 1 is a failure of the command, 2 a mistake in its arguments.
EXIT_SOME_FAILED = 3

_Parameters: TypeAlias = dict[str, inspect.Parameter]
Encoding = Annotated[
    str | None, typer.Option(help="Of plain text that is not UTF-8, such as latin-1.")
]


def documents(inputs: Sequence[str], encoding: str | None) -> list[DocumentSource]:
    """Collect the documents that a command is given; name unreadable files on stderr."""
    from razor_dist.documents.collect import collect

    sources, left_out = collect(inputs, encoding)
    for path, problem in left_out.items():
        typer.echo(f"{path}: left out, {problem}", err=True)
    return sources


def log_from(level: str) -> None:
    """Log as the environment says, by default from ``level`` on, as text."""
    env = {name: os.environ[name] for name in LOG_ENV if name in os.environ}
    config = load_config(ServerConfig, env=env, implied={"log_level": Setting(level, "")})
    set_up_logging(config.log_level, config.log_format)


def hint_at_retry(records: Iterable[Record]) -> None:
    """Say on stderr how failures are tried again, if the next run does not do that by itself."""
    from razor_dist.jobs.results import has_failed, is_retryable

    failed = sum(has_failed(record) and not is_retryable(record) for record in records)
    if failed:
        typer.echo(f"{failed} failed; --retry-failed tries them again", err=True)


def with_config_flags(
    cls: type[EngineConfig], *, leave_out: frozenset[str] = frozenset()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a typer command one flag for each setting of ``cls``, and ``--config``.

    A command with a parameter ``config`` gets the settings. Other commands get the arguments of
    `load_config`: ``config_file`` (path or None) and ``flags`` by field name, None if not given.
    Further options are keyword arguments with typer defaults, or dataclasses as for `with_options`.
    Fields in ``leave_out`` get no flag.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [name for name in cls.model_fields if name not in leave_out]
        old = [name for name, now in RENAMED.items() if now in names]
        own = dict(inspect.signature(command, eval_str=True).parameters)
        loads = "config" in own
        for name in ("config",) if loads else ("config_file", "flags"):
            del own[name]
        kinds = {name: p.annotation for name, p in own.items()}
        groups: dict[str, Any] = {k: v for k, v in kinds.items() if dataclasses.is_dataclass(v)}
        options = [_options(groups[k]) if k in groups else {k: p} for k, p in own.items()]

        def run(config: list[str] | None, **given: Any) -> None:
            if config and len(config) > 1:  # typer would drop all but the last
                raise ConfigError(f"--config: give one file, not {' and '.join(config)}")
            path = config[0] if config else None
            for name, kind in groups.items():
                given[name] = kind(**{option: given.pop(option) for option in _options(kind)})
            flags = {name: _as_text(given.pop(name)) for name in (*names, *old)}
            if loads:
                command(config=load_config(cls, flags, os.environ, path), **given)
            else:
                command(config_file=path, flags=flags, **given)

        file = typer.Option(None, "--config", metavar="FILE", help="YAML file with settings.")
        hidden = typer.Option(None, hidden=True)
        parameters = [
            *(p.replace(kind=p.KEYWORD_ONLY) for found in options for p in found.values()),
            *(_flag(cls, name) for name in names),
            *(_parameter(name, str | None, hidden) for name in old),
            _parameter("config", list[str] | None, file),
        ]
        return _signed(run, command, parameters)

    return decorate


def with_options(
    *classes: Any, flags: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a typer command a parameter for each field of dataclasses; it takes one object of each.

    Fields are ``Annotated`` with ``typer.Option``, ``typer.Argument``, or a `Doc` to be a flag's
    help; others keep their defaults. A field that several classes share is one flag. ``flags``
    names the flags that differ from their fields' names.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = [_options(cls, flags or {}) for cls in classes]
        parameters = {name: one for found in options for name, one in found.items()}

        def run(**given: Any) -> None:
            pairs = zip(classes, options, strict=True)
            command(*(cls(**{name: given[name] for name in found}) for cls, found in pairs))

        return _signed(run, command, list(parameters.values()))

    return decorate


def _options(cls: Any, flags: Mapping[str, str] = MappingProxyType({})) -> _Parameters:
    parameters: _Parameters = {}
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        name, hint = field.name, hints[field.name]
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        flag = [flags[name]] if name in flags else []
        for place, note in enumerate(notes):
            if isinstance(note, Doc):
                notes[place] = typer.Option(*flag, help=note.documentation)
        required = field.default is dataclasses.MISSING
        default = inspect.Parameter.empty if required else field.default
        if notes:
            parameters[name] = _parameter(name, Annotated[(kind, *notes)], default)
    return parameters


def _signed(
    run: Callable[..., None], command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Give ``run`` the name and docstring of a command, and the parameters for typer."""
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _flag(cls: type[EngineConfig], name: str) -> inspect.Parameter:
    field = cls.model_fields[name]
    names = "--" + name.replace("_", "-")
    # Text, whatever the type: load_config reads and refuses the same way for every source.
    kind: Any = str | None
    default = "none" if field.default is None else str(field.default)
    if isinstance(field.default, tuple):
        default = ",".join(map(str, field.default)) or "none"
        kind = list[str] | None
    elif field.annotation is bool:
        opposite = f"--no-{names.removeprefix('--')}"
        default = names if field.default else opposite
        kind, names = bool | None, f"{names}/{opposite}"
    if name in shipped_names():
        default = f"the model's, else {default}"
    option = typer.Option(
        None,
        names,
        help=f"{field.description} [default: {default}]",
        metavar=_metavar(field),
        rich_help_panel=_group(cls, name),
    )
    return _parameter(name, kind, option)


def _as_text(value: Any) -> Any:
    """Join a flag that may be given several times: "a,b" is a list in every source."""
    return (",".join(value) if value else None) if isinstance(value, list) else value


def _group(cls: type[EngineConfig], name: str) -> str:
    """Return the heading of a setting: its own, else that of the class which adds it."""
    bases = [base for base in reversed(cls.__mro__) if issubclass(base, EngineConfig)]
    owner = next(base for base in bases if name in base.model_fields)
    extra = owner.model_fields[name].json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else owner.group


def _metavar(field: Any) -> str | None:
    if takes_sizes(field):
        return "SIZE"
    for kind in get_args(field.annotation) or (field.annotation,):
        if isinstance(kind, str):
            return f"[{'|'.join(get_args(field.annotation))}]"
        if kind in (int, float):
            return "INTEGER" if kind is int else "NUMBER"
    return None if field.annotation is bool else "TEXT"


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
