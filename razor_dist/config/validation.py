"""One readable sentence for each way in which a setting can be wrong."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from razor_dist.config.errors import ConfigError
from razor_dist.config.sizes import Size, takes_sizes


class SettingError(ConfigError):
    """The value of the setting ``name`` is wrong."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def unknown(name: str, known: Collection[str], what: str = "setting") -> str:
    """Return a sentence about an unknown name, with the nearest known one if there is one.

    Parameters
    ----------
    name : str
        What was given.
    known : collection of str
        What would be right.
    what : str
        The kind of thing that is named.
    """
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known are: {', '.join(sorted(known))}"
    return f"unknown {what} {name!r}; {hint}"


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that looks most like ``name``, if any does."""
    # Case and dashes are the commonest slips, and difflib would count them as differences.
    for spelling in (name, name.lower().replace("-", "_")):
        near = difflib.get_close_matches(spelling, known, n=1)
        if near:
            return near[0]
    return None


def explain(error: ValidationError, fields: Mapping[str, FieldInfo]) -> SettingError:
    """Return the first of pydantic's complaints as a sentence without a trace of pydantic."""
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"]]
    name = path[0]
    if problem["type"] == "extra_forbidden":
        return SettingError(unknown(path[-1], fields), name)
    if problem["type"] == "missing":
        return SettingError(f"{'.'.join(path)} is missing", name)
    # The innermost that is a field: what follows it is an index, or the member of a union.
    field = next(fields[part] for part in reversed(path) if part in fields)
    value = problem["input"]
    # A number given as text (by a flag or a variable) reads better without its quotes.
    got = value if "than" in problem["type"] else repr(value)
    return SettingError(f"{name} must be {_wanted(problem, field)}, got {got}", name)


def _wanted(problem: Any, field: FieldInfo) -> str:
    """Return what would be right, as words that follow "must be"."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "greater_than":
            return f"greater than {context['gt']:g}"
        case "less_than_equal":
            return f"at most {context['le']:g}"
        case "less_than":
            return f"less than {context['lt']}"
        case "literal_error":
            return f"one of {', '.join(_choices(field.annotation))}"
        case "string_too_short":
            return "a non-empty string"
        case "finite_number":
            return "a finite number"
    return kind(field)


def _choices(annotation: Any) -> list[str]:
    """Return the words of a Literal, also of one that is inside a tuple or optional."""
    return [
        word
        for part in get_args(annotation)
        for word in ([part] if isinstance(part, str) else _choices(part))
    ]


def kind(field: FieldInfo) -> str:
    """Return the type of a setting in words, e.g. ``an integer or none``."""
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a string",
        Size: "an integer such as 8192 or 8K",
        tuple[int, ...]: "a list of integers",
        tuple[Size, ...]: "a list of integers such as 8192 or 8K",
        tuple[float, ...]: "a list of numbers",
    }
    # pydantic takes a bare `Size` apart, and leaves one inside an optional or a tuple as it is.
    whole: Any = Size if field.annotation is int and takes_sizes(field) else field.annotation
    parts = (whole,) if whole in words else get_args(whole)
    names = [words[t] for t in parts if t in words]
    if is_optional(field):
        names.append("none")
    return " or ".join(names)


def is_optional(field: FieldInfo) -> bool:
    """Return whether the setting may be ``None``."""
    return type(None) in get_args(field.annotation)
