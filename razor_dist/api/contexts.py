"""Contexts: beginnings of conversations that are kept, and requests that go on with one."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from razor_dist.api.conversation import APART, CitedDocument, Mark, Segment
from razor_dist.api.fields import ChatMessage, TextPart
from razor_dist.config.errors import RequestError
from razor_dist.frontend.kept import Ints, KeptText, keep
from razor_dist.frontend.prompts import PromptEncoder

Json = dict[str, Any]

# Marks of a request at most, as Anthropic has it; and tokens from which on a beginning is kept.
MOST_MARKS, LEAST_TOKENS = 4, 64
_MESSAGE = "messages[].cache_control"  # a chat's


class KeptContext(msgspec.Struct, frozen=True):
    """The beginning of a conversation, as far as requests need it that go on with it."""

    text: KeptText
    ttl: int  # seconds
    messages: list[Json]  # as a chat has them; the last up to the mark
    goes_on: bool = False
    apart: bool = False
    documents: list[CitedDocument] = []
    segments: list[Segment] = []
    cites: bool = False
    digest: bytes = b""  # `computed_digest`, which takes a while for a long text

    @property
    def computed_digest(self) -> bytes:
        """SHA-256 of all but the time to live."""
        bare = msgspec.structs.replace(self, ttl=0, digest=b"")
        return hashlib.sha256(msgspec.msgpack.encode(bare)).digest()

    def content(self) -> Json:
        """Return the messages, the last with what stands between it and more of it."""
        *first, last = self.messages
        if self.goes_on and self.apart:
            last = last | {"content": (last["content"] or "") + APART}
        return {"messages": [*first, last], "goes_on": self.goes_on}

    def before(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the whole conversation of a request with these messages."""
        kept = [ChatMessage(**message) for message in self.messages]
        last, rest = kept[-1], list(messages)
        same = rest and (rest[0].role, rest[0].tool_call_id) == (last.role, last.tool_call_id)
        if self.goes_on and same:
            before = TextPart(type="text", text=last.text + (APART if self.apart else ""))
            joined = {"content": [before, *rest[0].parts], "name": rest[0].name or last.name}
            kept[-1], rest[:1] = rest[0].model_copy(update=joined), []
        return kept + rest

    def cited(self, messages: Sequence[ChatMessage]) -> tuple[list[CitedDocument], list[Segment]]:
        """Return its documents, and the blocks of a conversation that goes on with it.

        ``messages`` are all of that, as `before` returns them. No blocks if it names none itself.
        """
        found, first = list(self.segments), len(self.messages) - 1
        if not found:
            return [], []
        for number, message in enumerate(messages[first:], first):
            end = 0
            for at, part in enumerate(message.parts):
                begin, end = end, end + len(part.text)
                if number > first or at:  # its own blocks are in the first part of its last message
                    found.append(Segment(number, begin, end, None))
        return self.documents, found


def contexts(
    encoder: PromptEncoder,
    marks: Sequence[Mark],
    messages: Sequence[ChatMessage],
    template: Json,
    encoded: tuple[str, Ints, Ints] | None,
    documents: Sequence[CitedDocument] = (),
    segments: Sequence[Segment] = (),
) -> tuple[list[KeptContext], list[str]]:
    """Return what is to be kept of a conversation, whose text, tokens and their ends are given.

    ``encoded`` is None if the tokenizer cannot tell the ends: nothing is kept then. Beside it
    come the marks up to which nothing can be kept, without the numbers in their places.
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
                continue  # also where it has no place to be cut
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
