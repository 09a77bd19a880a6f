"""Requests of OpenAI's ``/v1/responses``: chats by other names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from razor_dist.api.conversation import APART
from razor_dist.api.errors import shortened
from razor_dist.api.field_types import Int, Json, TemplateArguments, ToolChoice, in_range
from razor_dist.api.fields import (
    Kinds,
    ReasoningEffort,
    Returned,
    Strict,
    ToolFunction,
    ToolName,
    Verbosity,
)
from razor_dist.api.schema import ChatBody, SharedFields
from razor_dist.api.validate import validated
from razor_dist.config.errors import RequestError
from razor_dist.protocol.sampling_params import SamplingParams

# The request's names of fields by those of a chat.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",  # a chat's name if the limit is not given
    "response_format": "text.format",
}
# Characters that a response repeats at most of the instructions, of all tools, and of the text's
# format. A stream repeats them three times.
_MOST_REPEATED = 64 * 1024
# Characters that are repeated of the name of a longer format: OpenAI's bound of names.
_NAME = 64


class _Item(Returned):
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class InputText(Returned):
    added = frozenset({"parsed", "prompt_cache_breakpoint"})
    type: Literal["input_text", "output_text"]
    text: str
    # Of an earlier answer; ignored.
    annotations: list[Any] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


def _parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[InputText], BeforeValidator(_parts, json_schema_input_type=str | list[InputText])
]


class InputMessage(_Item):
    added = frozenset({"phase"})
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts

    def add_to(self, messages: list[Json]) -> None:
        """Add the message to the last if both are of one side, since templates want turns."""
        role = "system" if self.role == "developer" else self.role
        text = "".join(part.text for part in self.content)
        last = messages[-1] if messages else {}
        if role == last.get("role") == "assistant" and last["content"] is None:
            last["content"] = text  # LiteLLM sends an answer's calls before its text
        elif role == last.get("role") and not last.get("tool_calls"):
            last["content"] += APART + text
        else:
            messages.append({"role": role, "content": text})


class _Call(_Item):
    call_id: str
    name: str
    namespace: str | None = None

    @property
    def given(self) -> str:
        """The arguments as JSON."""
        raise NotImplementedError

    def add_to(self, messages: list[Json]) -> None:
        function = {"name": _flat(self.namespace, self.name), "arguments": self.given}
        call = {"id": self.call_id, "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)


class FunctionCall(_Call):
    added = frozenset({"parsed_arguments"})
    type: Literal["function_call"]
    arguments: str

    @property
    def given(self) -> str:
        return self.arguments


class CustomToolCall(_Call):
    type: Literal["custom_tool_call"]
    input: str

    @property
    def given(self) -> str:
        return json.dumps({"input": self.input})


class CallOutput(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts

    def add_to(self, messages: list[Json]) -> None:
        text = "".join(part.text for part in self.output)
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": text})


class ReasoningItem(_Item):
    """Thoughts of an earlier answer, of this or another model; ignored."""

    added = frozenset({"summary", "content", "encrypted_content"})
    type: Literal["reasoning"]

    def add_to(self, messages: list[Json]) -> None:
        """Add nothing."""


Item = Annotated[
    InputMessage | FunctionCall | CustomToolCall | CallOutput | ReasoningItem,
    Kinds("type", default="message"),
]


def _items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    for at, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            where = f"input[{at}]"
            raise RequestError(
                f"{where} refers to an item of an earlier answer, and this server keeps no answers:"
                " send the item itself, as clients do with store: false",
                param=where,
            )
    return value


def _flat(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


class _Typed(Strict):
    type: Literal["function"]


class FunctionTool(ToolFunction, _Typed):  # pydantic looks at the last base's fields first
    def for_chat(self) -> Iterator[Json]:
        yield {"type": "function", "function": self.model_dump(exclude={"type"})}

    def called(self) -> Iterator[tuple[str, Json]]:
        """Yield the names by which the model calls tools, with the fields of such a call's item."""
        yield self.name, {"type": "function_call", "name": self.name}


class CustomTool(Returned):
    """A tool that takes a text. The model writes it as the argument ``input`` of a function."""

    added = frozenset({"defer_loading", "allowed_callers"})
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Json | None = None

    def for_chat(self) -> Iterator[Json]:
        grammar = (self.format or {}).get("definition")
        said = [self.description, grammar and f"The grammar of its input:\n{grammar}"]
        schema = {"type": "object", "properties": {"input": {"type": "string"}}}
        about = {"name": self.name, "description": "\n\n".join(filter(None, said))}
        parameters = schema | {"required": ["input"]}
        yield {"type": "function", "function": about | {"parameters": parameters}}

    def called(self) -> Iterator[tuple[str, Json]]:
        yield self.name, {"type": "custom_tool_call", "name": self.name}


class NamespaceTool(Returned):
    """Tools with a name in common, such as Codex makes of each MCP server."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None  # not shown to the model
    tools: list[Annotated[FunctionTool | CustomTool, Kinds("type")]]

    def for_chat(self) -> Iterator[Json]:
        for tool in self.tools:
            for one in tool.for_chat():
                name = _flat(self.name, one["function"]["name"])
                yield one | {"function": one["function"] | {"name": name}}

    def called(self) -> Iterator[tuple[str, Json]]:
        for tool in self.tools:
            for name, item in tool.called():
                yield _flat(self.name, name), item | {"namespace": self.name}


class ChosenFunctionTool(Strict):
    type: Literal["function", "custom"]
    name: str

    def for_chat(self) -> Json:
        return {"type": "function", "function": {"name": self.name}}


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
    verbosity: Verbosity | None = None


class Reasoning(Returned):
    """OpenAI's reasoning settings; only ``effort`` has an effect, on the chat template."""

    added = frozenset({"context"})
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


_AS_IN_A_CHAT = (
    *SharedFields.model_fields,
    *("parallel_tool_calls", "chat_template_kwargs", "return_annotations"),
)


class ResponsesBody(SharedFields):
    tool_types = "function", "custom", "namespace"
    names: ClassVar[Mapping[str, str]] = NAMES
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),  # of reasoning, which no answer has
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ()),
        **dict.fromkeys(("max_tool_calls", "context_management"), ()),
        "stream_options": ({}, {"include_obfuscation": False}),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
    }
    input: Annotated[
        list[Item],
        BeforeValidator(
            _items,
            json_schema_input_type=str | Annotated[list[Item], Field(min_length=1)],
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[Int, in_range("max_tokens")] | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: list[Annotated[FunctionTool | CustomTool | NamespaceTool, Kinds("type")]] | None = None
    tool_choice: ToolChoice[ChosenFunctionTool] | None = None
    parallel_tool_calls: bool | None = None
    # As in a chat.
    chat_template_kwargs: TemplateArguments | None = None
    return_annotations: bool | None = None

    def as_chat(self) -> ChatBody:
        """Return the same request as a chat; errors have the chat's names of fields."""
        chat: Json = {name: getattr(self, name) for name in _AS_IN_A_CHAT}
        messages: list[Json] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            item.add_to(messages)
        chat["messages"] = messages
        if self.tools:
            chat["tools"] = [one for tool in self.tools for one in tool.for_chat()]
        choice = self.tool_choice
        if isinstance(choice, ChosenFunctionTool):
            chat["tool_choice"] = choice.for_chat()
        else:
            chat["tool_choice"] = choice
        chat["max_completion_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = self.text.format.for_chat()
        chat["verbosity"] = self.text and self.text.verbosity
        chat["reasoning_effort"] = self.reasoning and self.reasoning.effort
        return validated(ChatBody, chat)

    @property
    def called(self) -> dict[str, Json]:
        """The fields of a call's item by the name that the model calls the tool by."""
        return {name: item for tool in self.tools or () for name, item in tool.called()}

    def described(self, params: SamplingParams) -> Json:
        """Return the fields of its request that a response repeats, with the sampling ``params``.

        Beyond `_MOST_REPEATED` the instructions are cut, tools are only their names, or missing if
        these are too long, and the text's format has no description and an empty schema.
        """
        form = (self.text and self.text.format) or TextFormat(type="text")
        if _is_long(form.model_dump()):
            name, schema = form.name and shortened(form.name, _NAME), form.json_schema and {}
            short = {"name": name, "description": None, "json_schema": schema}
            form = form.model_copy(update=short)
        tools = [tool.model_dump(serialize_as_any=True) for tool in self.tools or []]
        if _is_long(tools):
            tools = [FunctionTool(type="function", name=n).model_dump() for n in self.called]
        if _is_long(tools):
            tools = []
        choice = self.tool_choice
        reasoning = self.reasoning or Reasoning()
        return {
            "instructions": self.instructions and shortened(self.instructions, _MOST_REPEATED),
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, Strict) else choice or "auto",
            "tools": tools,
            "user": self.user,
        }


def _is_long(value: object) -> bool:
    return len(json.dumps(value)) > _MOST_REPEATED
