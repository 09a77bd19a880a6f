"""JSON that answers and templates can hold: without NaN, infinity, and lone surrogates."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from razor_dist.config.errors import RequestError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(body: bytes | bytearray) -> object:
    """Parse JSON; `RequestError` for bad UTF-8, a lone surrogate, a key twice, NaN or infinity."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: byte {error.start} is {body[error.start]:#04x}"
        ) from None
    try:
        value: object = json.loads(text, **STRICT_JSON, object_pairs_hook=_object)
        check_characters(text, value)
    except UnicodeEncodeError:
        raise RequestError("the body holds a lone surrogate (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    return value


def check_characters(text: str, value: object) -> None:
    """Raise `UnicodeEncodeError` if the value of a JSON text has a lone surrogate.

    JSON can escape half a character, which neither a tokenizer nor a response can hold.
    """
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # JSON of an answer could not hold it
        raise ValueError(f"the number {text:.80} is out of range")
    return value


# Arguments of a decoder that takes no NaN and no infinity.
STRICT_JSON: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name!r:.80} is given twice")
            seen.add(name)
    return found
