"""The chat that a request of ``/v1/messages`` becomes, and the places of its blocks there.

A document block becomes a part of a message as the page and ``razor-dist prefill`` write it, so
that each finds what the others have cached: ``Document "TITLE":``, an empty line, the text without
the blanks around it, an empty line. The title is written as JSON, with its escapes; without one
the first line is ``Document N:``. The block's ``context`` is a paragraph ``Context: …`` before the
text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from razor_dist.api.fields import CacheControl
from razor_dist.documents.read import Document
from razor_dist.frontend.passages import Part, PromptText, question_begin

Json = dict[str, Any]
APART = "\n\n"  # between a document and the text beside it


CitationKind = Literal["char_location", "page_location", "content_block_location"]


class CitedDocument(NamedTuple):
    """A document as its citations describe it.

    ``offset`` is the number of blanks, in characters, that were cut from the beginning of its
    text. ``begins`` are the characters of the uncut text at which pages or blocks begin.
    """

    kind: CitationKind
    title: str | None
    offset: int
    begins: Sequence[int] = ()


class BlockText(NamedTuple):
    """A block's text within a message of the chat."""

    message: int
    begin: int  # in characters of the message's content
    end: int
    document: int | None  # index among the request's documents; None for other blocks


class Mark(NamedTuple):
    """The end of a beginning of a conversation that a request wants kept."""

    message: int
    at: int  # in characters of the message's content
    ttl: int  # seconds
    goes_on: bool  # the message may continue behind the mark
    apart: bool = False  # with a new paragraph
    documents: int = 0  # number of the conversation's documents before the mark
    segments: int = 0  # the same of its blocks
    calls: int | None = None  # the same of the message's calls; None for all
    cites: bool = False
    field: str = ""  # of the request; empty if it is the message itself


class Turn:
    """A message of the chat, made of all that one side says before the other does."""

    def __init__(self, role: str, *, calls: Sequence[Json] = (), **fields: Any) -> None:
        content = fields.pop("content", None)
        self.role, self.fields = role, fields
        self.calls = list(calls)
        self.apart = False  # the next text begins a paragraph
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
    """The chat that a request becomes, and the places of its blocks there."""

    def __init__(self, files: Sequence[Document]) -> None:
        self.turns: list[Turn] = []
        self.documents: list[CitedDocument] = []
        self.files = iter(files)  # the request's PDF documents, in their order
        self.segments: list[BlockText] = []
        self.notes: set[int] = set()  # indices of segments that are notes between the turns
        self.marks: list[Mark] = []

    def restore(
        self,
        messages: Sequence[Json],
        documents: Sequence[CitedDocument],
        segments: Sequence[BlockText],
        *,
        apart: bool,
    ) -> None:
        """Begin with the messages of a context, which may be another endpoint's."""
        for message in messages:
            own = dict(message)
            turn = Turn(own.pop("role"), calls=own.pop("tool_calls", ()), **own)
            self.turns.append(turn)
        self.turns[-1].apart = apart
        self.documents += documents
        self.segments += segments or [
            BlockText(n, 0, turn.length, None) for n, turn in enumerate(self.turns)
        ]

    def mark(self, control: CacheControl, field: str, *, cites: bool) -> None:
        """Mark the conversation so far to be kept, as ``field`` of the request asks."""
        last, turn = len(self.turns) - 1, self.turns[-1]
        counts = len(self.documents), len(self.segments), len(turn.calls)
        place = last, turn.length, control.seconds, True, turn.apart
        self.marks.append(Mark(*place, *counts, cites, field))

    def mark_tools(self, control: CacheControl, field: str) -> None:
        """Mark all before the first message to be kept: templates write tools there."""
        first = next((n for n, turn in enumerate(self.turns) if turn.role != "system"), None)
        if first is None:
            return  # without a message the chat is refused
        before = sum(segment.message < first for segment in self.segments)
        mark = Mark(first, 0, control.seconds, True, segments=before, field=field)
        self.marks = [mark, *(other for other in self.marks if other[:2] != mark[:2])]

    def ends_with(self, role: str) -> bool:
        return bool(self.turns) and self.turns[-1].role == role

    def turn(self, role: str) -> Turn:
        """Return the last turn if it has this role, else a new one, as templates want turns."""
        if not self.ends_with(role):
            self.turns.append(Turn(role))
        return self.turns[-1]

    def say(self, role: str, text: str) -> None:
        begin = self.turn(role).say(text)
        self.segments.append(BlockText(len(self.turns) - 1, begin, begin + len(text), None))

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
        self.segments.append(BlockText(len(self.turns) - 1, begin, begin + len(text), number))
        self.documents.append(document)

    def searched(self, text: PromptText) -> PromptText:
        """Return a prompt's text with a part for each block.

        ``message`` of a document's part is the document's index; other parts have none. The
        question is at the end of the user's last text that is no note. Notes behind it are in no
        part.
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
