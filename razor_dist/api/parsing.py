"""From the body of a request to token ids for the engine and the shape of the answers.

A body is checked before anything is tokenised. The time grows with the body: short bodies are read
in a thread, long ones in another process (`razor_dist.server.parsing_process`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from razor_dist.api.annotations import titles
from razor_dist.api.call_grammars import or_calls
from razor_dist.api.completions import CompletionBody
from razor_dist.api.contexts import KeptContext
from razor_dist.api.fields import Strict, renamed
from razor_dist.api.messages import CountTokensBody, MessagesBody
from razor_dist.api.request import Endpoint, Limits, ParsedRequest
from razor_dist.api.responses import ResponsesBody
from razor_dist.api.schema import ChatBody
from razor_dist.api.strict_json import parse_json
from razor_dist.api.tokenize import DetokenizeBody, TokenizeBody
from razor_dist.api.validate import validated
from razor_dist.config.errors import RequestError
from razor_dist.documents.read import Document
from razor_dist.frontend.prompts import Checked, PromptEncoder
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import StructuredOutputsParams

BODIES: dict[Endpoint, type[Strict]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "count_tokens": CountTokensBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
# Values in a body's lists and objects; for each wrong one pydantic's report takes 1 kB.
_MOST_VALUES = 1 << 18
# Fields of token ids, which do not count: their check ends with the first wrong one.
_TOKENS = ("prompt", "tokens")
# Tokens left at most for an answer without a limit, if its prompt is truncated to what fits.
_ANSWER = 1024


def parse_request(
    endpoint: Endpoint,
    body: object,
    encoder: PromptEncoder,
    limits: Limits,
    files: Sequence[Document] = (),
    kept: KeptContext | None = None,
) -> ParsedRequest:
    """Read a request's body, as bytes or parsed; `RequestError` if it cannot be served.

    The first call may return files (``unread``) or name a ``context``; a second call then gets the
    documents in the ``files`` and the context, ``kept``.
    """
    value = parse_json(body) if isinstance(body, bytes | bytearray) else body
    ignored: list[str] | None = [] if limits.unknown_fields == "warn" else None
    try:
        if endpoint == "detokenize":
            DetokenizeBody.check_length(value, limits.prompt.max_model_len)
        _check_size(value)
        read = validated(BODIES[endpoint], value, ignored)
        parsed = _parsed(read, encoder, limits, files, kept)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    return replace(parsed, ignored=[*(ignored or ()), *parsed.ignored])


def _check_size(body: object) -> None:
    """Raise `RequestError` if a body has too many values besides token ids."""
    fields = body.items() if isinstance(body, dict) else ()
    waiting: list[Any] = [[value for name, value in fields if name not in _TOKENS]]
    count = 0
    while waiting:
        value = waiting.pop()
        count += len(value)
        if count > _MOST_VALUES:
            raise RequestError(
                f"the body holds more than {_MOST_VALUES} values in lists and objects",
                code="body_too_large",
            )
        inner = value.values() if isinstance(value, dict) else value
        waiting += [one for one in inner if isinstance(one, list | dict)]


def _parsed(
    body: Any,
    encoder: PromptEncoder,
    limits: Limits,
    files: Sequence[Document],
    kept: KeptContext | None,
) -> ParsedRequest:
    if body.model is not None:
        limits.check_model(body.model)
    if isinstance(body, TokenizeBody | DetokenizeBody):
        return _answered(body.answer(encoder, limits))
    unread = body.files() if isinstance(body, CountTokensBody) and not files else []
    if unread or (body.context and kept is None):
        return ParsedRequest([], unread=unread, context=body.context)
    if isinstance(body, ChatBody | CompletionBody):
        return _rendered(body, None, encoder, limits, kept)
    with renamed(body.names):
        chat = body.as_chat(files, kept) if isinstance(body, CountTokensBody) else body.as_chat()
        return _rendered(chat, body, encoder, limits, kept)


def _answered(answer: Mapping[str, Any]) -> ParsedRequest:
    """Return a request that is answered without the engine."""
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    return ParsedRequest([], answer=text.encode())


def _rendered(
    body: ChatBody | CompletionBody,
    asked: ResponsesBody | CountTokensBody | None,
    encoder: PromptEncoder,
    limits: Limits,
    kept: KeptContext | None,
) -> ParsedRequest:
    """Return the request of a body, which was made of ``asked`` if that is not None."""
    if kept is not None:
        body.go_on_with(kept)
    ignored: list[str] = []
    if isinstance(body, ChatBody) and body.used_tools:
        offered, warns = body.forced_tool is None, limits.unknown_fields == "warn"
        if warns and offered and not encoder.tools.shows_tools:
            # Open WebUI sends its own tools with every question, to any model.
            body, ignored = body.model_copy(update={"tools": None}), ["tools"]
        elif not encoder.tools.takes_several:
            # A conversation with two calls could not continue: the template refuses them.
            body = body.model_copy(update={"parallel_tool_calls": False})
    params = body.sampling(limits.defaults)
    tools = body.tool_use(encoder)
    answer = params.structured_outputs
    if tools is not None and tools.is_free and isinstance(answer, StructuredOutputsParams):
        either = or_calls(answer, tools, encoder.tokenizer, body.constrained_by)
        params = replace(params, structured_outputs=either)
    if isinstance(asked, CountTokensBody) and not isinstance(asked, MessagesBody):
        [(ids, _)] = body.encoded(encoder, limits.prompt.max_model_len, ends=False)
        return replace(_answered({"input_tokens": len(ids)}), ignored=ignored)
    try:
        prompts = _prompts(body, params, encoder, limits)
    except RequestError as error:
        if error.tokens is None or not isinstance(asked, MessagesBody):
            raise
        raise RequestError(asked.too_long(*error.tokens), error.param, error.code) from None
    names = {} if asked is None else asked.names
    kept_of_it, uncut = body.contexts(encoder) if limits.pins else ([], [])
    return ParsedRequest(
        prompts,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        return_progress=bool(body.return_progress),
        timeout=body.timeout,
        echo=body.echoes,
        prompt_only=body.echoes and body.max_tokens == 0,
        tools=tools,
        described=None if asked is None else asked.described(prompts[0].params),
        return_sources=bool(body.return_sources),
        titles=titles(prompts[0].text) if body.annotates else None,
        cache_salt=body.cache_salt,
        cache_prompt=body.cache_prompt is not False,
        ignored=[*ignored, *uncut],
        ends_in_repetition=body.repetition_detection is not None,
        contexts=kept_of_it,
        called=asked.called if isinstance(asked, ResponsesBody) else {},
        names={field: names.get(name, name) for field, name in body.engine_names.items()},
    )


def _prompts(
    body: ChatBody | CompletionBody, params: SamplingParams, encoder: PromptEncoder, limits: Limits
) -> list[Checked]:
    limits.check_count(body.prompt_count, body.n)
    bounds, last = limits.prompt, body.truncate_prompt_tokens
    if last == -1:  # as many as fit beside the answer
        usual = min(_ANSWER, bounds.max_model_len // 4, bounds.default_max_tokens or _ANSWER)
        last = bounds.max_model_len - (params.max_tokens or max(1, usual, params.min_tokens))
        last = max(1, last)
    prompts = [
        bounds.checked(
            ids if last is None else ids[-last:],
            params,
            param=body.asks_in,
            text=text,
            has_tokenizer=encoder.tokenizer is not None,
        )
        for ids, text in body.encoded(
            encoder, bounds.max_model_len, ends=params.return_sources > 0, keeps=limits.pins
        )
    ]
    limits.check_logprobs(prompts)
    return prompts
