"""Calls of tools: which format a model family writes them in, and what an answer says."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import RequestError
from razor_dist.engine.structured_outputs import StructuredOutputsParams
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.detokenizer import StopMatcher


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON

    def message(self, short_id: bool) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        own = uuid.uuid4().hex
        name = own[:9] if short_id else f"call_{own[:24]}"
        return {"id": name, "type": "function", "function": function}


class ToolUse(NamedTuple):
    """How a request's answers may call tools: a name of `_FORMATS`, and the tools' names."""

    format: str
    names: list[str]


@dataclass(frozen=True)
class _Format:
    """A way to write calls.

    ``marker`` is what begins them; without one, ``may_begin`` tells of the text so far whether it
    is one, ``None`` while that is open. ``parse`` returns the calls in the text behind the marker,
    none if it holds anything else. ``known_by`` are parts of the templates of models that write so.
    """

    parse: Callable[[str, Sequence[str]], list[ToolCall]]
    marker: str = ""
    may_begin: Callable[[str, Sequence[str]], bool | None] = lambda text, names: True
    known_by: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


def _values(text: str, separators: str) -> list[Any]:
    """Return the JSON values of a text, [] if it holds more than them and ``separators``."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] in separators:
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found.append(value)
    return found


def _calls(values: Sequence[Any], key: str) -> list[ToolCall]:
    found = []
    for value in values:
        if not (isinstance(value, Mapping) and isinstance(value.get("name"), str)):
            return []
        arguments = value.get(key, {})
        # Some models write the arguments as a string that holds JSON.
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found.append(ToolCall(value["name"], text))
    return found


def _hermes(text: str, names: Sequence[str]) -> list[ToolCall]:
    parts = text.replace("</tool_call>", "").split("<tool_call>")
    return _calls([value for part in parts for value in _values(part, " \n")], "arguments")


def _mistral(text: str, names: Sequence[str]) -> list[ToolCall]:
    values = _values(text, " \n")
    flat = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    return _calls(flat, "arguments")


def _llama(text: str, names: Sequence[str]) -> list[ToolCall]:
    calls = _calls(_values(text.removeprefix("<|python_tag|>"), " \n;"), "parameters")
    return calls if all(call.name in names for call in calls) else []


def _glm(text: str, names: Sequence[str]) -> list[ToolCall]:
    name, _, arguments = text.strip().partition("\n")
    values = _values(arguments, " \n")
    if name.strip() not in names or len(values) != 1 or not isinstance(values[0], Mapping):
        return []
    return [ToolCall(name.strip(), json.dumps(values[0]))]


def _begins_line(text: str, names: Sequence[str]) -> bool | None:
    line, feed, _ = text.lstrip().partition("\n")
    if feed:
        return line.strip() in names
    return None if any(name.startswith(line) for name in names) else False


def _begins_with(starts: Sequence[str], text: str, names: Sequence[str]) -> bool | None:
    text = text.lstrip()
    if any(text.startswith(start) for start in starts):
        return True
    return None if any(start.startswith(text) for start in starts) else False


def _required(text: str, names: Sequence[str]) -> list[ToolCall]:
    values = _values(text, " \n")
    return _calls(values[0], "parameters") if len(values) == 1 else []


def _named(text: str, names: Sequence[str]) -> list[ToolCall]:
    return [ToolCall(names[0], text)]


_FORMATS = {
    # Qwen 2.5 and 3, Hermes, SmolLM 3.
    "hermes": _Format(
        _hermes,
        "<tool_call>",
        known_by=("<tool_call>", "arguments"),
        unless=("<function=", "<arg_key>"),
    ),
    "mistral": _Format(_mistral, "[TOOL_CALLS]", known_by=("[TOOL_CALLS]",)),
    # Llama 3.1 to 3.3.
    "llama": _Format(
        _llama,
        may_begin=partial(_begins_with, ("<|python_tag|>", '{"name"')),
        known_by=("<|eot_id|>", "parameters"),
    ),
    # GLM 4.
    "glm": _Format(
        _glm, may_begin=_begins_line, known_by=("<|observation|>", "[gMASK]"), unless=("<arg_key>",)
    ),
    # What `forced` makes models write.
    "required": _Format(_required),
    "named": _Format(_named),
}
# Mistral's templates refuse ids of calls that have not nine letters.
_SHORT_IDS = frozenset({"mistral"})


def _template(tokenizer: PreTrainedTokenizerBase | None) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def knows_tools(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Tell if a model's chat template can describe tools to it."""
    return "tools" in _template(tokenizer)


def tool_use(
    tokenizer: PreTrainedTokenizerBase | None, names: Sequence[str], choice: str | None
) -> ToolUse:
    """Return how the model calls these tools; ``choice`` is a tool's name, "required" or None.

    Raises `RequestError` if its chat template knows no tools, or their format is not known here.
    """
    template = _template(tokenizer)
    if not knows_tools(tokenizer):
        raise RequestError("the model's chat template knows no tools", param="tools")
    if choice == "required":
        return ToolUse(choice, list(names))
    if choice is not None:
        return ToolUse("named", [choice])
    for name, form in _FORMATS.items():
        knows = form.known_by and all(part in template for part in form.known_by)
        if knows and not any(part in template for part in form.unless):
            return ToolUse(name, list(names))
    known = ", ".join(name for name, form in _FORMATS.items() if form.known_by)
    raise RequestError(
        "the model's chat template writes calls of tools in a format that is not known here (known "
        f"are those of {known}); tool_choice may be a tool's name or 'required'",
        param="tools",
    )


def forced(tools: Mapping[str, Mapping[str, Any]], choice: str) -> StructuredOutputsParams:
    """Return what an answer must match that calls ``choice``, or "required": any of the tools.

    ``tools`` have the schema of each one's parameters. As in vLLM, the answer is then the arguments
    alone, or a list of ``{"name", "parameters"}``.
    """
    if choice != "required":
        return StructuredOutputsParams(json=dict(tools[choice]))
    # References begin at the root of a schema.
    definitions: dict[str, Any] = {}
    own = {name: dict(schema) for name, schema in tools.items()}
    for schema in own.values():
        for name, definition in schema.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise RequestError(f"two tools define {name!r:.80} differently", param="tools")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in own.items()
    ]
    array = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return StructuredOutputsParams(json=array)


class ToolParser:
    """Splits one answer, piece by piece, into its text and the calls at its end."""

    def __init__(self, use: ToolUse, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._form, self._names = _FORMATS[use.format], use.names
        self._short_ids = use.format in _SHORT_IDS
        self._matcher = StopMatcher([self._form.marker] if self._form.marker else [])
        self._held = ""
        self._calling: bool | None = None
        # Tokens that the text leaves out, since they are special.
        self._markers: dict[int, str] = {}
        for marker in (self._form.marker, "<|python_tag|>"):
            token = None if tokenizer is None else tokenizer.get_vocab().get(marker)
            if token is not None and marker:
                self._markers[token] = marker
        self.finish_reason = "stop" if use.format == "named" else "tool_calls"

    def push(self, piece: TextPiece) -> str:
        """Add a piece; return the text that is certainly no call."""
        marker = self._markers.get(piece.token, "")
        text = piece.text if marker in piece.text else marker + piece.text
        if self._calling:
            self._held += text
            return ""
        if self._form.marker:
            text, found = self._matcher.push(text)
            if found is not None:
                self._calling, self._held = True, self._matcher.rest
            return text
        if self._calling is None:
            self._held += text
            self._calling = self._form.may_begin(self._held, self._names)
            if self._calling is not False:
                return ""
            text, self._held = self._held, ""
        return text

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text, and the calls; what cannot be read as calls is text."""
        rest = self._matcher.flush()
        calls = self._form.parse(self._held, self._names) if self._held.strip() else []
        if not calls:
            return rest + (self._form.marker if self._calling else "") + self._held, []
        return rest, [call.message(self._short_ids) for call in calls]
