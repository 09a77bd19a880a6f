"""Rules in JSON Schema for fields of a request that exclude or need other fields."""

from __future__ import annotations

from typing import Any

from razor_dist.api.openapi_answers import NULL, TEXT, Json, or_null


def _only_if(field: str, value: Any, others: Json) -> Json:
    """Return a rule: unless ``field`` has the value, other fields match the schemas ``others``."""
    has = {"properties": {field: {"const": value}}, "required": [field]}
    return {"if": has, "else": {"properties": others}}


_STREAMED = _only_if(
    "stream", True, {"stream_options": NULL, "return_progress": {"enum": [None, False]}}
)
_TEXT_FORMAT: Json = {"properties": {"type": {"const": "text"}}}
_ONE_FORMAT = {
    "if": {
        "properties": {"structured_outputs": {"type": "object"}},
        "required": ["structured_outputs"],
    },
    "then": {"properties": {"response_format": {"anyOf": [NULL, _TEXT_FORMAT]}}},
}
_GIVEN: Json = {"not": NULL}
_NO_CALLS: Json = {"enum": [None, []]}


def _message(roles: list[str], required: list[str], **properties: Json) -> Json:
    return {"properties": {"role": {"enum": roles}, **properties}, "required": required}


_SPEAKERS = ["system", "developer", "user", "assistant"]
_SAYS: Json = {"content": _GIVEN, "tool_calls": _NO_CALLS}
_CALLS: Json = {"tool_calls": {"type": "array", "minItems": 1}}
# By the name of the schema to which they belong.
RULES: dict[str, list[Json]] = {
    "ChatMessage": [
        {
            "anyOf": [
                _message(_SPEAKERS, ["content"], tool_call_id=NULL, **_SAYS),
                _message(["assistant"], ["tool_calls"], tool_call_id=NULL, **_CALLS),
                _message(["tool"], ["content", "tool_call_id"], tool_call_id=TEXT, **_SAYS),
            ]
        }
    ],
    "ResponseFormat": [
        {
            "anyOf": [
                {"properties": {"type": {"enum": ["text", "json_object"]}, "json_schema": NULL}},
                {
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {"type": "object"},
                    },
                    "required": ["json_schema"],
                },
            ]
        }
    ],
    "ChatBody": [
        _STREAMED,
        _ONE_FORMAT,
        _only_if("logprobs", True, {"top_logprobs": or_null({"const": 0})}),
        {
            "anyOf": [
                {"properties": {"max_tokens": NULL}},
                {"properties": {"max_completion_tokens": NULL}},
            ]
        },
    ],
    "CompletionBody": [
        _STREAMED,
        _ONE_FORMAT,
        _only_if("echo", True, {"max_tokens": or_null({"type": "integer", "minimum": 1})}),
    ],
    "TokenizeBody": [
        {
            "oneOf": [
                {
                    "properties": {
                        "prompt": TEXT,
                        "messages": NULL,
                        "tools": NULL,
                        "add_generation_prompt": NULL,
                        "continue_final_message": NULL,
                        "chat_template_kwargs": NULL,
                    },
                    "required": ["prompt"],
                },
                {
                    "properties": {
                        "messages": {"type": "array"},
                        "prompt": NULL,
                        "add_special_tokens": NULL,
                    },
                    "required": ["messages"],
                },
            ]
        },
    ],
}
