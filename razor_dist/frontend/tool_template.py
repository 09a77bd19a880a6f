"""The form in which a chat template takes tools, calls and results, found by rendering some.

A template leaves out what it does not know without an error. GLM-4's, for example, takes tools only
as a field of a message, and results of tools only in the role observation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from razor_dist.config.errors import RequestError

Messages = Sequence[Mapping[str, Any]]
# (messages, tools=...) -> the template's text; `RequestError` if it refuses them.
Render = Callable[..., str]

# Words that no template has by itself.
_TOOL_NAME, _NAME, _ARGUMENT, _RESULT = "zqtoolzq", "zqcalledzq", "zqargumentzq", "zqresultzq"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_IDS = "zqzqzqzq1", "zqzqzqzq2"  # of nine letters, as Mistral's templates want them


class ToolTemplate(NamedTuple):
    """The form in which a chat template takes tools, and which parts of them its text shows."""

    shows_tools: bool = False
    shows_calls: bool = True
    shows_results: bool = True
    takes_several: bool = True  # several calls in one message
    # Tools are a field of the first message instead of an argument of the template.
    tools_in_message: bool = False
    # A call is a message whose ``metadata`` is the tool's name; results have the role observation.
    calls_in_content: bool = False

    def adapted(
        self, messages: Messages, arguments: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return messages and arguments as the template takes them.

        `RequestError` if they have calls or results of tools which the template leaves out.
        """
        arguments, found = dict(arguments), [dict(message) for message in messages]
        if not self.shows_calls and any(message.get("tool_calls") for message in found):
            raise _left_out("calls of tools (tool_calls)", "assistant")
        if not self.shows_results and any(message.get("role") == "tool" for message in found):
            raise _left_out("what tools return (messages whose role is tool)", "user")
        if self.calls_in_content:
            found = [own for message in found for own in _in_content(message)]
        if self.tools_in_message and (tools := arguments.pop("tools", None)):
            found.insert(0, {"role": "system", "content": "", "tools": tools})
        return found, arguments


def _left_out(what: str, role: str) -> RequestError:
    return RequestError(
        f"the model's chat template leaves out {what}: write it into a message of the {role}",
        param="messages",
    )


def _in_content(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message.get("role") == "tool":
        return [{"role": "observation", "content": message.get("content") or ""}]
    calls = message.pop("tool_calls", None) or []
    found = [message] if message.get("content") or not calls else []
    for call in calls:
        function = call["function"]
        text = arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            text = json.dumps(arguments, ensure_ascii=False)
        found.append({"role": "assistant", "metadata": function["name"], "content": text})
    return found


def tool_template(render: Render) -> ToolTemplate:
    """Return the form in which the template behind ``render`` takes tools."""

    def text_of(form: ToolTemplate, messages: Messages) -> str | None:
        adapted, arguments = form.adapted(messages, {"tools": [_TOOL]} if form.shows_tools else {})
        try:
            return render(adapted, **arguments)
        except RequestError:
            return None

    forms = [ToolTemplate(shows_tools=True, tools_in_message=inside) for inside in (False, True)]
    asked = _history(0)
    for messages in (asked, [{"role": "system", "content": "a"}, *asked]):
        shown = [form for form in forms if _TOOL_NAME in (text_of(form, messages) or "")]
        if shown:
            break
    form = shown[0] if shown else ToolTemplate()
    plain = text_of(form, _history(1))
    if plain is None:  # refused, as a request with calls will be, in the template's own words
        return form
    has_call, has_result = _NAME in plain or _ARGUMENT in plain, _RESULT in plain
    if not (has_call and has_result):
        in_content = form._replace(calls_in_content=True)
        text = text_of(in_content, _history(1)) or ""
        if all(part in text for part in (_NAME, _ARGUMENT, _RESULT)):
            return in_content
    several = text_of(form, _history(2)) is not None
    return form._replace(
        shows_calls=has_call, shows_results=has_result, takes_several=several or not has_call
    )


def _history(calls: int) -> Messages:
    """Return a question, and ``calls`` calls of the tool with their results."""
    function = {"name": _NAME, "arguments": {"city": _ARGUMENT}}
    called = [{"id": id_, "type": "function", "function": function} for id_ in _IDS[:calls]]
    results = [{"role": "tool", "tool_call_id": i, "content": _RESULT} for i in _IDS[:calls]]
    asked = {"role": "user", "content": "a"}
    if not calls:
        return [asked]
    return [asked, {"role": "assistant", "content": "", "tool_calls": called}, *results]
