"""Sizes as people write them: ``8192``, ``8K``, ``1M``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from razor_dist.config.errors import ConfigError

# A capital letter is a power of 1024, as contexts are named after; "1k" is a thousand.
_UNITS = {"": 1, "k": 1000, "K": 1024, "M": 1024**2, "G": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKMG]?)")


def parse_size(text: str) -> int:
    """Read a number of tokens, with or without a unit; `ConfigError` unless it is a whole one."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"invalid size {text!r}; write a number such as 8192, 8K (8192), 8k (8000) or 1M"
        )
    size = Fraction(match[1]) * _UNITS[match[2]]
    if size.denominator != 1:
        raise ConfigError(f"invalid size {text!r}: not a whole number of tokens")
    return int(size)


def _size_or_itself(value: Any) -> Any:
    """Return a size as a number, and anything else unchanged, for the setting's type to refuse."""
    try:
        return parse_size(value) if isinstance(value, str) else value
    except ConfigError:
        return value


_READS_SIZES = BeforeValidator(_size_or_itself)
# The type of settings in tokens.
Size = Annotated[int, _READS_SIZES]


def takes_sizes(field: FieldInfo) -> bool:
    """Return whether a setting's type is `Size`, also inside an optional or a tuple."""

    def holds(annotation: Any) -> bool:
        return annotation == Size or any(map(holds, get_args(annotation)))

    # pydantic takes a bare `Size` apart, and leaves one inside another type as it is.
    return _READS_SIZES in field.metadata or holds(field.annotation)


def tokens(count: int) -> str:
    """Return a number of tokens, with its name in powers of 1024 if it has a short one.

    >>> tokens(1048576)
    '1,048,576 (1M)'
    """
    for unit in ("G", "M", "K"):
        if count and count % _UNITS[unit] == 0:
            return f"{count:,} ({count // _UNITS[unit]}{unit})"
    return f"{count:,}"
