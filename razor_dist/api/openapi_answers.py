"""JSON Schemas of the answers, for `openapi.json`."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
NULL: Json = {"type": "null"}


def some(items: Json) -> Json:
    return {"type": "array", "items": items, "minItems": 1}


def or_null(schema: Json) -> Json:
    return {"anyOf": [schema, NULL]}


class _Share(float):
    """A number from 0 to 1."""


_TYPES: dict[Any, Json] = {
    None: NULL,
    bool: {"type": "boolean"},
    dict: {"type": "object"},
    float: {"type": "number"},
    int: {"type": "integer", "minimum": 0},
    list: {"type": "array"},
    str: TEXT,
    _Share: {"type": "number", "minimum": 0, "maximum": 1},
}


def schema_of(shape: Any) -> Json:
    """Return the JSON Schema of a shape, which is written as the value itself is.

    A shape is a type, a constant, or a tuple of alternatives. A list holds the shape of all its
    items, with an ellipsis behind it if there is at least one, or nothing for an empty list. An
    object has a shape for each key; a key that ends with a question mark is optional.
    """
    if isinstance(shape, dict):
        required = [key for key in shape if not key.endswith("?")]
        properties = {key.removesuffix("?"): schema_of(value) for key, value in shape.items()}
        return {"type": "object", "properties": properties, "required": required}
    if isinstance(shape, list) and shape:
        items, *more = shape
        return some(schema_of(items)) if more else {"type": "array", "items": schema_of(items)}
    if isinstance(shape, tuple):
        words = all(isinstance(one, str) for one in shape)
        return {"enum": [*shape]} if words else {"anyOf": [schema_of(one) for one in shape]}
    return {"const": []} if shape == [] else _TYPES.get(shape, {"const": shape})


_SOURCE = {"start": int, "end": int, "weight": _Share, "text": (str, None), "message?": int}
_SENTENCE = {"start": int, "end": int, "sources": [_SOURCE], "grounded": (_Share, None)}
_CONTEXT_NAME = {"id": str, "tokens": int, "expires_at": int}
_CONTEXT = {
    **_CONTEXT_NAME,
    "object": "context",
    "begins": str,
    "created_at": int,
    "last_used_at": int,
    "ttl": int,
    "bytes": dict,
}
_URL_CITATION = {"start_index": int, "end_index": int, "title": str, "url": str}
_FUNCTION = {"name": str, "arguments": str}
_ANSWER_MESSAGE = {
    "role": "assistant",
    "content": (str, None),
    "tool_calls?": [{"id": str, "type": "function", "function": _FUNCTION}],
    "annotations?": [{"type": "url_citation", "url_citation": _URL_CITATION}],
}
_USAGE = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int},
    "completion_tokens_details?": {
        "accepted_prediction_tokens": int,
        "rejected_prediction_tokens": int,
    },
}
_STATUS = ("completed", "incomplete")
_PART = {
    "type": "output_text",
    "text": str,
    "annotations": [{"type": "url_citation", **_URL_CITATION}],
    "logprobs": list,
}
_OUTPUT_MESSAGE = {
    "id": str,
    "type": "message",
    "role": "assistant",
    "status": _STATUS,
    "content": [_PART, ...],
}
_CALL = {"id": str, "status": _STATUS, "call_id": str, "namespace?": str}
_OUTPUT_CALL = {"type": "function_call", **_CALL, **_FUNCTION}
_OUTPUT_TEXT_CALL = {"type": "custom_tool_call", **_CALL, "name": str, "input": str}
_CITED = {"cited_text": str, "document_index": int, "document_title": (str, None)}
_CITATION = (
    {"type": "char_location", **_CITED, "start_char_index": int, "end_char_index": int},
    {"type": "page_location", **_CITED, "start_page_number": int, "end_page_number": int},
    {"type": "content_block_location", **_CITED, "start_block_index": int, "end_block_index": int},
)
_TEXT_BLOCK = {"type": "text", "text": str, "citations": ([_CITATION], None)}
_TOOL_USE_BLOCK = {"type": "tool_use", "id": str, "name": str, "input": dict}
_MODEL = {
    "id": str,
    "object": "model",
    "created": int,
    "owned_by": str,
    "root": str,
    "parent": None,
    "max_model_len": (int, None),
}


def _completion(kind: str, content: Json) -> Json:
    """Return the shape of an answer whose choices have this content."""
    choice = {
        "index": int,
        **content,
        "logprobs": (dict, None),
        "finish_reason": ("stop", "length", "repetition", "tool_calls"),
        "stop_reason?": "repetition",
        "sources?": [_SOURCE],
        "grounded?": (_Share, None),
        "question_match?": (_Share, None),
        "sentences?": [_SENTENCE],
    }
    return {
        "id": str,
        "created": int,
        "model": str,
        "object": kind,
        "choices": [choice, ...],
        "usage": _USAGE,
        "contexts?": [_CONTEXT_NAME],
    }


_SHAPES: Json = {
    "Context": _CONTEXT,
    "ContextList": {"object": "list", "data": [_CONTEXT], "limit_bytes": int},
    "ContextMessages": {
        "id": str,
        "object": "context.messages",
        "messages": [dict],
        "goes_on": bool,
    },
    "EndedContext": {"id": str, "object": "context", "deleted": True},
    "Error": {
        "type?": "error",  # of /v1/messages
        "error": {"message": str, "type": str, "param": (str, None), "code": (str, None)},
    },
    "ChatCompletion": _completion("chat.completion", {"message": _ANSWER_MESSAGE}),
    "Completion": _completion("text_completion", {"text": str, "token_ids?": [int]}),
    "Response": {
        "id": str,
        "model": str,
        "object": "response",
        "created_at": int,
        "status": _STATUS,
        "error": None,
        "incomplete_details": ({"reason": str}, None),
        "output": [(_OUTPUT_MESSAGE, _OUTPUT_CALL, _OUTPUT_TEXT_CALL), ...],
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": {
            "input_tokens": int,
            "input_tokens_details": {"cached_tokens": int, "cache_write_tokens": int},
            "output_tokens": int,
            "output_tokens_details": {"reasoning_tokens": int},
            "total_tokens": int,
        },
        "instructions": (str, None),
        "max_output_tokens": (int, None),
        "metadata": dict,
        "reasoning": {"effort": (str, None), "summary": (str, None)},
        "parallel_tool_calls": bool,
        "temperature": float,
        "top_p": float,
        "text": dict,
        "tool_choice": (str, dict),
        "tools": list,
        "user": (str, None),
        "contexts?": [_CONTEXT_NAME],
    },
    "Message": {
        "id": str,
        "type": "message",
        "role": "assistant",
        "model": str,
        "content": [(_TEXT_BLOCK, _TOOL_USE_BLOCK)],
        "stop_reason": ("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": (str, None),
        "usage": {
            "input_tokens": int,
            "cache_creation_input_tokens": int,
            "cache_read_input_tokens": int,
            "output_tokens": int,
        },
        "contexts?": [_CONTEXT_NAME],
    },
    "TokenCount": {"input_tokens": int},
    "Tokenized": {"count": int, "max_model_len": int, "tokens": [int], "token_strs": ([str], None)},
    "Detokenized": {"prompt": str},
    "Model": _MODEL,
    "ModelList": {"object": "list", "data": [_MODEL]},
    "Health": {"status": str, "reason": str},
    "Version": {"version": str},
    "Stats": dict,
}
ANSWERS: Json = {name: schema_of(shape) for name, shape in _SHAPES.items()}


def examples(model: str) -> dict[str, Json]:
    """Return an example of a body for each path that takes JSON."""
    question = "What is a lighthouse for? Answer in one sentence."
    return {
        "/v1/chat/completions": {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 64,
            "temperature": 0,
        },
        "/v1/completions": {"model": model, "prompt": "A lighthouse is", "max_tokens": 32},
        "/v1/responses": {"model": model, "input": question, "max_output_tokens": 64},
        "/v1/messages": {
            "model": model,
            "max_tokens": 64,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "title": "letter",
                            "source": {
                                "type": "text",
                                "media_type": "text/plain",
                                "data": "The code of the castle is 48213. The grass is green.",
                            },
                            "citations": {"enabled": True},
                        },
                        {"type": "text", "text": "What is the code of the castle?"},
                    ],
                }
            ],
        },
        "/v1/messages/count_tokens": {
            "model": model,
            "messages": [{"role": "user", "content": question}],
        },
        "/tokenize": {"model": model, "prompt": "A lighthouse is"},
        "/detokenize": {"model": model, "tokens": [1, 2, 3]},
    }
