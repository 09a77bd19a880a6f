"""Answers as JSON, made value by value.

`json.dumps` is one call in C, which holds the interpreter's lock until all is written: with
thousands of log-probabilities a second, in which no other request is answered, thread or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_SHORT = (",", ":")
# Writes what UTF-8 can hold as it is.
PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=_SHORT).encode
# Escapes all but ASCII: some clients take U+2028 and its like for line ends.
ESCAPED = json.JSONEncoder(separators=_SHORT).encode
# Levels of objects and lists that are looked into: down to the entries of ``logprobs.content``.
_DEPTH = 5


def dumped(value: Any, encode: Callable[[Any], str] = PLAIN, depth: int = _DEPTH) -> bytes:
    """Return what ``encode`` would of a value whose objects have texts for names, in UTF-8."""
    # Not as texts: one character beyond U+FFFF in them makes four bytes of each.
    if depth and isinstance(value, dict):
        items = [dumped(k, encode) + b":" + dumped(v, encode, depth - 1) for k, v in value.items()]
        return b"{" + b",".join(items) + b"}"
    if depth and isinstance(value, list):
        return b"[" + b",".join([dumped(one, encode, depth - 1) for one in value]) + b"]"
    return encode(value).encode()
