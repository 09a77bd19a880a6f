"""Conversations as callers give them, in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from razor_dist.config.errors import RequestError
from razor_dist.frontend.prompts import for_template

Conversation = Sequence[Mapping[str, Any]]


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return one conversation or several as a list, with their messages as the server reads them.

    Text parts of a content are joined, and the arguments of called tools are objects. Raises
    `RequestError` if ``messages`` is something else, or a content is no text.
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
        [for_template(message, f"messages[{place}]") for place, message in enumerate(conversation)]
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
