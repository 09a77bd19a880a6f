"""Constraints on answers that must call tools (`forced`), or may where they are not JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.api.fields import renamed
from razor_dist.api.tools import ToolUse
from razor_dist.config.errors import RequestError
from razor_dist.protocol.structured_outputs import StructuredOutputsParams
from razor_dist.protocol.vocabulary import FIELD


def or_calls(
    answer: StructuredOutputsParams,
    use: ToolUse,
    tokenizer: PreTrainedTokenizerBase | None,
    field: str,
) -> StructuredOutputsParams:
    """Return the constraint on an answer that calls tools, or else matches the JSON of ``answer``.

    Arguments are any object, as in calls without such a constraint: tools' schemas may have
    keywords that llguidance does not know. Raises `RequestError`, which names ``field``, for the
    formats of Mistral and GLM.
    """
    if use.format not in ("hermes", "llama"):
        raise RequestError(
            f"{field} keeps this model from calling tools, by the format of its calls: leave one "
            "of them out, or set tool_choice to 'none', 'required' or a tool",
            param=field,
        )
    with renamed({FIELD: field}):
        answer.check()  # the bounds of schemas, which are not looked for in a grammar
    arguments = "arguments" if use.format == "hermes" else "parameters"
    called: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"enum": use.names}, arguments: {"type": "object"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }
    calls = call = "object"
    if use.format == "hermes":
        begin, end = (_token(text, tokenizer) for text in ("<tool_call>", "</tool_call>"))
        call = f'{begin} "\\n" object "\\n" {end}'
        calls = 'call ("\\n" call)*' if use.parallel else "call"
    rules = {
        "start": f"answer | {calls}",
        "answer": answer.in_lark(),
        "call": call,
        "object": StructuredOutputsParams(json=called).in_lark(),
    }
    return StructuredOutputsParams(grammar="\n".join(f"{n}: {rule}" for n, rule in rules.items()))


def _token(text: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the rule for a text or the token of its own that stands for it.

    Such a token, like ``<tool_call>``, is no text to llguidance, whether it is special or not.
    """
    token = None if tokenizer is None else tokenizer.added_tokens_encoder.get(text)
    return f'"{text}"' if token is None else f'(<[{token}]> | "{text}")'


def forced(
    tools: Mapping[str, Mapping[str, Any]], choice: str, parallel: bool = True
) -> StructuredOutputsParams:
    """Return the constraint on an answer that must call ``choice``, or any tool if "required".

    ``tools`` are JSON Schemas of arguments by the tools' names. As in vLLM, the answer is the
    arguments of the chosen tool, or a list of ``{"name", "parameters"}``.
    """
    if choice != "required":
        return StructuredOutputsParams(json=dict(tools[choice]))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": _place(name)}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in tools
    ]
    own = {name: _moved(schema, _place(name)) for name, schema in tools.items()}
    array = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": own}
    return StructuredOutputsParams(json=array if parallel else array | {"maxItems": 1})


def _place(name: str) -> str:
    return f"#/$defs/{name}"


# Keywords of JSON Schema that hold values, and those that hold schemas by name.
_VALUES = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def _moved(schema: Any, place: str) -> Any:
    """Return a schema with its references, which begin at its root, for another ``place``."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, part in schema.items():
        if key in _BY_NAME and isinstance(part, Mapping):
            moved[key] = {name: _moved(each, place) for name, each in part.items()}
        else:
            moved[key] = part if key in _VALUES else _moved(part, place)
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = place + target[1:]
    return moved
