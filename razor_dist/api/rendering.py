"""Render a checked body for the engine: token ids, and how its answers are shaped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from razor_dist.api.annotations import titles
from razor_dist.api.completions import CompletionBody
from razor_dist.api.messages import CountTokensBody, MessagesBody
from razor_dist.api.request import Limits, ParsedRequest
from razor_dist.api.responses import ResponsesBody, renamed
from razor_dist.api.schema import ChatBody
from razor_dist.api.tokenize import DetokenizeBody, TokenizeBody
from razor_dist.api.tools import knows_tools
from razor_dist.frontend.prompts import Checked, PromptEncoder, PromptLimits
from razor_dist.protocol.sampling_params import SamplingParams


class CheckedBody(NamedTuple):
    """A body that was checked by itself, by `razor_dist.api.parsing.parse`."""

    body: (
        ChatBody | CompletionBody | ResponsesBody | TokenizeBody | DetokenizeBody | CountTokensBody
    )
    params: SamplingParams | None  # None if nothing is to be generated
    ignored: Sequence[str] = ()  # as in `ParsedRequest`
    # What a chat was made of, by whose names errors go.
    response: ResponsesBody | CountTokensBody | None = None
    # As in `ParsedRequest`; if there are any, the body is as it came.
    unread: Sequence[tuple[str, bytes]] = ()
    kept: str | None = None


def render(checked: CheckedBody, encoder: PromptEncoder, limits: Limits) -> ParsedRequest:
    """Tokenise a body; `RequestError` if its prompts cannot be served."""
    body, params, ignored, response, unread, kept = checked
    if unread or kept:
        return ParsedRequest([], unread=unread, context=kept, ignored=ignored)
    assert not isinstance(body, CountTokensBody | ResponsesBody)
    if isinstance(body, TokenizeBody | DetokenizeBody):
        answer = body.answer(encoder, limits)
        text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        return ParsedRequest([], answer=text.encode(), ignored=ignored)
    assert params is not None
    if limits.unknown_fields == "warn" and isinstance(body, ChatBody):
        # Open WebUI sends its own tools with every question, whatever the model.
        offered = body.used_tools and body.forced_tool is None
        if offered and not knows_tools(encoder.tokenizer):
            body, ignored = body.model_copy(update={"tools": None}), [*ignored, "tools"]
    names = {} if response is None else response.names
    with renamed(names):
        tools = body.tool_use(encoder.tokenizer)
        if isinstance(response, CountTokensBody) and not isinstance(response, MessagesBody):
            [(ids, _)] = body.encoded(encoder, ends=False)
            counted = json.dumps({"input_tokens": len(ids)}).encode()
            return ParsedRequest([], answer=counted, ignored=ignored)
        prompts = _prompts(body, params, encoder, limits)
        contexts = body.contexts(encoder) if limits.pins else ()
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
        described=None if response is None else response.described(prompts[0].params),
        return_sources=bool(body.return_sources),
        titles=titles(prompts[0].text) if body.annotates else None,
        cache_salt=body.cache_salt,
        cache_prompt=body.cache_prompt is not False,
        ignored=ignored,
        contexts=contexts,
        constrained_by=names.get(body.constrained_by, body.constrained_by),
    )


def _prompts(
    body: ChatBody | CompletionBody, params: SamplingParams, encoder: PromptEncoder, limits: Limits
) -> list[Checked]:
    limits.check_count(body.prompt_count, body.n)
    bounds = PromptLimits(
        limits.max_model_len,
        limits.vocab_size,
        has_tokenizer=encoder.tokenizer is not None,
        default_max_tokens=limits.default_max_tokens,
    )
    last = body.truncate_prompt_tokens
    if last == -1:  # as many as fit
        last = max(1, limits.max_model_len - (params.max_tokens or 1))
    return [
        bounds.checked(ids if last is None else ids[-last:], params, param=body.asks_in, text=text)
        for ids, text in body.encoded(encoder, ends=params.return_sources > 0, keeps=limits.pins)
    ]
