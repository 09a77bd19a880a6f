"""The objects within request bodies: messages, tools, formats of answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from razor_dist.config.errors import RequestError
from razor_dist.frontend.prompts import CONTENT, for_template
from razor_dist.protocol.structured_outputs import StructuredOutputsParams


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    # Of a body: unsupported fields, with the values, besides null, that are ignored.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    tool_types: ClassVar[Sequence[str]] = ()  # of a body's tools; the first is the default

    def check(self) -> None:
        """Raise `RequestError`, which names the field, for fields that contradict each other."""


class Returned(Strict):
    """An object that a client may take from an answer, to which servers and clients add fields.

    Fields that are null are dropped, whatever their names, and so are the fields in ``added``.
    """

    # Names that `parse` and `stream` of the clients add, and hints to the APIs' own services.
    added: ClassVar[Set[str]] = frozenset()
    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})

    @model_validator(mode="before")
    @classmethod
    def _without_additions(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {
            name: field
            for name, field in value.items()
            # The error for a message without content says whether the field is there.
            if name not in cls.added and (name == "content" or field is not None)
        }


@dataclass(frozen=True)
class Kinds:
    """Selects a class of a union by the value of ``field``, a `Literal` in each class."""

    field: str
    default: str | None = None

    def __get_pydantic_core_schema__(
        self, union: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        choices = {
            f"@{kind}": handler.generate_schema(one)  # some are also names of fields
            for one in get_args(union)
            for kind in get_args(one.model_fields[self.field].annotation)
        }

        def tag(value: object) -> str | None:
            kind = value.get(self.field) if isinstance(value, dict) else None
            kind = self.default if kind is None else kind
            return f"@{kind}" if isinstance(kind, str) else None

        known = ", ".join(choices).replace("@", "")
        message = f"must be an object whose {self.field} is one of {known}"
        return core_schema.tagged_union_schema(
            choices, tag, custom_error_type="kind", custom_error_message=message
        )


class CacheControl(Returned):
    added = frozenset({"scope"})
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h", "1d", "7d"] | None = None

    @property
    def seconds(self) -> int:
        return {"1h": 3600, "1d": 86_400, "7d": 604_800}.get(self.ttl or "5m", 300)


class TextPart(Returned):
    # The last three repeat fields of an answer: OpenAI's agents for JavaScript send them in parts.
    added = frozenset({"prompt_cache_breakpoint", "role", "tool_calls", "annotations"})
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


def _kind_of_content(value: object) -> str | None:
    if value is None:
        return "@none"
    if isinstance(value, list):
        texts = all(isinstance(part, dict) and part.get("type") == "text" for part in value)
        return "@parts" if texts else None
    return "@text" if isinstance(value, str) else None


Content = Annotated[
    Annotated[str, Tag("@text")]
    | Annotated[list[TextPart], Tag("@parts")]
    | Annotated[None, Tag("@none")],
    Discriminator(_kind_of_content, custom_error_type="content", custom_error_message=CONTENT),
]


class CalledFunction(Returned):
    added = frozenset({"parsed_arguments"})
    name: str
    arguments: str


class CalledTool(Returned):
    added = frozenset({"index"})
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Returned):
    added = frozenset({"parsed", "reasoning", "reasoning_content"})
    type: Literal["text", "message"] | None = None  # lm-eval sends it; it has no effect
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None  # of the speaker, for templates that show it
    tool_calls: list[CalledTool] | None = None  # of the role assistant
    tool_call_id: str | None = None  # of the role tool
    annotations: list[Any] | None = None  # of an earlier answer; ignored
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _may_be_thoughts_alone(cls, value: object) -> object:
        """Give an answer that has only thoughts an empty content: templates want its turn."""
        if not isinstance(value, dict) or value.get("content") is not None:
            return value
        thinks = value.get("reasoning_content") or value.get("reasoning")
        return value | {"content": ""} if thinks and not value.get("tool_calls") else value

    @property
    def parts(self) -> list[TextPart]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content or []

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def marks(self) -> list[tuple[int, CacheControl]]:
        """The marks of the content's parts, each behind the character at which its part ends."""
        ends = accumulate(len(part.text) for part in self.parts)
        marks = zip(ends, (part.cache_control for part in self.parts), strict=True)
        return [(end, control) for end, control in marks if control is not None]

    @model_validator(mode="after")
    def _is_of_its_role(self) -> ChatMessage:
        if self.tool_calls == []:  # as in answers without calls
            self.tool_calls = None
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("may have tool_calls only if its role is assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("must have tool_call_id if its role is tool, and only then")
        return self

    def for_context(self) -> dict[str, Any]:
        """Return the message as a context keeps it, for other requests."""
        apart = {"type", "content", "cache_control", "annotations"}
        content = {} if self.content is None else {"content": self.text}
        return self.model_dump(exclude_none=True, exclude=apart) | content

    def for_template(self) -> dict[str, Any]:
        return for_template({"role": self.role, "content": self.text, **self.for_context()})


MAX_MESSAGES = 16384
# The minimum of one message is checked where they are rendered.
Messages = Annotated[
    list[ChatMessage], Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})
]


class Ending(Strict):
    """Fields of a chat and of ``/tokenize`` for the end of the prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def ending(self) -> dict[str, bool]:
        """The same as arguments of the chat template, by transformers' names."""
        if self.continue_final_message:
            return {"add_generation_prompt": False, "continue_final_message": True}
        return {"add_generation_prompt": self.add_generation_prompt is not False}

    def check_ending(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message goes on with the last message, and add_generation_prompt "
                "begins another: one of them must be false or left out",
                param="continue_final_message",
            )


def check_contents(messages: Messages) -> None:
    """Raise `RequestError` for a message with neither content nor calls of tools."""
    for index, message in enumerate(messages):
        if message.content is None and not message.tool_calls:
            where = f"messages[{index}].content"
            given = "content" in message.model_fields_set
            wrong = f"{where} {CONTENT}" if given else f"missing required field {where!r}"
            raise RequestError(wrong, param=where)


def _not_stored(value: bool) -> bool:
    if value:
        raise ValueError(
            "must be false or left out: this server keeps no answers, so keep them yourself and "
            "send the conversation with each request"
        )
    return value


# OpenAI's bounds.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class Hints(Strict):
    """Fields without effect on answers' text: notes, and hints to OpenAI's own service."""

    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None  # Codex's
    include_reasoning: bool | None = None  # vLLM's; answers here have no separate reasoning
    service_tier: str | None = None
    store: Annotated[bool, AfterValidator(_not_stored), WithJsonSchema({"const": False})] | None = (
        None
    )


# OpenAI's names have 64 characters at most, Anthropic's 128.
ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]


class ToolFunction(Returned):
    added = frozenset({"defer_loading", "allowed_callers"})
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return {"type": "object"} | (self.function.parameters or {})


class ChosenFunction(Strict):
    name: str


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Strict):
    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # ignored: answers always match the schema


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have json_schema if its type is json_schema, and only then")
        return self

    def structured_outputs(self) -> StructuredOutputsParams | None:
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.json_schema)
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


# OpenAI's; both are passed to the chat template, which may ignore them.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in `RequestError`: ``names`` maps the raised name to the request's."""
    try:
        yield
    except RequestError as error:
        field, bracket, rest = (error.param or "").partition("[")
        if field not in names:
            raise
        # The name is at the beginning of the message, or quoted.
        problem = re.sub(rf"(^|'){field}\b", rf"\g<1>{names[field]}", str(error))
        raise RequestError(problem, names[field] + bracket + rest, error.code) from None


def _off(value: object) -> object:
    if value is not None and value is not False:  # 0 == False
        raise ValueError("must be false")
    return value


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, BeforeValidator(_off)] = None
    continuous_usage_stats: bool | None = None  # vLLM's: the counts so far, in each chunk
