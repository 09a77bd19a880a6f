"""Bodies of requests: their JSON, checked by themselves, before anything is tokenised.

`parse` checks a body, `render` (`razor_dist.api.rendering`) makes of it what the engine gets.
`parse_request` does both: all work that grows with the body, in a thread for short bodies and in
another process for long ones (`razor_dist.server.parsing_process`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from razor_dist.api.completions import CompletionBody
from razor_dist.api.contexts import KeptContext
from razor_dist.api.fields import Strict
from razor_dist.api.messages import NEUTRAL as NEUTRAL_MESSAGES
from razor_dist.api.messages import CountTokensBody, MessagesBody
from razor_dist.api.rendering import CheckedBody, render
from razor_dist.api.request import Endpoint, Limits, ParsedRequest
from razor_dist.api.responses import NEUTRAL as NEUTRAL_RESPONSES
from razor_dist.api.responses import ResponsesBody, renamed
from razor_dist.api.schema import ChatBody
from razor_dist.api.tokenize import DetokenizeBody, TokenizeBody
from razor_dist.api.validate import NEUTRAL, validated
from razor_dist.config.errors import RequestError
from razor_dist.documents.read import Document
from razor_dist.frontend.prompts import PromptEncoder

# Each endpoint's body, and what of unsupported fields asks for nothing there.
BODIES: dict[Endpoint, tuple[type[Strict], Mapping[str, tuple[Any, ...]]]] = {
    "chat": (ChatBody, NEUTRAL),
    "completions": (CompletionBody, NEUTRAL),
    "responses": (ResponsesBody, NEUTRAL_RESPONSES),
    "messages": (MessagesBody, NEUTRAL_MESSAGES),
    "count_tokens": (CountTokensBody, NEUTRAL_MESSAGES),
    "tokenize": (TokenizeBody, {}),
    "detokenize": (DetokenizeBody, {}),
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_request(
    endpoint: Endpoint,
    raw: bytes | bytearray,
    encoder: PromptEncoder,
    limits: Limits,
    files: Sequence[Document] = (),
    kept: KeptContext | None = None,
) -> ParsedRequest:
    """Read a request's body; `RequestError` if anything about it cannot be served.

    ``files`` are the documents in the files that the first call has returned as ``unread``, and
    ``kept`` what the context is that it has named.
    """
    return parse_value(endpoint, parse_json(raw), encoder, limits, files, kept)


def parse_value(
    endpoint: Endpoint,
    value: object,
    encoder: PromptEncoder,
    limits: Limits,
    files: Sequence[Document] = (),
    kept: KeptContext | None = None,
) -> ParsedRequest:
    """Read a body whose JSON was parsed; raises as `parse_request` does."""
    try:
        return render(parse(endpoint, value, limits, files, kept), encoder, limits)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def parse(
    endpoint: Endpoint,
    value: object,
    limits: Limits,
    files: Sequence[Document] = (),
    kept: KeptContext | None = None,
) -> CheckedBody:
    """Check a body as far as that can be done without a tokenizer."""
    ignored: list[str] | None = [] if limits.unknown_fields == "warn" else None
    if endpoint == "detokenize":
        DetokenizeBody.check_length(value, limits.max_model_len)
    cls, neutral = BODIES[endpoint]
    body: Any = validated(cls, value, neutral, ignored)
    if isinstance(body, TokenizeBody | DetokenizeBody):
        if body.model is not None:
            limits.check_model(body.model)
        return CheckedBody(body, None, ignored or ())
    response = body if isinstance(body, ResponsesBody | CountTokensBody) else None
    with renamed({} if response is None else response.names):
        if isinstance(response, CountTokensBody):
            limits.check_model(response.model)
            unread = [] if files else response.files()
            if unread or (response.context and kept is None):
                return CheckedBody(body, None, ignored or (), unread=unread, kept=response.context)
            body = response.as_chat(files, kept)
        elif body.context and kept is None:
            return CheckedBody(body, None, ignored or (), kept=body.context)
        elif response is not None:
            body = response.as_chat()
        if kept is not None:
            body.go_on_with(kept)
        params = body.sampling(limits.defaults)
        limits.check_model(body.model)
    return CheckedBody(body, params, ignored or (), response)


def parse_json(body: bytes | bytearray) -> object:
    """Parse JSON; `RequestError` for bad UTF-8, a lone surrogate, a key twice, NaN or infinity."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: byte {error.start} is {body[error.start]:#04x}"
        ) from None
    try:
        value: object = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_object,
        )
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


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # which no answer could repeat
        raise ValueError(f"the number {text:.80} is out of range")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name!r:.80} is given twice")
            seen.add(name)
    return found
