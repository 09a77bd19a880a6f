"""The messages of Anthropic's ``/v1/messages``, and their blocks."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from razor_dist.api.conversation import (
    APART,
    CitationKind,
    CitedDocument,
    Conversation,
    Turn,
)
from razor_dist.api.field_types import Json
from razor_dist.api.fields import CacheControl, Kinds, Returned, Strict
from razor_dist.config.errors import RequestError

# The beginning of the first line of Claude Code's system prompt. The rest of the line differs in
# each request, and no prompt would begin as another does, which the prefix cache needs.
_ATTRIBUTION = "x-anthropic-billing-header:"


class Block(Returned):
    cache_control: CacheControl | None = None

    @property
    def kept(self) -> CacheControl | None:
        """The block's mark, or the last mark of a block in it; both keep up to the block's end."""
        return self.cache_control or next(
            (block.kept for block in reversed(self.blocks) if block.kept), None
        )

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks within this one."""
        return ()


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Json] | None = None  # of an earlier answer; ignored

    def add_to(self, chat: Conversation, role: str) -> None:
        chat.say(role, self.text)

    def leave_out_attribution(self) -> None:
        """Drop Claude Code's line of attribution; a block without other text loses its mark."""
        if self.text.startswith(_ATTRIBUTION):
            self.text = self.text.partition("\n")[2]
            self.cache_control = self.cache_control if self.text else None


def _blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[
    list[TextBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])
]


class TextSource(Strict):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str

    def read(self, chat: Conversation) -> tuple[CitationKind, str, Sequence[int]]:
        """Return the kind of citations, the text, and the characters at which its parts begin."""
        return "char_location", self.data, ()


class ContentSource(Strict):
    type: Literal["content"]
    content: Texts

    def read(self, chat: Conversation) -> tuple[CitationKind, str, Sequence[int]]:
        begins, end = [], 0
        for block in self.content:
            begins.append(end)
            end += len(block.text) + len(APART)
        return "content_block_location", APART.join(b.text for b in self.content), begins


class PdfSource(Strict):
    type: Literal["base64"]
    media_type: Literal["application/pdf"]
    data: str

    def read(self, chat: Conversation) -> tuple[CitationKind, str, Sequence[int]]:
        file = next(chat.files)
        return "page_location", file.text, file.pages

    def file(self, where: str) -> bytes:
        """Return the file's bytes; `RequestError`, for the field ``where``, if they are no PDF."""
        try:
            data = base64.b64decode(self.data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{where} must be base64: {error}", where) from None
        if b"%PDF-" not in data[:1024]:
            raise RequestError(f"{where} must be a PDF file in base64", where)
        return data


class Citations(Strict):
    enabled: bool = False


class DocumentBlock(Block):
    type: Literal["document"]
    source: Annotated[TextSource | ContentSource | PdfSource, Kinds("type")]
    title: str | None = None
    context: str | None = None  # about the document; it is not cited
    citations: Citations | None = None

    @property
    def blocks(self) -> Sequence[Block]:
        return self.source.content if isinstance(self.source, ContentSource) else ()

    def add_to(self, chat: Conversation, role: str) -> None:
        kind, text, begins = self.source.read(chat)
        offset = len(text) - len(text.lstrip())
        cited = CitedDocument(kind, self.title, offset, begins)
        chat.show(role, cited, text.strip(), self.context)


class ThinkingBlock(Block):
    """Thoughts of an earlier answer, of this or another model; ignored."""

    added = frozenset({"thinking", "signature", "data"})
    type: Literal["thinking", "redacted_thinking"]

    def add_to(self, chat: Conversation, role: str) -> None:
        """Add nothing: Anthropic's API and most templates leave out earlier thoughts, too."""


class ToolUseBlock(Block):
    added = frozenset({"caller"})
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json

    def add_to(self, chat: Conversation, role: str) -> None:
        function = {"name": self.name, "arguments": json.dumps(self.input)}
        call = {"id": self.id, "type": "function", "function": function}
        chat.turn(role).calls.append(call)


class ToolReference(TextBlock):
    """The name of a tool that a search for tools has found."""

    type: Literal["tool_reference"]  # type: ignore[assignment]
    text: Annotated[str, Field(alias="tool_name"), AfterValidator(lambda name: f"{name}\n")]


Result = Annotated[TextBlock | DocumentBlock | ToolReference, Kinds("type")]


class ToolResultBlock(Block):
    added = frozenset({"toolset_name"})
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[Result] | None, BeforeValidator(_blocks, json_schema_input_type=str | list[Result])
    ] = None
    is_error: bool | None = None

    @property
    def blocks(self) -> Sequence[Result]:
        return self.content or ()

    def add_to(self, chat: Conversation, role: str) -> None:
        # Templates have no other way to show that a call failed.
        failed = "Error: " if self.is_error else ""
        chat.turns.append(Turn("tool", tool_call_id=self.tool_use_id, content=failed))
        for block in self.blocks:
            block.add_to(chat, "tool")


UserBlock = Annotated[TextBlock | DocumentBlock | ToolResultBlock, Kinds("type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Kinds("type")]


class UserMessage(Strict):
    role: Literal["user"]
    content: Annotated[
        list[UserBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[UserBlock])
    ]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock],
        BeforeValidator(_blocks, json_schema_input_type=str | list[AssistantBlock]),
    ]


class SystemMessage(Strict):
    """A note between the turns, such as Claude Code's reminders.

    It becomes a part of the user's turn or of a tool's result: templates show these, and what the
    caches have of the prompt before stays as it is.
    """

    role: Literal["system"]
    content: Texts


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Kinds("role")]
