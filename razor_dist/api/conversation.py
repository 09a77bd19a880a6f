"""The chat that a request with documents stands for, and where its blocks are in it.

A document block becomes a part of the user's message in the form in which the page and
``razor-dist prefill`` send documents, so that all of them find each other's prefixes:
``Document "TITLE":``, an empty line, the text without the blanks around it, an empty line. Without
a title it is ``Document N:``; a context is a paragraph ``Context: …`` before the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from razor_dist.documents.read import Document
from razor_dist.frontend.passages import Part, PromptText, question_begin

Json = dict[str, Any]
APART = "\n\n"  # between a document and what stands beside it


class CitedDocument(NamedTuple):
    """A document as its citations describe it.

    ``offset`` is what its text lost at its beginning, in characters; ``begins`` are those of the
    text, as it was sent, at which its pages or blocks begin.
    """

    kind: Literal["char_location", "page_location", "content_block_location"]
    title: str | None
    offset: int
    begins: Sequence[int] = ()


class _Segment(NamedTuple):
    """A block's text within a message of the chat."""

    message: int
    begin: int  # in characters of the message's content
    text: str
    document: int | None  # its index among the request's documents


class Turn:
    """A message of the chat, of the blocks that one side has said without a break."""

    def __init__(self, role: str, **fields: Any) -> None:
        self.role, self.fields = role, fields
        self.calls: list[Json] = []
        self.apart = False  # what comes next begins a paragraph
        self.length = 0
        self._parts: list[str] = []

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
        self._segments: list[_Segment] = []

    def turn(self, role: str) -> Turn:
        """Return the last turn if it is of this role, or a new one: some templates want turns."""
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(Turn(role))
        return self.turns[-1]

    def say(self, role: str, text: str) -> None:
        begin = self.turn(role).say(text)
        self._segments.append(_Segment(len(self.turns) - 1, begin, text, None))

    def show(self, document: CitedDocument, text: str, context: str | None) -> None:
        """Add a document to the user's turn."""
        number = len(self.documents)
        name = f'"{document.title}"' if document.title else str(number + 1)
        about = f"Context: {context}{APART}" if context else ""
        turn = self.turn("user")
        turn.apart = True
        turn.say(f"Document {name}:{APART}{about}")
        begin = turn.say(text)
        turn.apart = True
        self._segments.append(_Segment(len(self.turns) - 1, begin, text, number))
        self.documents.append(document)

    def searched(self, text: PromptText) -> PromptText:
        """Return a prompt's text with documents and other blocks as parts of their own.

        ``message`` of a document's part is its index, in characters of its text; what is no
        document has none. The last text that the user has said ends with the question.
        """
        begins = {part.message: part.begin for part in text.parts}
        said = [s for s in self._segments if s.document is None]
        asking = next((s for s in reversed(said) if self.turns[s.message].role == "user"), None)
        return PromptText(
            [
                Part(
                    own.text,
                    begins[own.message] + own.begin,
                    question_begin(own.text) if own is asking else len(own.text),
                    own.document,
                )
                for own in self._segments
                if own.message in begins  # a template may leave a message out
            ],
            text.ends,
        )
