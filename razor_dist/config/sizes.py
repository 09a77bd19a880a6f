"""Sizes as people write them: ``8192``, ``8K``, ``1M``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from razor_dist.config.errors import ConfigError

# A capital letter is a power of 1024, as contexts are named after; "1k" is a thousand.
_UNITS = {"": 1, "k": 1000, "K": 1024, "M": 1024**2, "G": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKMG]?)")


def parse_size(text: str) -> int:
    """Read a number of tokens.

    Parameters
    ----------
    text : str
        Digits, perhaps with a decimal point, and perhaps a unit: ``k`` is 1000, ``K`` 1024,
        ``M`` 1024², ``G`` 1024³.

    Returns
    -------
    int

    Raises
    ------
    ConfigError
        If it is not a size, or not a whole number.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"invalid size {text!r}; write a number such as 8192, 8K (8192), 8k (8000) or 1M"
        )
    size = Fraction(match[1]) * _UNITS[match[2]]
    if size.denominator != 1:
        raise ConfigError(f"invalid size {text!r}: not a whole number of tokens")
    return int(size)


def size_or_itself(value: Any) -> Any:
    """Return a size as a number, and anything else unchanged, for the setting's type to refuse."""
    try:
        return parse_size(value) if isinstance(value, str) else value
    except ConfigError:
        return value


# The type of settings in tokens.
Size = Annotated[int, BeforeValidator(size_or_itself)]


def takes_sizes(field: FieldInfo) -> bool:
    """Return whether a setting's type is `Size`, also inside an optional or a tuple."""
    marks = [*field.metadata, *_marks(field.annotation)]
    return any(isinstance(m, BeforeValidator) and m.func is size_or_itself for m in marks)


def _marks(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        yield from _marks(part)


def size_name(count: int) -> str:
    """Return the shortest text that `parse_size` reads as ``count``, in powers of 1024.

    >>> size_name(131072), size_name(7000)
    ('128K', '7000')
    """
    for unit in ("G", "M", "K"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return str(count)


def tokens(count: int) -> str:
    """Return a number of tokens, with its name in powers of 1024 if it has a short one.

    >>> tokens(1048576)
    '1,048,576 (1M)'
    """
    name = size_name(count)
    return f"{count:,}" if name == str(count) else f"{count:,} ({name})"
