"""One readable sentence for each way in which a setting can be wrong."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from razor_dist.config.errors import ConfigError
from razor_dist.config.foreign import FOREIGN_SETTINGS
from razor_dist.config.sizes import Size, takes_sizes

# By pydantic's name of a problem: words that follow "must be".
_WANTED = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "greater than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt}",
    "string_too_short": "a non-empty string",
    "string_pattern_mismatch": "an address such as http://HOST:4318",
    "finite_number": "a finite number",
}
_TYPES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Size: "an integer such as 8192 or 8K",
    tuple[int, ...]: "a list of integers",
    tuple[Size, ...]: "a list of integers such as 8192 or 8K",
    tuple[float, ...]: "a list of numbers",
    tuple[str, ...]: "a list of names",
    type(None): "none",
}


class SettingError(ConfigError):
    """The value of a setting is wrong, or those of several ``names`` are beside each other."""

    def __init__(self, message: str, *names: str) -> None:
        super().__init__(message)
        self.names = names

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would give the constructor ``args`` alone
        return type(self), (*self.args, *self.names)


Setting = TypeVar("Setting")


def object_setting(
    cls: type[Setting], name: str, value: object, words: str = "none"
) -> Setting | None:
    """Make a dataclass of the value of the setting ``name``: a mapping of its fields, or JSON.

    ``words`` are what the setting may be instead.

    None and objects of the class are returned as they are. `SettingError` for anything else, for
    fields that the class does not have, and for required ones that are missing.
    """
    if value is None or isinstance(value, cls):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise SettingError(f"{name} must be a JSON object or {words}: {error}", name) from None
    if not isinstance(value, Mapping):
        raise SettingError(f"{name} must be an object, got {value!r:.80}", name)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for given in value:
        if given not in known:
            near = nearest(str(given), known)
            hint = f"did you mean {near!r}?" if near else f"known are: {', '.join(known)}"
            raise SettingError(f"{name} has no field {given!r:.80}; {hint}", name)
    for field in known.values():
        if field.default is MISSING and field.name not in value:
            raise SettingError(f"{name}.{field.name} is missing", name)
    return cls(**value)


def share_of(value: Any) -> float:
    """Read a number from 0 to below 1, or a fraction; `SettingError` for anything else."""
    try:
        found = -1.0 if isinstance(value, bool) else float(Fraction(str(value)))
    except (ValueError, ZeroDivisionError):
        found = -1.0
    if not 0 <= found < 1:
        name = "retrieval_share"
        raise SettingError(
            f"{name} must be a number between 0 and 1, such as 1/32, got {value!r:.80}", name
        )
    return found


# The type of the setting ``retrieval_share``: a part of a query's attention, as 1/32 or 0.03125.
Share = Annotated[float, BeforeValidator(share_of)]


def check_least(settings: object, **least: int) -> None:
    """Raise `ConfigError` unless each attribute that is named is at least its number, or None."""
    for name, number in least.items():
        value = getattr(settings, name)
        if value is not None and value < number:
            raise ConfigError(f"{name} must be at least {number}, got {value}")


def check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be from 0 to 1, got {value}")


def check_percent(name: str, value: float) -> None:
    if not 0 <= value <= 100:
        raise ConfigError(f"{name} must be a percentage from 0 to 100, got {value}")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be at least 0 and below 2**63, got {seed}")


def unknown(name: str, known: Collection[str], what: str = "setting") -> str:
    """Return a sentence about an unknown ``what``, with the nearest known one if there is one."""
    near = FOREIGN_SETTINGS.get(name)
    if near not in known:
        near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known are: {', '.join(sorted(known))}"
    return f"unknown {what} {name!r}; {hint}"


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that looks most like ``name``, if any does."""
    # Case and dashes are the commonest slips, and difflib would count them as differences.
    for spelling in (name, name.lower().replace("-", "_")):
        if near := difflib.get_close_matches(spelling, known, n=1):
            return near[0]
    return None


def explain(error: ValidationError, fields: Mapping[str, FieldInfo]) -> SettingError:
    """Return the first of pydantic's complaints as a sentence without a trace of pydantic."""
    problem = error.errors(include_url=False)[0]
    path, kind, context = [str(p) for p in problem["loc"]], problem["type"], problem.get("ctx", {})
    name, value = path[0], problem["input"]
    if isinstance(context.get("error"), SettingError):  # raised by a setting's own validator
        return context["error"]
    if kind == "extra_forbidden":
        return SettingError(unknown(path[-1], fields), name)
    if kind == "missing":
        return SettingError(f"{'.'.join(path)} is missing", name)
    if kind == "literal_error":
        wanted = _one_of(re.findall("'(.*?)'", context["expected"]))
    elif kind in _WANTED:
        wanted = _WANTED[kind].format(**context)
    else:
        # The innermost that is a field: what follows it is an index, or the member of a union.
        wanted = _type_in_words(next(fields[part] for part in reversed(path) if part in fields))
    # A number given as text (by a flag or a variable) reads better without its quotes.
    got = value if "than" in kind else repr(value)
    return SettingError(f"{name} must be {wanted}, got {got}", name)


def _type_in_words(field: FieldInfo) -> str:
    """Return the type of a setting in words, e.g. ``an integer or none``."""
    whole: Any = Size if field.annotation is int and takes_sizes(field) else field.annotation
    alone = whole in _TYPES or get_origin(whole) is Literal
    return " or ".join(map(_part_in_words, (whole,) if alone else get_args(whole)))


def _part_in_words(part: Any) -> str:
    if get_origin(part) is Literal:
        return _one_of(get_args(part))
    return _TYPES.get(part, "an object")


def _one_of(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else "one of " + ", ".join(values)


def is_optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)
