"""Conversations as callers give them, in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from razor_dist.config.errors import RequestError
from razor_dist.frontend.prompts import CONTENT, called_arguments

Conversation = Sequence[Mapping[str, Any]]


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return one conversation or several as a list, with their messages as the server reads them.

    Text parts of a content are joined, and the arguments of called tools are objects. Raises
    `RequestError` if it is neither, or a content is no text.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise _no_conversation(messages)
    if not messages or isinstance(messages[0], Mapping):
        messages = [cast("Conversation", messages)]
    for conversation in messages:
        for message in conversation if isinstance(conversation, Sequence) else [conversation]:
            if not isinstance(message, Mapping) or "role" not in message:
                raise _no_conversation(message)
    return [
        [_for_template(message, place) for place, message in enumerate(conversation)]
        for conversation in cast("Sequence[Conversation]", messages)
    ]


def conversation_of(messages: Conversation) -> Conversation:
    """Return one conversation as `conversations_of` does; `RequestError` for several."""
    conversations = conversations_of(messages)
    if len(conversations) > 1:
        raise RequestError(
            f"messages must be one conversation, got {len(conversations)}", param="messages"
        )
    return conversations[0]


def _no_conversation(value: object) -> RequestError:
    return RequestError(
        'messages must be a list such as [{"role": "user", "content": "..."}], or a list of such '
        f"lists; got {value!r:.80}. For a text use generate",
        param="messages",
    )


def _for_template(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a message whose content is a text: a template would write a list as Python does."""
    read = dict(message)
    if read.get("role") == "developer":
        read["role"] = "system"  # OpenAI's new name, which templates do not know
    if "content" in read:
        read["content"] = _text(read["content"], place)
    if read.get("tool_calls"):
        read["tool_calls"] = [_with_arguments(call) for call in read["tool_calls"]]
    return read


def _text(content: object, place: int) -> str:
    """Return a content's text, and of one in parts the texts of all, joined as the server does."""
    if isinstance(content, str | None):
        return content or ""
    parts: Sequence[Any] = content if isinstance(content, list | tuple) else [content]
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(f"messages[{place}].content {CONTENT}", param="messages")
    return "".join(part["text"] for part in parts)


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = called_arguments(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}
