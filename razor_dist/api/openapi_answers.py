"""JSON Schemas of the answers, for `openapi.json`."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
NULL: Json = {"type": "null"}
_COUNT: Json = {"type": "integer", "minimum": 0}


def some(items: Json) -> Json:
    return {"type": "array", "items": items, "minItems": 1}


def or_null(schema: Json) -> Json:
    return {"anyOf": [schema, NULL]}


def _object(required: Json, **optional: Json) -> Json:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _counts(*names: str) -> Json:
    return dict.fromkeys(names, _COUNT)


def _texts(*names: str) -> Json:
    return dict.fromkeys(names, TEXT)


_LOGPROBS: Json = {"type": ["object", "null"]}
_FINISH: Json = {"enum": ["stop", "length", "repetition", "tool_calls"]}
_USAGE = _object(_counts("prompt_tokens", "completion_tokens", "total_tokens"))
_HEAD: Json = {"id": TEXT, "created": _COUNT, "model": TEXT}
_CALL = _object({"id": TEXT, "type": {"const": "function"}, "function": {"type": "object"}})
_ANSWER_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}},
    tool_calls={"type": "array", "items": _CALL},
)
_STATUS: Json = {"enum": ["completed", "incomplete"]}
_OUTPUT_MESSAGE = _object(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "status": _STATUS,
        "content": some(_object({"type": {"const": "output_text"}, "text": TEXT})),
    }
)
_OUTPUT_CALL = _object(
    {
        "id": TEXT,
        "type": {"const": "function_call"},
        "status": _STATUS,
        **_texts("call_id", "name", "arguments"),
    }
)
_SHARE: Json = {"type": "number", "minimum": 0, "maximum": 1}
_SOURCE = _object(
    {"start": _COUNT, "end": _COUNT, "weight": _SHARE, "text": or_null(TEXT)}, message=_COUNT
)
_FOUND: Json = {
    "sources": {"type": "array", "items": _SOURCE},
    "grounded": or_null(_SHARE),
}
_SENTENCE = _object({"start": _COUNT, "end": _COUNT, **_FOUND})
_SOURCES: Json = {
    **_FOUND,
    "question_match": or_null(_SHARE),
    "sentences": {"type": "array", "items": _SENTENCE},
}
_CITATION = _object(
    {
        "type": {"enum": ["char_location", "page_location", "content_block_location"]},
        "cited_text": TEXT,
        "document_index": _COUNT,
        "document_title": or_null(TEXT),
    },
    **_counts("start_char_index", "end_char_index", "start_page_number", "end_page_number"),
    **_counts("start_block_index", "end_block_index"),
)
_TEXT_BLOCK = _object(
    {
        "type": {"const": "text"},
        "text": TEXT,
        "citations": or_null({"type": "array", "items": _CITATION}),
    }
)
_TOOL_USE_BLOCK = _object(
    {"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": {"type": "object"}}
)
_CONTEXT: Json = _object(
    {
        **{"id": TEXT, "object": {"const": "context"}, "bytes": {"type": "object"}, "begins": TEXT},
        **_counts("tokens", "created_at", "last_used_at", "expires_at", "ttl"),
    }
)


def _completion(kind: str, field: str, content: Json, **optional: Json) -> Json:
    """An answer of choices, whose content is in a field."""
    choice = {"index": _COUNT, field: content, "logprobs": _LOGPROBS, "finish_reason": _FINISH}
    choices = some(_object(choice, stop_reason={"const": "repetition"}, **optional, **_SOURCES))
    return _object({**_HEAD, "object": {"const": kind}, "choices": choices, "usage": _USAGE})


ANSWERS: Json = {
    "Context": _CONTEXT,
    "ContextList": _object(
        {"data": {"type": "array", "items": _CONTEXT}, "limit_bytes": {"type": "integer"}}
    ),
    "ContextMessages": _object(
        {
            "id": TEXT,
            "object": {"const": "context.messages"},
            "messages": {"type": "array", "items": {"type": "object"}},
            "goes_on": {"type": "boolean"},
        }
    ),
    "EndedContext": _object({"id": TEXT, "deleted": {"const": True}}),
    "Error": _object(
        {
            "error": _object(
                {**_texts("message", "type"), "param": or_null(TEXT), "code": or_null(TEXT)}
            )
        }
    ),
    "ChatCompletion": _completion("chat.completion", "message", _ANSWER_MESSAGE),
    "Completion": _completion(
        "text_completion", "text", TEXT, token_ids={"type": "array", "items": _COUNT}
    ),
    "Response": _object(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "model": TEXT,
            "status": _STATUS,
            "output": some({"anyOf": [_OUTPUT_MESSAGE, _OUTPUT_CALL]}),
            "temperature": {"type": "number"},
            "top_p": {"type": "number"},
            "max_output_tokens": or_null(_COUNT),
            "parallel_tool_calls": {"type": "boolean"},
            "tool_choice": {"type": ["string", "object"]},
            "tools": {"type": "array"},
            "usage": _object(_counts("input_tokens", "output_tokens", "total_tokens")),
        }
    ),
    "Message": _object(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": {"type": "array", "items": {"anyOf": [_TEXT_BLOCK, _TOOL_USE_BLOCK]}},
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": or_null(TEXT),
            "usage": _object(
                {
                    **_counts("input_tokens", "output_tokens"),
                    **_counts("cache_creation_input_tokens", "cache_read_input_tokens"),
                }
            ),
        }
    ),
    "TokenCount": _object({"input_tokens": _COUNT}),
    "Tokenized": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": {"type": "array", "items": _COUNT},
            "token_strs": or_null({"type": "array", "items": TEXT}),
        }
    ),
    "Detokenized": _object({"prompt": TEXT}),
    "Model": _object(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": TEXT,
            "root": TEXT,
            "parent": NULL,
            "max_model_len": or_null(_COUNT),
        }
    ),
    "ModelList": _object(
        {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        }
    ),
    "Health": _object({"status": TEXT, "reason": TEXT}),
    "Version": _object({"version": TEXT}),
    "Stats": {"type": "object"},
}


def examples(model: str) -> dict[str, Json]:
    """Return a body for each path that takes JSON, which is answered as it stands."""
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
