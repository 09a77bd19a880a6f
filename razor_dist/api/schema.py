"""The request bodies of the API, and everything about them that can be refused.

Unsupported fields are refused by name; a field of OpenAI's that is set to what happens anyway
(``presence_penalty: 0``) is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)

from razor_dist.api.fields import (
    CONTENT,
    STRUCTURED,
    ChatMessage,
    ChosenTool,
    Hints,
    ResponseFormat,
    Strict,
    TemplateArguments,
    Tool,
    naming,
    structured,
)
from razor_dist.api.tools import forced
from razor_dist.config.errors import RequestError
from razor_dist.config.validation import nearest
from razor_dist.protocol.sampling_params import MAX_LOGPROBS, SamplingDefaults, SamplingParams
from razor_dist.protocol.structured_outputs import StructuredOutputsParams

_INT64 = 2**63
MAX_MESSAGES = 16384
_TOKEN_ID = re.compile("[0-9]{1,9}")
# Fields of a body that are one of `SamplingParams` by the same name; null is the default.
_SAMPLING = {
    *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "return_sources"),
}
Body = TypeVar("Body", bound=Strict)

# Unsupported fields, with the values that ask for nothing besides null.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none",),
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "web_search_options"), ()),
    "suffix": ("",),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}

# Names that vLLM took until 0.12, and what took their place.
_GUIDED = {
    f"guided_{kind}": f'structured_outputs: {{"{kind}": ...}}'
    for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
}


def _whole(value: object) -> object:
    """Take ``16.0`` for ``16``: JSON has one kind of number, and some clients write integers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
# Kinds of items in the input of /v1/responses, which pydantic names like fields.
_TAGS = ("message", "function_call", "function_call_output")
# Of a field whose JSON Schema `razor_dist.api.openapi` writes.
_ELSEWHERE = WithJsonSchema({})


def _token_keys(value: object) -> object:
    """Take the keys of a JSON object, which are strings, for token ids."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not _TOKEN_ID.fullmatch(str(key)):
            raise ValueError(f"must have token ids for keys, got {key!r:.80}")
    return {int(key): bias for key, bias in value.items()}


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the counts so far, in each chunk


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if isinstance(stops, list) and all(isinstance(stop, str) for stop in stops):
        return tuple(stops)
    raise ValueError("must be a string or a list of strings")


def _prompts(value: object) -> list[str | list[int]]:
    # By hand, because pydantic would report every one of a million tokens as "not a string".
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if isinstance(value, list) and value:
        are_texts = all(isinstance(p, str) for p in value)
        if are_texts or all(_is_tokens(p) for p in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids or a list of such lists, "
        "none of them empty"
    )


def _is_tokens(value: object) -> TypeGuard[list[int]]:
    # type(), because True is an instance of int.
    return isinstance(value, list) and bool(value) and all(type(t) is int for t in value)


class GenerateBody(Hints):
    model: str
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Int, Field(lt=_INT64)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_token_keys), _ELSEWHERE] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, PlainValidator(structured), _ELSEWHERE
    ] = None
    seed: Annotated[Int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop), _ELSEWHERE] = ()
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[Int, Field(ge=-_INT64, lt=_INT64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    return_sources: Int | None = None
    n: Int | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True for counts in every chunk; without ``include_usage`` there are none, as in vLLM."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    def check(self) -> None:
        """Refuse combinations that make no sense by a `RequestError` that names the field."""
        for name in ("stream_options", "return_progress"):
            if getattr(self, name) and not self.stream:
                raise RequestError(f"{name} is only allowed with stream: true", param=name)

    @property
    def constrained_by(self) -> str:
        """The field that says what the answers must match, if any does."""
        given = self.response_format is not None and self.response_format.type != "text"
        return "response_format" if given else STRUCTURED

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        if self.response_format is None or self.response_format.type == "text":
            return self.structured_outputs
        if self.structured_outputs is not None:
            raise RequestError(
                "response_format and structured_outputs exclude each other",
                param="structured_outputs",
            )
        with naming(self.constrained_by):
            return self.response_format.structured_outputs()

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, defaults: SamplingDefaults
    ) -> SamplingParams:
        given = self.model_dump(include=_SAMPLING, exclude_none=True)
        return SamplingParams(
            **{**defaults, **given},
            max_tokens=max_tokens,
            structured_outputs=self._structured_outputs(),
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            priority=self.priority or 0,
        )


class ChatBody(GenerateBody):
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None

    @property
    def used_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tool(self) -> str | None:
        """A tool's name or "required" if the answer must be a call."""
        if isinstance(self.tool_choice, ChosenTool):
            return self.tool_choice.function.name
        return "required" if self.tool_choice == "required" else None

    @property
    def constrained_by(self) -> str:
        return super().constrained_by if self.forced_tool is None else "tools"

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        other = super()._structured_outputs()
        if self.forced_tool is None:
            if other is not None and self.used_tools:
                param = "structured_outputs" if self.structured_outputs else "response_format"
                raise RequestError(
                    f"{param} keeps the model from calling tools: leave one of them out, or set "
                    "tool_choice to 'none', 'required' or a tool",
                    param=param,
                )
            return other
        if other is not None:
            raise RequestError(
                "a forced tool_choice excludes response_format and structured_outputs",
                param="tool_choice",
            )
        schemas = {tool.function.name: tool.schema_of_arguments for tool in self.used_tools}
        with naming(self.constrained_by):
            return forced(schemas, self.forced_tool, self.parallel_tool_calls is not False)

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise RequestError("two tools have the same name", param="tools")
        if self.forced_tool not in (None, "required", *names):
            raise RequestError(f"there is no tool {self.forced_tool!r:.80}", param="tool_choice")
        if self.tool_choice not in (None, "none") and not names:
            raise RequestError("tool_choice is only allowed with tools", param="tool_choice")

    def check(self) -> None:
        super().check()
        self._check_tools()
        for index, message in enumerate(self.messages):
            if message.content is None and not message.tool_calls:
                where = f"messages[{index}].content"
                given = "content" in message.model_fields_set
                wrong = f"{where} {CONTENT}" if given else f"missing required field {where!r}"
                raise RequestError(wrong, param=where)
        if not self.messages:
            raise RequestError("messages must hold at least one message", param="messages")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise RequestError(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) contradict each "
                "other; give one of them",
                param="max_tokens",
            )
        top, problem = self.top_logprobs, None
        if top is not None and not self.logprobs:
            problem = "is only allowed with logprobs: true"
        elif top is not None and not 0 <= top <= MAX_LOGPROBS:
            problem = f"must be between 0 and {MAX_LOGPROBS}, got {top}"
        if problem:
            raise RequestError(f"top_logprobs {problem}", param="top_logprobs")

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """The sampling settings; without a limit, as many tokens as the context holds."""
        limit = self.max_completion_tokens
        if limit is not None and limit < 1:
            raise RequestError(
                f"max_completion_tokens must be at least 1, got {limit}",
                param="max_completion_tokens",
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(self.max_tokens if limit is None else limit, logprobs, defaults)


class CompletionBody(GenerateBody):
    # As a list: one prompt or several, each answered by a choice of its own.
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), _ELSEWHERE]
    logprobs: Int | None = None
    echo: bool | None = None

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """The sampling settings; without a limit 16 tokens, OpenAI's default here.

        With ``echo``, 0 tokens are computed as 1, which is not shown.
        """
        limit = 16 if self.max_tokens is None else self.max_tokens
        params = self._sampling(limit or int(bool(self.echo)), self.logprobs, defaults)
        return replace(params, prompt_logprobs=self.logprobs) if self.echo else params


def parse(cls: type[Body], data: object, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> Body:
    """Validate a parsed request body; `RequestError` names the first field at fault.

    ``neutral`` are fields that are unsupported, and values of theirs that ask for nothing.
    """
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    fields = {}
    for name, value in data.items():
        if name in cls.model_fields:
            fields[name] = value
        elif name not in neutral:
            hint = _GUIDED.get(name) or nearest(name, cls.model_fields)
            suffix = f"; did you mean {hint!r}?" if hint else ""
            raise RequestError(f"unsupported field {name!r}{suffix}", param=name)
        elif value is not None and not _is_neutral(value, neutral[name]):
            raise RequestError(f"unsupported field {name!r}", param=name)
    try:
        body = cls(**fields)
    except ValidationError as error:
        raise _request_error(error) from None
    body.check()
    return body


def _is_neutral(value: object, neutral: Sequence[Any]) -> bool:
    # 0 == False in Python, not in JSON.
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral)


def _request_error(error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False, include_input=False)[0]
    field, *rest = problem["loc"]
    rest = [part for part in rest if part not in _TAGS]
    where = f"{field}" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in rest)
    match problem["type"]:
        case "missing":
            message = f"missing required field {where!r}"
        case "extra_forbidden":
            message = f"unsupported field {where!r}"
        case "value_error":
            message = f"{where} {problem['ctx']['error']}"
        case _:
            message = f"{where} {problem['msg'].replace('Input should be', 'must be')}"
    return RequestError(message, param=where)
