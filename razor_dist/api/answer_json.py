"""Answers as JSON, written value by value.

`json.dumps` is one call in C, which holds the interpreter's lock to its end. For thousands of
log-probabilities that is a second in which no other request is answered, even from a thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_SHORT = (",", ":")
# Writes characters as they are, for UTF-8.
PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=_SHORT).encode
# Escapes all but ASCII: some clients take U+2028, for instance, for the end of a line.
ESCAPED = json.JSONEncoder(separators=_SHORT).encode
# Levels of objects and lists that are written value by value, to ``logprobs.content``.
_DEPTH = 5


def dumped(value: Any, encode: Callable[[Any], str] = PLAIN, depth: int = _DEPTH) -> bytes:
    """Return the JSON that ``encode`` makes of a value, in UTF-8; keys of objects are strings."""
    # Joined as bytes: in a `str`, one character beyond U+FFFF makes each take four bytes.
    if depth and isinstance(value, dict):
        items = [dumped(k, encode) + b":" + dumped(v, encode, depth - 1) for k, v in value.items()]
        return b"{" + b",".join(items) + b"}"
    if depth and isinstance(value, list):
        return b"[" + b",".join([dumped(one, encode, depth - 1) for one in value]) + b"]"
    return encode(value).encode()
