"""The request bodies of the API, and everything about them that can be refused.

Unsupported fields are refused by name; a field of OpenAI's that is set to what happens anyway
(``presence_penalty: 0``) is accepted.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from razor_dist.config.errors import RequestError
from razor_dist.config.validation import nearest
from razor_dist.engine.sampling_params import MAX_LOGPROBS, SamplingDefaults, SamplingParams
from razor_dist.engine.structured_outputs import StructuredOutputsParams

_INT64 = 2**63
_MAX_MESSAGES = 16384
_TOKEN_ID = re.compile("[0-9]{1,9}")
# Fields of a body that are one of `SamplingParams` by the same name; null is the default.
_SAMPLING = {
    *("n", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
Body = TypeVar("Body", bound="GenerateBody")

# Unsupported fields, with the values that ask for nothing besides null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "metadata": ({},),
    **dict.fromkeys(("echo", "store"), (False,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "web_search_options"), ()),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "safety_identifier"), ()),
    "suffix": ("",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}

# Names that vLLM took until 0.12, and what took their place.
_GUIDED = {
    f"guided_{kind}": f'structured_outputs: {{"{kind}": ...}}'
    for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
}

# The same within a message: answers that a client puts back into its history may bring them.
_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {"annotations": ([],), "tool_calls": ([],)}


def _whole(value: object) -> object:
    """Take ``16.0`` for ``16``: JSON has one kind of number, and some clients write integers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]


def _token_keys(value: object) -> object:
    """Take the keys of a JSON object, which are strings, for token ids."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not _TOKEN_ID.fullmatch(str(key)):
            raise ValueError(f"must have token ids for keys, got {key!r:.80}")
    return {int(key): bias for key, bias in value.items()}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _content(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(_is_text_part(part) for part in value):
        return "".join(part["text"] for part in value)
    raise ValueError(
        'must be a string or a list of {"type": "text", "text": ...} parts; '
        "other kinds of content are not supported"
    )


def _is_text_part(part: object) -> bool:
    if not isinstance(part, dict) or set(part) != {"type", "text"}:
        return False
    return part["type"] == "text" and isinstance(part["text"], str)


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


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, message: object) -> object:
        """Drop what asks for nothing, whatever its name: servers add fields to their answers."""
        if not isinstance(message, dict):
            return message
        return {
            name: value
            for name, value in message.items()
            if name in cls.model_fields
            or (value is not None and value not in _NEUTRAL_IN_MESSAGE.get(name, ()))
        }

    def for_template(self) -> dict[str, str]:
        # OpenAI renamed the role; templates know the old name only.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class JsonSchema(_Strict):
    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # answers match the schema in any case


class ResponseFormat(_Strict):
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


def _structured(value: object) -> StructuredOutputsParams | None:
    try:
        return None if value is None else StructuredOutputsParams.of(value)
    except RequestError as error:
        raise ValueError(str(error).removeprefix("structured_outputs: ")) from None


class GenerateBody(_Strict):
    model: str
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Int, Field(lt=_INT64)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_token_keys)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputsParams | None, PlainValidator(_structured)] = (
        None
    )
    seed: Annotated[Int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[Int, Field(ge=-_INT64, lt=_INT64)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    n: Int | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse combinations that make no sense by a `RequestError` that names the field."""
        for name in ("stream_options", "return_progress"):
            if getattr(self, name) and not self.stream:
                raise RequestError(f"{name} is only allowed with stream: true", param=name)

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        if self.response_format is None or self.response_format.type == "text":
            return self.structured_outputs
        if self.structured_outputs is not None:
            raise RequestError(
                "response_format and structured_outputs exclude each other",
                param="structured_outputs",
            )
        try:
            structured = self.response_format.structured_outputs()
            if structured is not None:
                structured.check()
        except RequestError as error:
            problem = str(error).replace("structured_outputs", "response_format", 1)
            raise RequestError(problem, param="response_format") from None
        return structured

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
    messages: Annotated[list[ChatMessage], Field(max_length=_MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None

    def check(self) -> None:
        super().check()
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
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: Int | None = None

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """The sampling settings; without a limit 16 tokens, OpenAI's default here."""
        limit = 16 if self.max_tokens is None else self.max_tokens
        return self._sampling(limit, self.logprobs, defaults)


def parse(cls: type[Body], data: object) -> Body:
    """Validate a parsed request body; `RequestError` names the first field at fault."""
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    fields = {}
    for name, value in data.items():
        if name in cls.model_fields:
            fields[name] = value
        elif name not in _NEUTRAL:
            hint = _GUIDED.get(name) or nearest(name, cls.model_fields)
            suffix = f"; did you mean {hint!r}?" if hint else ""
            raise RequestError(f"unsupported field {name!r}{suffix}", param=name)
        elif value is not None and not _is_neutral(name, value):
            raise RequestError(f"unsupported field {name!r}", param=name)
    try:
        body = cls(**fields)
    except ValidationError as error:
        raise _request_error(error) from None
    body.check()
    return body


def _is_neutral(name: str, value: object) -> bool:
    # 0 == False in Python, not in JSON.
    return any(
        value == v and isinstance(value, bool) == isinstance(v, bool) for v in _NEUTRAL[name]
    )


def _request_error(error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False, include_input=False)[0]
    field, *rest = problem["loc"]
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
