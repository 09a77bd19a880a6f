"""Rules in JSON Schema for fields of a request that exclude or need others."""

from __future__ import annotations

from typing import Any

from razor_dist.api.openapi_answers import NULL, TEXT, Json, or_null


def _only_if(field: str, value: Any, others: Json) -> Json:
    """A rule: unless ``field`` has the value, ``others`` hold of the other fields."""
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
RULES: dict[str, list[Json]] = {
    "ChatBody": [
        _STREAMED,
        _ONE_FORMAT,
        _only_if("logprobs", True, {"top_logprobs": NULL}),
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
