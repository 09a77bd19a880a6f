"""OpenAI's ``/v1/responses``: a chat in other words, for text."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import RequestError
from razor_dist.engine.messages import Message
from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece
from razor_dist.server.errors import Failure
from razor_dist.server.fields import Strict
from razor_dist.server.formats import Format, Json
from razor_dist.server.schema import ChatBody, Int, parse

# Unsupported fields, with the values that ask for nothing besides null.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("store", "background"), (False,)),
    **dict.fromkeys(("tools", "include"), ([],)),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "reasoning"), ()),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "safety_identifier"), ()),
    **dict.fromkeys(("max_tool_calls", "stream_options", "context_management"), ()),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}
# Names of fields here, by those of a chat.
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
_NAMES["response_format"] = "text.format"


class _Item(Strict):
    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, item: object) -> object:
        """Drop nulls, whatever their names: clients put answers back with all that they know."""
        if not isinstance(item, dict):
            return item
        return {name: value for name, value in item.items() if value is not None}


class TextPart(_Item):
    type: Literal["input_text", "output_text"]
    text: str
    # As in the answers that this server gives.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


def _parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[list[TextPart], BeforeValidator(_parts)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def for_chat(self) -> dict[str, str]:
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


def _messages(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        if self.json_schema is None or self.name is None:
            raise RequestError("text.format must have a name and a schema", param="text.format")
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.json_schema}}


class TextSettings(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(Strict):
    model: str
    input: Annotated[list[InputMessage], BeforeValidator(_messages)]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # As in the other endpoints.
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Int | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None

    def as_chat(self) -> ChatBody:
        """Return the chat that it stands for, by whose names errors go (`renamed`)."""
        own = {"input", "instructions", "max_output_tokens", "text", "metadata"}
        chat = self.model_dump(exclude=own, exclude_none=True)
        found = [message.for_chat() for message in self.input]
        if self.instructions is not None:
            found.insert(0, {"role": "system", "content": self.instructions})
        chat["messages"] = found
        if self.max_output_tokens is not None:
            chat["max_completion_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = self.text.format.for_chat()
        return parse(ChatBody, chat)

    def described(self) -> Json:
        """Return what a response repeats of its request."""
        form = TextFormat(type="text") if self.text is None else self.text.format
        form = form or TextFormat(type="text")
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "temperature": self.temperature,
            "top_p": self.top_p,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "user": self.user,
        }


@contextmanager
def renamed() -> Iterator[None]:
    """Let errors name the fields of a chat as they are called here."""
    try:
        yield
    except RequestError as error:
        field, bracket, rest = (error.param or "").partition("[")
        if field not in _NAMES:
            raise
        message = str(error).replace(field, _NAMES[field])
        raise RequestError(message, _NAMES[field] + bracket + rest, error.code) from None


class ResponsesFormat(Format):
    """One message; streams have typed events, numbered and named."""

    prefix = "resp"
    whole_object = chunk_object = "response"

    def __init__(
        self,
        model: str,
        choices: Sequence[Choice],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        described: Json,
    ) -> None:
        super().__init__(model, choices, tokenizer)
        self._described = described
        self._item = f"msg_{uuid.uuid4().hex}"
        self._numbers = itertools.count()
        self._at = {"item_id": self._item, "output_index": 0, "content_index": 0}

    def whole(self) -> Json:
        [choice] = self._choices
        return self._response(choice.text, choice.pieces[-1].finish_reason)

    def frame(self, chunk: Json) -> str:
        return f"event: {chunk['type']}\n{super().frame(chunk)}"

    def opening(self) -> list[Json]:
        empty = self._message("", "in_progress") | {"content": []}
        begun = self._response("", None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=empty),
            self._event("response.content_part.added", **self._at, part=_part("")),
        ]

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        if not piece.text:
            return []
        delta = {"delta": piece.text, "logprobs": []}
        return [self._event("response.output_text.delta", **self._at, **delta)]

    def progress(self, index: int, message: Message) -> Json:
        raise NotImplementedError  # no request can ask for it

    def closing(self, include_usage: bool) -> list[Json]:
        [choice] = self._choices
        text, whole = choice.text, self.whole()
        [item] = whole["output"]
        return [
            self._event("response.output_text.done", **self._at, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._at, part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def failure(self, failure: Failure) -> Json:
        message, param = failure.message, failure.param
        return self._event("error", code=failure.code, message=message, param=param)

    @property
    def end(self) -> str:
        return ""

    def _event(self, type_: str, **fields: Any) -> Json:
        return {"type": type_, "sequence_number": next(self._numbers), **fields}

    def _message(self, text: str, status: str) -> Json:
        head = {"id": self._item, "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [_part(text)]}

    def _response(self, text: str, finish: str | None) -> Json:
        status = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        head = {k: v for k, v in self._head.items() if k != "created"}
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **head,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "output": [] if finish is None else [self._message(text, status)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None if finish is None else self._usage(),
            **self._described,
        }

    def _usage(self) -> Json:
        usage = super()._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _choice(self, index: int, pieces: Sequence[TextPiece], text: str) -> Json:
        raise NotImplementedError

    def _empty(self, index: int) -> Json:
        raise NotImplementedError


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
