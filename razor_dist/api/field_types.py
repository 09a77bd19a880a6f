"""Types of single fields of request bodies, each with its validators and JSON Schema.

Ranges in a schema are those of `SamplingParams`, which refuses other values in its own words.
"""

from __future__ import annotations

import re
from inspect import signature
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
)
from transformers import PreTrainedTokenizerBase

from razor_dist.protocol.repetition import RepetitionDetectionParams
from razor_dist.protocol.sampling_params import MAX_STOP_LENGTH, MAX_STOPS, SamplingParams
from razor_dist.protocol.structured_outputs import StructuredOutputsParams

Json = dict[str, Any]

_INT64 = 2**63
_TOKEN_ID = re.compile("[0-9]{1,9}")
_MOST_BIASES = 1024  # of a request; each of its prompts and answers has a copy
_TEXT: Json = {"type": "string"}


def _whole(value: object) -> object:
    """Take ``16.0`` for ``16``, as some clients write it: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
Int64 = Annotated[int, Field(ge=-_INT64, lt=_INT64), BeforeValidator(_whole)]


def in_range(field: str, low: float | None = None) -> Any:
    """Return the range of a field of `SamplingParams` for its schema, from ``low`` if given."""
    known: Any = SamplingParams
    signs = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
    bounds = {
        name: getattr(bound, sign)
        for bound in known.__pydantic_fields__[field].metadata
        for sign, name in signs.items()
        if hasattr(bound, sign)
    }
    return Field(json_schema_extra=bounds | ({} if low is None else {"minimum": low}))


def _count_or_all(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError(f"must be -1 (as many as fit) or at least 1, got {value}")
    return value


_COUNT: Json = {"type": "integer", "minimum": 1, "maximum": _INT64 - 1}
CountOrAll = Annotated[
    Int, AfterValidator(_count_or_all), WithJsonSchema({"anyOf": [{"const": -1}, _COUNT]})
]


def _stop_strings(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if isinstance(stops, list | tuple) and all(isinstance(stop, str) for stop in stops):
        return tuple(stops)
    raise ValueError("must be a string or a list of strings")


_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOPS: Json = {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}
StopSequences = Annotated[list[str], WithJsonSchema(_STOPS)]  # Anthropic's
StopStrings = Annotated[
    tuple[str, ...],
    PlainValidator(_stop_strings),
    WithJsonSchema({"anyOf": [_STOP, _STOPS, {"type": "null"}]}),
]


def _token_keys(value: object) -> object:
    """Return a JSON object with its keys, which are strings, as token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > _MOST_BIASES:
        raise ValueError(f"must have at most {_MOST_BIASES} token ids, got {len(value)}")
    for key in value:
        if not _TOKEN_ID.fullmatch(str(key)):
            raise ValueError(f"must have token ids for keys, got {key!r:.80}")
    return {int(key): bias for key, bias in value.items()}


LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_token_keys),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
            "maxProperties": _MOST_BIASES,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


def _constraint(kind: str, schema: Json) -> Json:
    blanks = {
        "disable_any_whitespace": {"type": ["boolean", "null"]},
        "whitespace_pattern": {"type": ["string", "null"]},
    }
    return {
        "type": "object",
        "properties": {kind: schema, **blanks},
        "required": [kind],
        "additionalProperties": False,
    }


StructuredOutputs = Annotated[
    StructuredOutputsParams,
    PlainValidator(StructuredOutputsParams.of),
    WithJsonSchema(
        {
            "description": "What answers must match; what llguidance cannot do is refused.",
            "anyOf": [
                _constraint("json", {"type": ["object", "string"]}),
                _constraint("json_object", {"const": True}),
                _constraint("regex", _TEXT),
                _constraint("choice", {"type": "array", "items": _TEXT, "minItems": 1}),
                _constraint("grammar", _TEXT),
            ],
        }
    ),
]

RepetitionDetection = Annotated[
    RepetitionDetectionParams,
    PlainValidator(RepetitionDetectionParams.of, json_schema_input_type=RepetitionDetectionParams),
]

_Chosen = TypeVar("_Chosen")
_Choice = Literal["none", "auto", "required"]


def _kind_of_choice(value: object) -> str | None:
    if isinstance(value, dict | BaseModel):
        return "@tool"
    return "@text" if value in get_args(_Choice) else None


# Of OpenAI's endpoints, each of which has its own object (`_Chosen`) to name a tool.
ToolChoice = Annotated[
    Annotated[_Choice, Tag("@text")] | Annotated[_Chosen, Tag("@tool")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="tool_choice",
        custom_error_message="must be 'none', 'auto', 'required' or an object that names a tool",
    ),
]

# Names that `chat_template_kwargs` must not have: the server sets these, or they are code.
_RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "messages"
}
_RESERVED -= {"self", "kwargs", "documents"}


def _template_arguments(value: object) -> object:
    if isinstance(value, dict):
        for name in sorted(_RESERVED & value.keys()):
            raise ValueError(f"must not hold {name!r}")
    return value


TemplateArguments = Annotated[
    dict[str, Any],
    BeforeValidator(_template_arguments),
    Field(json_schema_extra={"propertyNames": {"not": {"enum": sorted(_RESERVED)}}}),
]
