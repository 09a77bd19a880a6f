"""The chat that a request with documents stands for, and where its blocks are in it.

A document block becomes a part of the user's message in the form in which the page and
``razor-dist prefill`` send documents, so that all of them find each other's prefixes:
``Document "TITLE":``, an empty line, the text without the blanks around it, an empty line. The
title is written as JSON, with its escapes. Without a title it is ``Document N:``; a context is a
paragraph ``Context: …`` before the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from razor_dist.api.fields import CacheControl
from razor_dist.documents.read import Document
from razor_dist.frontend.passages import Part, PromptText, question_begin

Json = dict[str, Any]
APART = "\n\n"  # between a document and what stands beside it


CitationKind = Literal["char_location", "page_location", "content_block_location"]


class CitedDocument(NamedTuple):
    """A document as its citations describe it.

    ``offset`` is what its text lost at its beginning, in characters; ``begins`` are those of the
    text, as it was sent, at which its pages or blocks begin.
    """

    kind: CitationKind
    title: str | None
    offset: int
    begins: Sequence[int] = ()


class Segment(NamedTuple):
    """A block's text within a message of the chat."""

    message: int
    begin: int  # in characters of the message's content
    end: int
    document: int | None  # its index among the request's documents


class Mark(NamedTuple):
    """A place in a conversation up to which it is to be kept."""

    message: int
    at: int  # in characters of the message's content
    ttl: int  # seconds
    goes_on: bool  # what follows may belong to the same message
    apart: bool = False  # that would begin a paragraph then
    documents: int = 0  # of the conversation's, how many are up to here
    segments: int = 0
    calls: int | None = None  # of the message's; None for all
    cites: bool = False
    field: str = ""  # of the request, where that is not the message itself


class Turn:
    """A message of the chat, of the blocks that one side has said without a break."""

    def __init__(self, role: str, *, calls: Sequence[Json] = (), **fields: Any) -> None:
        content = fields.pop("content", None)
        self.role, self.fields = role, fields
        self.calls = list(calls)
        self.apart = False  # what comes next begins a paragraph
        self._parts: list[str] = [] if content is None else [content]
        self.length = len(content or "")

    def say(self, text: str) -> int:
        """Add a text; return where it begins."""
        if self.apart and self.length:
            self._parts.append(APART)
            self.length += len(APART)
        self.apart = False
        self._parts.append(text)
        self.length += len(text)
        return self.length - len(text)

    def message(self) -> Json:
        content = "".join(self._parts) if self._parts or not self.calls else None
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": self.role, "content": content, **self.fields, **calls}


class Conversation:
    """The chat that a request stands for, and where its blocks are in it."""

    def __init__(self, files: Sequence[Document]) -> None:
        self.turns: list[Turn] = []
        self.documents: list[CitedDocument] = []
        self.files = iter(files)  # of the request's PDF documents, in their order
        self.segments: list[Segment] = []
        self.notes: set[int] = set()  # indices of segments that are notes between the turns
        self.marks: list[Mark] = []

    def restore(
        self,
        messages: Sequence[Json],
        documents: Sequence[CitedDocument],
        segments: Sequence[Segment],
        *,
        apart: bool,
    ) -> None:
        """Begin with messages that were kept, of this endpoint or another."""
        for message in messages:
            own = dict(message)
            turn = Turn(own.pop("role"), calls=own.pop("tool_calls", ()), **own)
            self.turns.append(turn)
        self.turns[-1].apart = apart
        self.documents += documents
        self.segments += segments or [
            Segment(n, 0, turn.length, None) for n, turn in enumerate(self.turns)
        ]

    def mark(self, control: CacheControl, field: str, *, cites: bool) -> None:
        """Have what was said so far be kept, as the request asks in ``field``."""
        last, turn = len(self.turns) - 1, self.turns[-1]
        counts = len(self.documents), len(self.segments), len(turn.calls)
        place = last, turn.length, control.seconds, True, turn.apart
        self.marks.append(Mark(*place, *counts, cites, field))

    def mark_tools(self, control: CacheControl, field: str) -> None:
        """Have all before the first message be kept: that is where templates write tools."""
        first = next((n for n, turn in enumerate(self.turns) if turn.role != "system"), None)
        if first is None:
            return  # without a message the chat is refused
        before = sum(segment.message < first for segment in self.segments)
        mark = Mark(first, 0, control.seconds, True, segments=before, field=field)
        self.marks = [mark, *(other for other in self.marks if other[:2] != mark[:2])]

    def ends_with(self, role: str) -> bool:
        return bool(self.turns) and self.turns[-1].role == role

    def turn(self, role: str) -> Turn:
        """Return the last turn if it is of this role, or a new one: some templates want turns."""
        if not self.ends_with(role):
            self.turns.append(Turn(role))
        return self.turns[-1]

    def say(self, role: str, text: str) -> None:
        begin = self.turn(role).say(text)
        self.segments.append(Segment(len(self.turns) - 1, begin, begin + len(text), None))

    def show(self, role: str, document: CitedDocument, text: str, context: str | None) -> None:
        """Add a document to the turn of the user or of a tool."""
        number = len(self.documents)
        title = document.title
        name = json.dumps(title, ensure_ascii=False) if title else str(number + 1)
        about = f"Context: {context}{APART}" if context else ""
        turn = self.turn(role)
        turn.apart = True
        turn.say(f"Document {name}:{APART}{about}")
        begin = turn.say(text)
        turn.apart = True
        self.segments.append(Segment(len(self.turns) - 1, begin, begin + len(text), number))
        self.documents.append(document)

    def searched(self, text: PromptText) -> PromptText:
        """Return a prompt's text with documents and other blocks as parts of their own.

        ``message`` of a document's part is its index, in characters of its text; what is no
        document has none. The last text of the user that is no note ends with the question;
        notes behind it are in no part.
        """
        found = {part.message: part for part in text.parts}
        asking = len(self.segments)
        for at, own in enumerate(self.segments):
            is_text = own.document is None and at not in self.notes
            if is_text and self.turns[own.message].role == "user":
                asking = at
        return PromptText(
            [
                Part(
                    said := found[own.message].text[own.begin : own.end],
                    found[own.message].begin + own.begin,
                    question_begin(said) if at == asking else len(said),
                    own.document,
                )
                for at, own in enumerate(self.segments)
                if own.message in found  # a template may leave a message out
                and not (at in self.notes and at > asking)
            ],
            text.ends,
        )
