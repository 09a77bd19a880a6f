"""Contexts: beginnings of conversations that are kept, for requests that continue them."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from razor_dist.api.conversation import APART, BlockText, CitedDocument, Mark
from razor_dist.api.fields import ChatMessage, TextPart
from razor_dist.config.errors import RequestError
from razor_dist.frontend.kept import Ints, KeptText, keep
from razor_dist.frontend.prompts import PromptEncoder

Json = dict[str, Any]

# Marks (``cache_control``) of a request at most, as in Anthropic's API.
MOST_MARKS = 4
# Tokens; a shorter beginning is not kept: it is read again in no time.
LEAST_TOKENS = 64
_MESSAGE = "messages[].cache_control"  # the field of a mark in a chat


class KeptContext(msgspec.Struct, frozen=True):
    """The beginning of a conversation, with all that a request needs to continue it."""

    text: KeptText
    ttl: int  # seconds
    messages: list[Json]  # as in a chat; the last one ends at the mark
    goes_on: bool = False  # as in `Mark`, like ``apart`` and ``cites``
    apart: bool = False
    documents: list[CitedDocument] = []
    segments: list[BlockText] = []
    cites: bool = False
    digest: bytes = b""  # `computed_digest`, which takes a while for a long text

    @property
    def computed_digest(self) -> bytes:
        """SHA-256 of all but the time to live."""
        bare = msgspec.structs.replace(self, ttl=0, digest=b"")
        return hashlib.sha256(msgspec.msgpack.encode(bare)).digest()

    def content(self) -> Json:
        """Return the messages, and whether a request may continue the last one."""
        *first, last = self.messages
        if self.goes_on and self.apart:
            last = last | {"content": (last["content"] or "") + APART}
        return {"messages": [*first, last], "goes_on": self.goes_on}

    def before(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the kept messages and those of a request that continues them."""
        kept = [ChatMessage(**message) for message in self.messages]
        last, rest = kept[-1], list(messages)
        same = rest and (rest[0].role, rest[0].tool_call_id) == (last.role, last.tool_call_id)
        if self.goes_on and same:
            before = TextPart(type="text", text=last.text + (APART if self.apart else ""))
            joined = {"content": [before, *rest[0].parts], "name": rest[0].name or last.name}
            kept[-1], rest[:1] = rest[0].model_copy(update=joined), []
        return kept + rest

    def cited(self, messages: Sequence[ChatMessage]) -> tuple[list[CitedDocument], list[BlockText]]:
        """Return the kept documents, and the blocks of all ``messages`` that `before` returned.

        Both are empty if the context has no blocks: it is a chat's.
        """
        found, first = list(self.segments), len(self.messages) - 1
        if not found:
            return [], []
        for number, message in enumerate(messages[first:], first):
            end = 0
            for at, part in enumerate(message.parts):
                begin, end = end, end + len(part.text)
                if number > first or at:  # the first part of the last kept message has its blocks
                    found.append(BlockText(number, begin, end, None))
        return self.documents, found


def contexts(
    encoder: PromptEncoder,
    marks: Sequence[Mark],
    messages: Sequence[ChatMessage],
    template: Json,
    encoded: tuple[str, Ints, Ints] | None,
    documents: Sequence[CitedDocument] = (),
    segments: Sequence[BlockText] = (),
) -> tuple[list[KeptContext], list[str]]:
    """Return the contexts to keep of a conversation, and fields of marks that keep nothing.

    ``encoded`` is the conversation's text, token ids ``[n]`` and the character at which each token
    ends ``[n]``, or None if the tokenizer cannot tell these: nothing is kept then. The fields are
    named without their indices.
    """
    if len(marks) > MOST_MARKS:
        raise RequestError(
            f"at most {MOST_MARKS} blocks may have cache_control, got {len(marks)}",
            param="messages",
        )
    found = list[KeptContext]()
    uncut = [_MESSAGE for m in messages if m.cache_control is not None and m.content is None]
    if encoded is None:
        return found, uncut + [_field(mark) for mark in marks]
    text, ids, ends = encoded
    for mark in sorted(marks, key=lambda mark: mark[:2]):
        name = f"<mark-{uuid.uuid4().hex}>"
        marked = [message.for_template() for message in messages]
        content = marked[mark.message]["content"]
        marked[mark.message]["content"] = content[: mark.at] + name + content[mark.at :]
        begin, there, _ = encoder.chat_text(marked, **template).partition(name)
        begin, kept = begin.rstrip(), None
        if there and text.startswith(begin):
            if (ends <= len(begin)).sum() < LEAST_TOKENS:
                continue  # too short, whether or not it can be cut here
            kept = keep(text, len(begin), ids, ends)
        if kept is None:
            uncut.append(_field(mark))
            continue
        if len(kept.tokens) < LEAST_TOKENS:
            continue
        own = [message.for_context() for message in messages[: mark.message + 1]]
        own[-1]["content"] = content[: mark.at]
        if calls := (own[-1].pop("tool_calls", None) or [])[: mark.calls]:
            own[-1]["tool_calls"] = calls
        cited = list(documents[: mark.documents]), list(segments[: mark.segments]), mark.cites
        one = KeptContext(kept, mark.ttl, own, mark.goes_on, mark.apart, *cited)
        found.append(msgspec.structs.replace(one, digest=one.computed_digest))
    return found, uncut


def _field(mark: Mark) -> str:
    return re.sub(r"\d+", "", mark.field) + ".cache_control" if mark.field else _MESSAGE
