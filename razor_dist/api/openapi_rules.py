"""Rules in JSON Schema for fields of a request that exclude or need other fields."""

from __future__ import annotations

from typing import Any

from razor_dist.api.openapi_answers import Json, or_null, schema_of


def _unless(field: str, value: Any, others: Json) -> Json:
    """Return a rule: unless ``field`` has the value, the request has the shape ``others``."""
    return {"if": schema_of({field: value}), "else": schema_of(others)}


_STREAMED = _unless("stream", True, {"stream_options?": None, "return_progress?": (None, False)})
_ONE_FORMAT = {
    "if": schema_of({"structured_outputs": dict}),
    "then": schema_of({"response_format?": (None, {"type": "text"})}),
}
_SPEAKERS = ("system", "developer", "user", "assistant")
_SAYS = {"content": (str, list), "tool_calls?": (None, [])}
# By the name of the schema to which they belong.
RULES: dict[str, list[Json]] = {
    "ChatMessage": [
        schema_of(
            (
                {"role": _SPEAKERS, "tool_call_id?": None, **_SAYS},
                {"role": "assistant", "tool_call_id?": None, "tool_calls": [dict, ...]},
                {"role": "tool", "tool_call_id": str, **_SAYS},
            )
        )
    ],
    "ResponseFormat": [
        schema_of(
            (
                {"type": ("text", "json_object"), "json_schema?": None},
                {"type": "json_schema", "json_schema": dict},
            )
        )
    ],
    "ChatBody": [
        _STREAMED,
        _ONE_FORMAT,
        _unless("logprobs", True, {"top_logprobs?": (None, 0)}),
        schema_of(({"max_tokens?": None}, {"max_completion_tokens?": None})),
    ],
    "CompletionBody": [
        _STREAMED,
        _ONE_FORMAT,
        {
            "if": schema_of({"echo": True}),
            "else": {"properties": {"max_tokens": or_null({"type": "integer", "minimum": 1})}},
        },
    ],
    "TokenizeBody": [
        schema_of(
            (
                {
                    "prompt": str,
                    "messages?": None,
                    "tools?": None,
                    "add_generation_prompt?": None,
                    "continue_final_message?": None,
                    "chat_template_kwargs?": None,
                },
                {"messages": list, "prompt?": None, "add_special_tokens?": None},
            )
        )
    ],
}
