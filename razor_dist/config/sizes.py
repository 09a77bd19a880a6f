"""Sizes as people write them: ``8192``, ``8K``, ``1M``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

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
        If it is no such size, or not a whole number.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{text!r} is no size; write a number such as 8192, 8K (8192), 8k (8000) or 1M"
        )
    size = Fraction(match[1]) * _UNITS[match[2]]
    if size.denominator != 1:
        raise ConfigError(f"{text!r} is no whole number of tokens")
    return int(size)


def size_or_itself(value: Any) -> Any:
    """A setting's value before it is checked: a size as a number, anything else unchanged."""
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ConfigError:
            pass  # "must be an integer", as for any other setting
    return value


def size_name(count: int) -> str:
    """The shortest text that `parse_size` reads as ``count``, in powers of 1024.

    >>> size_name(131072), size_name(7000)
    ('128K', '7000')
    """
    for unit in ("G", "M", "K"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return str(count)


def tokens(count: int) -> str:
    """A number of tokens, with its name in powers of 1024 if it has a short one.

    >>> tokens(1048576)
    '1,048,576 (1M)'
    """
    name = size_name(count)
    return f"{count:,}" if name == str(count) else f"{count:,} ({name})"
