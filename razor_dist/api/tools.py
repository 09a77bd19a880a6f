"""Calls of tools: the format of each model family, and the calls in an answer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from razor_dist.api.annotations import SentencePlaces
from razor_dist.api.strict_json import STRICT_JSON, check_characters
from razor_dist.config.errors import RequestError
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.detokenizer import StopMatcher, token_texts
from razor_dist.frontend.prompts import PromptEncoder


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON

    def message(self, short_id: bool) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        own = uuid.uuid4().hex
        name = own[:9] if short_id else f"call_{own[:24]}"
        return {"id": name, "type": "function", "function": function}


class ToolUse(NamedTuple):
    """The calls of tools that a request allows: a key of `_FORMATS`, and the tools' names."""

    format: str
    names: list[str]
    parallel: bool = True  # an answer may have more than one call

    @property
    def is_free(self) -> bool:
        """True if the model may also answer without a call."""
        return self.format not in ("required", "named")


# Calls, and the text behind the marker that belongs to no call.
Found = tuple[list[ToolCall], str]


@dataclass(frozen=True)
class _Format:
    """A format of calls.

    ``marker`` begins the calls. Without a marker ``may_begin`` says of an answer's text so far
    whether it begins a call, or None if that is open. ``parse`` reads the text behind the marker.
    A model whose chat template has all parts in ``known_by``, and none in ``unless``, uses the
    format.
    """

    parse: Callable[[str, Sequence[str]], Found]
    marker: str = ""
    may_begin: Callable[[str, Sequence[str]], bool | None] = lambda text, names: True
    known_by: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


_DECODER = json.JSONDecoder(**STRICT_JSON)
_BLANKS = re.compile(r"[ \t\n\r]*")  # JSON's
_HERMES, _HERMES_END = "<tool_call>", re.compile(r"\s*</tool_call>")
_MISTRAL = "[TOOL_CALLS]"
# Since version 11 of its tokenizer, Mistral's calls are a name and the arguments.
_MISTRAL_NAME = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]")


def _value(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON value at a character of a text and its end; None if there is none."""
    blanks = _BLANKS.match(text, at)
    assert blanks is not None
    try:
        value, end = _DECODER.raw_decode(text, blanks.end())
        check_characters(text[at:end], value)
    except (ValueError, RecursionError):
        return None
    return value, end


def _values(text: str, separators: str) -> list[Any]:
    """Return the JSON values of a text; [] if there is anything but them and ``separators``."""
    found, at = [], 0
    while at < len(text):
        if text[at] in separators:
            at += 1
            continue
        value = _value(text, at)
        if value is None:
            return []
        found.append(value[0])
        at = value[1]
    return found


def _call(name: object, arguments: object) -> ToolCall | None:
    """Return the call; None unless the arguments are an object or, as of some models, its JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    values = _values(text, " \n")
    if not isinstance(name, str) or len(values) != 1 or not isinstance(values[0], Mapping):
        return None
    return ToolCall(name, text)


def _calls(values: Sequence[Any], *keys: str) -> list[ToolCall]:
    """Return values as calls, whose arguments are at one of the keys; [] if one is no call."""
    found = []
    for value in values:
        if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
            value = value["function"]
        given = [value[key] for key in keys if key in value] if isinstance(value, Mapping) else []
        call = _call(value.get("name"), given[0]) if given else None
        if call is None:
            return []
        found.append(call)
    return found


def _hermes(text: str, names: Sequence[str]) -> Found:
    calls: list[ToolCall] = []
    unread, text, at = "", _HERMES + text, 0
    while (begin := text.find(_HERMES, at)) >= 0:
        unread += text[at:begin].lstrip() if calls else text[at:begin]
        at = begin + len(_HERMES)
        before = len(calls)
        while (value := _value(text, at)) and (found := _calls([value[0]], "arguments")):
            calls += found
            at = value[1]
        if len(calls) == before:
            unread += _HERMES
        elif end := _HERMES_END.match(text, at):
            at = end.end()
    return calls, unread + (text[at:].lstrip() if calls and not unread else text[at:])


def _mistral(text: str, names: Sequence[str]) -> Found:
    if not _MISTRAL_NAME.match(text):
        values = _values(text, " \n")
        flat = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        return _calls(flat, "arguments"), ""
    calls: list[ToolCall] = []
    at = 0
    while name := _MISTRAL_NAME.match(text, at):
        value = _value(text, name.end())
        call = None if value is None else _call(name[1], value[0])
        if value is None or call is None:
            break
        calls.append(call)
        at = value[1]
    return calls, text[at:].lstrip()


def _llama(text: str, names: Sequence[str]) -> Found:
    values = _values(text.strip().removeprefix("<|python_tag|>"), " \n;")
    calls = _calls(values, "parameters", "arguments")
    return (calls if all(call.name in names for call in calls) else []), ""


def _glm(text: str, names: Sequence[str]) -> Found:
    name, _, arguments = text.strip().partition("\n")
    call = _call(name.strip(), arguments)
    return ([call] if call and call.name in names else []), ""


def _begins_line(text: str, names: Sequence[str]) -> bool | None:
    line, feed, _ = text.lstrip().partition("\n")
    if feed:
        return line.strip() in names
    return None if any(name.startswith(line) for name in names) else False


def _begins_with(starts: Sequence[str], text: str, names: Sequence[str]) -> bool | None:
    text = "".join(text.split())
    if any(text.startswith(start) for start in starts):
        return True
    return None if any(start.startswith(text) for start in starts) else False


def _required(text: str, names: Sequence[str]) -> Found:
    values = _values(text, " \n")
    return (_calls(values[0], "parameters") if len(values) == 1 else []), ""


def _named(text: str, names: Sequence[str]) -> Found:
    # A call that was cut is no JSON.
    return ([ToolCall(names[0], text)] if _values(text, " \n") else []), ""


_FORMATS = {
    # Qwen 2.5 and 3, Hermes, SmolLM 3.
    "hermes": _Format(
        _hermes,
        _HERMES,
        known_by=("<tool_call>", "arguments"),
        unless=("<function=", "<arg_key>"),
    ),
    "mistral": _Format(_mistral, _MISTRAL, known_by=(_MISTRAL,)),
    # Llama 3.1 to 3.3.
    "llama": _Format(
        _llama,
        may_begin=partial(_begins_with, ("<|python_tag|>", '{"name"', '{"type":"function"')),
        known_by=("<|eot_id|>", "parameters"),
    ),
    # GLM 4.
    "glm": _Format(_glm, may_begin=_begins_line, known_by=("[gMASK]",), unless=("<arg_key>",)),
    # What `forced` makes models write.
    "required": _Format(_required),
    "named": _Format(_named),
}


def _template(tokenizer: PreTrainedTokenizerBase | None) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def tool_use(
    encoder: PromptEncoder,
    names: Sequence[str],
    choice: str | None,
    parallel: bool = True,
) -> ToolUse:
    """Return the calls that an answer may have; ``choice`` is a tool's name, "required" or None.

    Raises `RequestError` if the model's chat template knows no tools, or writes their calls in no
    format of `_FORMATS`.
    """
    template = _template(encoder.tokenizer)
    if not encoder.tools.shows_tools:
        raise RequestError("the model's chat template knows no tools", param="tools")
    if choice == "required":
        return ToolUse(choice, list(names), parallel)
    if choice is not None:
        return ToolUse("named", [choice], parallel)
    for name, form in _FORMATS.items():
        knows = form.known_by and all(part in template for part in form.known_by)
        if knows and not any(part in template for part in form.unless):
            return ToolUse(name, list(names), parallel)
    known = ", ".join(name for name, form in _FORMATS.items() if form.known_by)
    raise RequestError(
        "the model's chat template writes calls of tools in a format that is not known here (known "
        f"are those of {known}); tool_choice may be a tool's name or 'required'",
        param="tools",
    )


class ToolParser:
    """Splits one answer, piece by piece, into its text and the calls at its end."""

    def __init__(
        self,
        use: ToolUse,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        skip_special: bool = True,
    ) -> None:
        self._form, self._names = _FORMATS[use.format], use.names
        self._most = None if use.parallel else 1
        # Mistral's templates refuse ids of calls that have not nine letters and digits.
        self._short_ids = use.format == "mistral" or _MISTRAL in _template(tokenizer)
        self._matcher = StopMatcher([self._form.marker] if self._form.marker else [])
        self._held = ""
        self._calling: bool | None = None
        # Characters of the answer so far, and of the text that `read` has returned of it.
        self._length = self._text_length = 0
        self._is_plain = True  # False once a special token is in the text
        self._places = SentencePlaces()
        # Texts of the special tokens that the answer's text leaves out and a format needs.
        self._markers: dict[int, str] = {}
        if tokenizer is not None and skip_special:
            markers = {self._form.marker, "<|python_tag|>", "[ARGS]", "[CALL_ID]"}
            special = token_texts(tokenizer).special
            self._markers = {token: text for token, text in special.items() if text in markers}
        self._finish_reason = "stop" if use.format == "named" else "tool_calls"

    def read(self, piece: TextPiece) -> tuple[TextPiece, list[dict[str, Any]]]:
        """Return the next piece with the text that is in no call, and behind the last the calls.

        The piece has the sentences that are now in the text, and ends with a reason that says
        whether there are calls. Text that cannot be read as calls is text.
        """
        text, calls, finish = self._push(piece), list[dict[str, Any]](), piece.finish_reason
        if finish:
            rest, calls, finish = self._end(finish)
            text += rest
        self._text_length += len(text)
        sentences = self._places.kept(piece.sentences, self._text_length)
        return replace(piece, text=text, finish_reason=finish, sentences=sentences), calls

    def _push(self, piece: TextPiece) -> str:
        """Add a piece; return the text that cannot belong to a call."""
        text = piece.text
        self._length += len(text)
        if marker := self._markers.get(piece.token):
            text, self._is_plain = text + marker, False
            self._places.differ(self._length)
        if self._calling:
            self._held += text
            return ""
        if self._form.marker:
            text, found = self._matcher.push(text)
            if found is not None:
                self._calling, self._held = True, self._matcher.rest
                if self._is_plain:  # else answer and text differ before the marker
                    self._places.differ(self._length - len(self._form.marker + self._held))
            return text
        if self._calling is None:
            self._held += text
            self._calling = self._form.may_begin(self._held, self._names)
            if self._calling:
                self._places.differ(0)
            if self._calling is not False:
                return ""
            text, self._held = self._held, ""
        return text

    def _end(self, finish: str) -> tuple[str, list[dict[str, Any]], str]:
        """Return the rest of the text, the calls, and the reason for the end of the answer."""
        rest = self._matcher.flush()
        calls, unread = self._form.parse(self._held, self._names)
        self._places.end(alike=not calls and self._is_plain)
        if not calls:
            return rest + (self._form.marker if self._calling else "") + self._held, [], finish
        cut = unread and finish != "stop"
        reason = finish if cut else self._finish_reason
        messages = [call.message(self._short_ids) for call in calls[: self._most]]
        return rest + unread, messages, reason
