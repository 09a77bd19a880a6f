"""Requests of Anthropic's ``/v1/messages``: chats by other names, with cited documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from razor_dist.api.contexts import KeptContext
from razor_dist.api.conversation import BlockText, CitedDocument, Conversation, Mark
from razor_dist.api.field_types import Int, Json, StopSequences, TemplateArguments, in_range
from razor_dist.api.fields import MAX_MESSAGES, CacheControl, Returned, Strict, ToolName
from razor_dist.api.message_blocks import (
    Block,
    DocumentBlock,
    Message,
    PdfSource,
    Texts,
    ToolUseBlock,
)
from razor_dist.api.schema import ChatBody, CommonFields, GenerateBody
from razor_dist.api.validate import validated
from razor_dist.config.errors import RequestError
from razor_dist.documents.read import Document
from razor_dist.frontend.kept import Ints
from razor_dist.frontend.passages import MOST_CITED, PromptText
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.protocol.sampling_params import SamplingParams

# The request's names of fields by those of a chat.
NAMES = {
    "stop": "stop_sequences",
    "return_sources": "citations",
    "response_format": "output_config.format",
}


class CustomTool(Block):
    added = frozenset(
        {"eager_input_streaming", "defer_loading", "allowed_callers", "input_examples"}
    )
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: Json
    strict: bool | None = None

    def for_chat(self) -> Json:
        function = self.model_dump(include={"name", "description", "strict"})
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_its_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("must have a name if its type is tool, and only then")
        return self

    def for_chat(self) -> str | Json:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class OutputFormat(Returned):
    type: Literal["json_schema"]
    json_schema: Annotated[Json, Field(alias="schema")]


class OutputConfig(Strict):
    format: OutputFormat | None = None


class MessageMetadata(Strict):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class DocumentsChat(ChatBody):
    """A chat with the places of documents and other blocks in its messages."""

    _conversation: Conversation = PrivateAttr()

    def encoded(
        self, encoder: PromptEncoder, max_model_len: int, *, ends: bool, keeps: bool = False
    ) -> Iterator[tuple[Sequence[int] | Ints, PromptText | None]]:
        for ids, text in super().encoded(encoder, max_model_len, ends=ends, keeps=keeps):
            yield ids, text and self._conversation.searched(text)

    def go_on_with(self, kept: KeptContext) -> None:
        """As `GenerateBody.go_on_with`: the conversation has the kept messages already."""
        GenerateBody.go_on_with(self, kept)

    @property
    def marks(self) -> list[Mark]:
        return self._conversation.marks

    @property
    def cited(self) -> tuple[Sequence[CitedDocument], Sequence[BlockText]]:
        return self._conversation.documents, self._conversation.segments


class CountTokensBody(Strict):
    """The fields from which the prompt is made."""

    tool_types = ("custom",)
    names: ClassVar[Mapping[str, str]] = NAMES
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "thinking": ({"type": "disabled"},),
        "mcp_servers": ([],),
        "speed": ("standard",),
        **dict.fromkeys(("container", "context_management", "diagnostics"), ()),
        **dict.fromkeys(("inference_geo", "user_profile_id", "workspace_id"), ()),
    }

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None  # of the last block
    # As on the other endpoints.
    context: Annotated[str, Field(min_length=1)] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    _cited: list[CitedDocument] = PrivateAttr(default_factory=list)
    _kept: KeptContext | None = PrivateAttr(default=None)

    @property
    def _documents(self) -> Iterator[tuple[str, DocumentBlock]]:
        """The documents, each behind its place in the request."""
        for i, message in enumerate(self.messages):
            for j, block in enumerate(message.content):
                where = f"messages[{i}].content[{j}]"
                if isinstance(block, DocumentBlock):
                    yield where, block
                for k, part in enumerate(block.blocks):
                    if isinstance(part, DocumentBlock):
                        yield f"{where}.content[{k}]", part

    @property
    def cites(self) -> bool:
        """True if the answer is to cite the documents."""
        own = any(d.citations is not None and d.citations.enabled for _, d in self._documents)
        return own or (self._kept is not None and self._kept.cites)

    def check(self) -> None:
        cites = self.cites
        for where, document in self._documents:
            if cites and not (document.citations and document.citations.enabled):
                raise RequestError(
                    f"{where}.citations must be enabled for all documents or for none", where
                )
        last = self.messages[-1]
        if any(isinstance(block, ToolUseBlock) for block in last.content):
            raise RequestError(
                "messages must not end with a tool_use block: its tool_result follows it",
                "messages",
            )

    def files(self) -> list[tuple[str, bytes]]:
        """Return the PDF files in their order, each behind its field of the request."""
        return [
            (f"{where}.source.data", document.source.file(f"{where}.source.data"))
            for where, document in self._documents
            if isinstance(document.source, PdfSource)
        ]

    def as_chat(
        self, files: Sequence[Document] = (), kept: KeptContext | None = None
    ) -> DocumentsChat:
        """Return the same request as a chat; errors have the chat's names of fields.

        ``files`` are the documents in its PDF files, and ``kept`` is the context that it continues.
        """
        self._kept = kept
        for block in self.system or ():
            block.leave_out_attribution()
        if not any(block.text or block.cache_control for block in self.system or ()):
            self.system = None  # all of it is empty
        conversation, cites = Conversation(files), self.cites
        if kept is not None:
            self._go_on_with(kept, conversation)
        said: list[tuple[str, str, Sequence[Any]]] = [("system", "system", self.system or ())]
        for number, message in enumerate(self.messages):
            said.append((f"messages[{number}].content", message.role, message.content))
        for number, (field, role, blocks) in enumerate(said):
            if blocks and number > 1 and conversation.turns:
                conversation.turns[-1].apart = True
            if is_note := role == "system" and number > 0:
                role = "tool" if conversation.ends_with("tool") else "user"
            for at, block in enumerate(blocks):
                block.add_to(conversation, role)
                if is_note:
                    conversation.notes.add(len(conversation.segments) - 1)
                last = number == len(self.messages) and block is blocks[-1]
                control = block.kept or (self.cache_control if last else None)
                if control is not None and conversation.turns:
                    conversation.mark(control, f"{field}[{at}]", cites=cites)
        for at, tool in enumerate(self.tools or ()):
            if tool.cache_control is not None:
                conversation.mark_tools(tool.cache_control, f"tools[{at}]")
        chat = self._fields() | {"messages": [t.message() for t in conversation.turns]}
        # A message may have no block.
        if self.messages[-1].role == "assistant" and conversation.ends_with("assistant"):
            chat["continue_final_message"] = True  # the answer goes on with it
        if self.tools:
            chat["tools"] = [tool.for_chat() for tool in self.tools]
        if self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice.for_chat()
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        body = validated(DocumentsChat, chat)
        body._conversation, self._cited = conversation, conversation.documents
        return body

    def _go_on_with(self, kept: KeptContext, conversation: Conversation) -> None:
        self.check()  # again: with the context it is known whether all documents are cited
        apart = kept.apart or not kept.goes_on
        conversation.restore(kept.messages, kept.documents, kept.segments, apart=apart)
        if self.system and conversation.turns[-1].role != "system":
            raise RequestError(
                "system is not allowed with a context that goes beyond it", param="system"
            )
        if self.cites and kept.documents and not kept.cites:
            raise RequestError(
                "citations must be enabled for all documents or for none, and the context has "
                "some without",
                param="context",
            )

    def described(self, params: SamplingParams) -> Json:
        """Return the documents (`CitedDocument`) that the answer may cite."""
        return {"documents": self._cited}

    def _fields(self) -> Json:
        """Return the chat's fields other than messages and tools."""
        return {"model": self.model, "chat_template_kwargs": self.chat_template_kwargs}


class MessagesBody(CommonFields, CountTokensBody):
    max_tokens: Annotated[Int, in_range("max_tokens")]
    stop_sequences: StopSequences | None = None
    # Hints to Anthropic's own service, which are ignored.
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def too_long(self, prompt: int, answer: int, most: int) -> str:
        """Return Anthropic's words for a prompt and an answer of more tokens than the context.

        Clients find them in errors: Claude Code takes the numbers, and asks for less.
        """
        if prompt >= most:
            return f"prompt is too long: {prompt} tokens > {most} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {most}, "
            "decrease input length or `max_tokens` and try again"
        )

    def _fields(self) -> Json:
        same = {"max_tokens", *CommonFields.model_fields}
        fields = super()._fields() | self.model_dump(include=same, exclude_none=True)
        fields["stop"] = self.stop_sequences
        fields["return_sources"] = MOST_CITED if self.cites else None
        if self.output_config is not None and (form := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": form.json_schema}
            fields["response_format"] = {"type": form.type, "json_schema": schema}
        return fields
