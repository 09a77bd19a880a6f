"""From a request's body to what the engine needs: parsed, checked, tokenised.

All work that grows with the body happens in `parse_request`, which runs in a thread for short
bodies and in another process for long ones (`razor_dist.server.parsing_process`).
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from razor_dist.api.fields import STRUCTURED
from razor_dist.api.responses import NAMES, NEUTRAL, ResponsesBody, renamed
from razor_dist.api.schema import ChatBody, CompletionBody
from razor_dist.api.tokenize import DetokenizeBody, TokenizeBody
from razor_dist.api.tools import ToolUse, tool_use
from razor_dist.api.validate import parse
from razor_dist.config.errors import RequestError
from razor_dist.frontend.passages import PromptText
from razor_dist.frontend.prompts import Checked, PromptEncoder, PromptLimits
from razor_dist.protocol.sampling_params import SamplingDefaults, SamplingParams

Endpoint = Literal["chat", "completions", "responses", "tokenize", "detokenize"]
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Limits(NamedTuple):
    model: str
    max_prompts: int
    max_model_len: int
    vocab_size: int
    defaults: SamplingDefaults
    room: int | None = None  # prompts that the queue takes now; None is any number
    default_max_tokens: int | None = None  # of requests that name none
    unknown_fields: Literal["refuse", "warn"] = "refuse"


@dataclass(frozen=True)
class ParsedRequest:
    prompts: list[Checked]  # each to be answered by itself
    stream: bool = False
    include_usage: bool = False
    return_progress: bool = False
    timeout: float | None = None  # seconds from its arrival
    echo: bool = False  # the answers begin with their prompts
    prompt_only: bool = False  # and end there: ``max_tokens`` was 0
    tools: ToolUse | None = None  # that the answers may call
    described: dict[str, Any] | None = None  # what a response of /v1/responses repeats
    answer: bytes | None = None  # the whole one, as JSON, if nothing is to be generated
    cache_salt: str | None = None  # requests of different ones share no caches
    continuous_usage: bool = False  # every chunk of a stream tells the counts so far
    ignored: Sequence[str] = ()  # fields that are not supported, with ``unknown_fields: warn``
    constrained_by: str = STRUCTURED  # the field, if any, that says what the answers must match


def parse_request(
    endpoint: Endpoint, raw: bytes | bytearray, encoder: PromptEncoder, limits: Limits
) -> ParsedRequest:
    """Read a request's body; `RequestError` if anything about it cannot be served."""
    return parse_value(endpoint, parse_json(raw), encoder, limits)


def parse_value(
    endpoint: Endpoint, value: object, encoder: PromptEncoder, limits: Limits
) -> ParsedRequest:
    try:
        return _parse_value(endpoint, value, encoder, limits)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _parse_value(
    endpoint: Endpoint, value: object, encoder: PromptEncoder, limits: Limits
) -> ParsedRequest:
    ignored: list[str] | None = [] if limits.unknown_fields == "warn" else None
    if endpoint == "chat":
        parsed = _parsed(parse(ChatBody, value, ignored=ignored), encoder, limits)
    elif endpoint == "completions":
        parsed = _parsed(parse(CompletionBody, value, ignored=ignored), encoder, limits)
    elif endpoint == "responses":
        body = parse(ResponsesBody, value, NEUTRAL, ignored)
        with renamed():
            parsed = _parsed(body.as_chat(), encoder, limits)
        field = NAMES.get(parsed.constrained_by, parsed.constrained_by)
        described = body.described(parsed.prompts[0].params)
        parsed = replace(parsed, described=described, constrained_by=field)
    else:
        parsed = _tokenized(endpoint, value, encoder, limits, ignored)
    return replace(parsed, ignored=ignored or ())


def _tokenized(
    endpoint: Endpoint,
    value: object,
    encoder: PromptEncoder,
    limits: Limits,
    ignored: list[str] | None,
) -> ParsedRequest:
    body: TokenizeBody | DetokenizeBody
    if endpoint == "tokenize":
        body = parse(TokenizeBody, value, {}, ignored)
        answer = body.answer(encoder, limits.max_model_len)
    else:
        DetokenizeBody.check_length(value, limits.max_model_len)
        body = parse(DetokenizeBody, value, {}, ignored)
        answer = body.answer(encoder, limits.vocab_size)
    if body.model is not None:
        check_model(body.model, limits.model)
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    return ParsedRequest([], answer=text.encode())


def _parsed(
    body: ChatBody | CompletionBody, encoder: PromptEncoder, limits: Limits
) -> ParsedRequest:
    params = body.sampling(limits.defaults)
    check_model(body.model, limits.model)
    tools = _tools(body, encoder)
    bounds = PromptLimits(
        limits.max_model_len,
        limits.vocab_size,
        has_tokenizer=encoder.tokenizer is not None,
        default_max_tokens=limits.default_max_tokens,
    )
    checked = [
        bounds.checked(
            _last(prompt, body.truncate_prompt_tokens, params, limits),
            params,
            param="messages" if isinstance(body, ChatBody) else "prompt",
            text=text,
        )
        for prompt, text in _encode(body, encoder, limits, ends=params.return_sources > 0)
    ]
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    return ParsedRequest(
        checked,
        bool(body.stream),
        body.include_usage,
        bool(body.return_progress),
        body.timeout,
        echo,
        prompt_only=echo and body.max_tokens == 0,
        tools=tools,
        cache_salt=uuid.uuid4().hex if body.cache_prompt is False else body.cache_salt,
        continuous_usage=body.continuous_usage,
        constrained_by=body.constrained_by,
    )


def _last(
    prompt: list[int], tokens: int | None, params: SamplingParams, limits: Limits
) -> list[int]:
    """Return a prompt's last tokens: all without a number, and as many as fit for -1."""
    if tokens == -1:
        tokens = max(1, limits.max_model_len - (params.max_tokens or 1))
    return prompt if tokens is None else prompt[-tokens:]


def _tools(body: ChatBody | CompletionBody, encoder: PromptEncoder) -> ToolUse | None:
    if not isinstance(body, ChatBody) or not body.used_tools:
        return None
    names = [tool.function.name for tool in body.used_tools]
    parallel = body.parallel_tool_calls is not False
    return tool_use(encoder.tokenizer, names, body.forced_tool, parallel)


def _encode(
    body: ChatBody | CompletionBody, encoder: PromptEncoder, limits: Limits, *, ends: bool
) -> list[tuple[list[int], PromptText | None]]:
    """Return each prompt's tokens, and with ``ends`` where they are in its text, if it has one."""
    prompts = 1 if isinstance(body, ChatBody) else len(body.prompt)
    count, param, what = prompts * (body.n or 1), "n", "answers"
    if prompts > 1:
        param, what = "prompt", "prompts" if body.n in (None, 1) else "prompts times n"
    if count > limits.max_prompts:
        raise RequestError(
            f"{param} must ask for at most {limits.max_prompts} {what}, got {count}", param=param
        )
    if limits.room is not None and count > limits.room:
        raise RequestError(
            f"the queue has room for {limits.room} {what} now, got {count}; try again later",
            param=param,
            code="queue_full",
        )
    if isinstance(body, ChatBody):
        messages = [message.for_template() for message in body.messages]
        if ends:
            return [encoder.chat_with_ends(messages, **body.template)]
        return [(encoder.chat(messages, **body.template), None)]
    return [
        (p, None)
        if not isinstance(p, str)
        else encoder.text_with_ends(p)
        if ends
        else (encoder.text(p), None)
        for p in body.prompt
    ]


def check_model(name: str, served: str) -> None:
    """Raise `RequestError` (``model_not_found``) unless ``name`` is the served model."""
    if name != served:
        raise RequestError(
            f"the model {name!r} does not exist; this server serves {served!r}",
            param="model",
            code="model_not_found",
        )


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
