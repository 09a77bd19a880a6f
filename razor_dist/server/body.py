"""Reads a request's body: bounded, UTF-8, JSON."""

from __future__ import annotations

import json
import re

from fastapi import Request

from razor_dist.config.errors import RequestError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, max_bytes: int) -> bytearray:
    """A request's body.

    Raises
    ------
    RequestError
        If it is too large (code ``body_too_large``); what is left of it is not read.
    """
    too_large = RequestError(
        f"the body is larger than {max_bytes} bytes, the server's limit (--max-body-mb)",
        code="body_too_large",
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return body


def parse_json(body: bytes | bytearray) -> object:
    """Parse JSON strictly: UTF-8, no NaN, no lone surrogates.

    Raises
    ------
    RequestError
        Saying what is wrong.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: byte {error.start} is {body[error.start]:#04x}"
        ) from None
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant)
        if _SURROGATE.search(body):
            # JSON can spell half a character, which no tokenizer and no response can hold.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the body holds a lone surrogate (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
