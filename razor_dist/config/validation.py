"""One readable sentence for each way in which a setting can be wrong."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationError,
)
from pydantic.fields import FieldInfo

from razor_dist.config.errors import ConfigError, RequestError
from razor_dist.config.foreign import FOREIGN_SETTINGS
from razor_dist.config.sizes import Size, takes_sizes

# By pydantic's name of a problem: words that follow "must be".
_WANTED = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "greater than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "a non-empty string",
    "string_too_long": "a string of at most {max_length} characters",
    "string_unicode": "text without a lone surrogate (\\ud800 to \\udfff)",
    "string_pattern_mismatch": "an address such as http://HOST:4318",
    "finite_number": "a finite number",
}
# The same for a value within a list or a mapping.
_WANTED_INSIDE = {"int_type": "an integer", "float_type": "a number"}
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
    dict[str, dict[str, Any]]: "a mapping of names to settings",
    type(None): "none",
}


class SettingError(ConfigError):
    """The value of a setting is wrong, or the values of several ``names`` contradict."""

    def __init__(self, message: str, *names: str) -> None:
        super().__init__(message)
        self.names = names

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would give the constructor ``args`` alone
        return type(self), (*self.args, *self.names)


Object = TypeVar("Object")
# Of pydantic dataclasses: nothing is converted but an integer to a float.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def explained(
    setting: str | None = None, error: Callable[..., Exception] = SettingError
) -> Callable[[type[Object]], type[Object]]:
    """Let a pydantic dataclass raise ``error`` with a sentence and the wrong field's name.

    If the object is the value of a ``setting``, the setting is named instead.
    """

    def decorate(cls: Any) -> Any:
        construct, names = cls.__init__, [field.name for field in fields(cls)]

        @wraps(construct)
        def init(self: Any, *args: Any, **values: Any) -> None:
            try:
                construct(self, **dict(zip(names, args, strict=False)), **values)
            except ValidationError as wrong:
                said = explain(wrong, cls.__pydantic_fields__, setting)
                raise error(str(said), *said.names) from None

        cls.__init__ = init
        return cls

    return decorate


def made(
    cls: type[Object],
    value: object,
    name: str,
    error: Callable[[str, str], Exception] = SettingError,
) -> Object | None:
    """Make a dataclass of ``value``, a mapping of its fields, which a user calls ``name``.

    None and objects of the class are returned as they are. Raises ``error`` for anything else, and
    for fields that the class does not have.
    """
    if value is None or isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise error(f"{name} must be an object, got {value!r:.80}", name)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for given in value:
        if given not in known:
            hint = _hint(nearest(str(given), known), known)
            raise error(f"{name} has no field {given!r:.80}; {hint}", name)
    return cls(**value)


def object_setting(
    cls: type[Object], name: str, value: object, words: str = "none"
) -> Object | None:
    """Make an object by `made`, also from JSON text; ``words`` name other values, for errors."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise SettingError(f"{name} must be a JSON object or {words}: {error}", name) from None
    return made(cls, value, name)


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


def split(value: Any) -> Any:
    """Split "a,b" from a flag or a variable into a list."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _names(value: Any) -> Any:
    return [] if value == "" else split(value)


_Name = Annotated[str, StringConstraints(min_length=1)]
Names = Annotated[tuple[_Name, ...], BeforeValidator(_names)]
# Names of a server, as in a ``Host`` header without its port; and origins of pages, as browsers
# send them in lower case, without the scheme's own port.
_HOST = re.compile(r"\*|[\w.-]+|\[?[0-9a-f]*:[0-9a-f:.]*:[0-9a-f.]*\]?", re.ASCII | re.IGNORECASE)
_ORIGIN = re.compile(
    r"\*|null|(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([\w.-]+|\[[0-9a-f:.]+\])(:\d+)?",
    re.ASCII,
)


def _hosts(names: Sequence[str]) -> tuple[str, ...]:
    wanted = "* or names without scheme and port, such as books.example"
    return _matching(names, _HOST, "allowed_hosts", wanted)


def _origins(names: Sequence[str]) -> tuple[str, ...]:
    wanted = "* or origins without a path, such as https://books.example or http://10.0.0.5:3000"
    return _matching([name.lower() for name in names], _ORIGIN, "allowed_origins", wanted)


def _matching(
    names: Sequence[str], pattern: re.Pattern[str], setting: str, wanted: str
) -> tuple[str, ...]:
    for name in names:
        if not pattern.fullmatch(name):
            raise SettingError(
                f"{setting} must be {wanted}, separated by commas; got {name!r:.80}", setting
            )
    return tuple(names)


Hosts = Annotated[Names, AfterValidator(_hosts)]
Origins = Annotated[Names, AfterValidator(_origins)]


def _keys(value: Any) -> Any:
    keys = split(value)
    # Never with the value in the sentence, as pydantic's would be.
    if not isinstance(keys, list | tuple) or not all(map(is_key, keys)):
        raise SettingError(
            "api_key must be a list of keys, each of printable ASCII without spaces", "api_key"
        )
    return keys


Keys = Annotated[tuple[_Name, ...], BeforeValidator(_keys)]


def is_key(value: object) -> bool:
    """Return whether ``value`` can be a key: a header holds it as it is."""
    return (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and bool(value)
        and (" " not in value)
    )


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


def unknown(name: str, known: Collection[str], what: str = "setting") -> str:
    """Return a sentence about an unknown ``what``, with the nearest known name or all names."""
    near = FOREIGN_SETTINGS.get(name)
    if near not in known:
        near = nearest(name, known)
    return f"unknown {what} {name!r}; {_hint(near, sorted(known))}"


def _hint(near: str | None, known: Sequence[str]) -> str:
    return f"did you mean {near!r}?" if near else f"known are: {', '.join(known)}"


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that looks most like ``name``, if any does."""
    # Case and dashes are the commonest slips, and difflib would count them as differences.
    for spelling in (name, name.lower().replace("-", "_")):
        if near := difflib.get_close_matches(spelling, known, n=1):
            return near[0]
    return None


def explain(
    error: ValidationError, fields: Mapping[str, FieldInfo], setting: str | None = None
) -> SettingError:
    """Return pydantic's first complaint as a sentence in the style of the other errors.

    With a ``setting``, ``fields`` are those of its value.
    """
    problem = error.errors(include_url=False)[0]
    path, kind, context = [str(p) for p in problem["loc"]], problem["type"], problem.get("ctx", {})
    reason, value = context.get("error"), problem["input"]
    if isinstance(reason, SettingError):  # raised by a setting's own validator
        return reason
    if isinstance(reason, RequestError):
        raise reason from None
    prefix, names = ("", path[:1]) if setting is None else (f"{setting}.", [setting])
    if not path:  # raised by a dataclass: a rule between its fields
        return SettingError(f"{prefix}{reason}", *names)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return SettingError(unknown(path[-1], fields), *names)
    if kind == "missing":
        return SettingError(f"{prefix}{'.'.join(path)} is missing", *names)
    is_key = path[-1] == "[key]"
    is_inside = kind in _WANTED_INSIDE and isinstance(problem["loc"][-1], int)
    if kind == "literal_error":
        wanted = _one_of(re.findall("'(.*?)'", context["expected"]))
    elif is_inside:
        wanted = _WANTED_INSIDE[kind]
    elif kind in _WANTED and not is_key:
        whole = {k: int(v) for k, v in context.items() if isinstance(v, float) and v.is_integer()}
        wanted = _WANTED[kind].format(**context | whole)
    else:
        # The innermost field in the path: an index or a union's member may follow it.
        field = next(fields[part] for part in reversed(path) if part in fields)
        wanted = field.title or _type_in_words(field)
    # A number given as text (by a flag or a variable) reads better without its quotes.
    got = context.get("actual_length", value if "than" in kind else f"{value!r:.80}")
    if is_key:
        got = f"the key {value!r:.80}"
    # A number that is refused: its place in a list, or its key in a mapping.
    is_number = "than" in kind or kind == "finite_number" or is_inside
    numbers = [part for part in problem["loc"] if isinstance(part, int) and is_number]
    where = path[0] + "".join(f"[{number}]" for number in numbers)
    return SettingError(f"{prefix}{where} must be {wanted}, got {got}", *names)


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
