"""What a chat template makes of tools and their results, found by rendering some.

A template raises no error for what it leaves out: GLM-4's knows tools only as a field of a message,
and results of tools only in a role of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from razor_dist.config.errors import RequestError

Messages = Sequence[Mapping[str, Any]]
# A template's text of messages, with tools if there are any; `RequestError` if it refuses them.
Render = Callable[..., str]

_NAME, _ARGUMENT, _RESULT = "zqnamezq", "zqargumentzq", "zqresultzq"  # in no template
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_IDS = "zqzqzqzq1", "zqzqzqzq2"  # of nine letters, as Mistral's templates want them


class ToolTemplate(NamedTuple):
    """How a template takes tools, and what of them is in its text."""

    shows_tools: bool = False
    shows_results: bool = True
    takes_several: bool = True  # calls in one message
    tools_in_message: bool = False  # the first one, as a field, and not beside the messages
    calls_in_content: bool = False  # each in a message with `metadata`; results are observations

    def adapted(
        self, messages: Messages, arguments: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return messages and arguments as the template takes them.

        `RequestError` if they have results of tools and it leaves these out.
        """
        arguments, found = dict(arguments), [dict(message) for message in messages]
        if not self.shows_results and any(message.get("role") == "tool" for message in found):
            raise RequestError(
                "the model's chat template leaves out what tools return (messages whose role is "
                "tool); put it into a message of the user",
                param="messages",
            )
        if self.calls_in_content:
            found = [own for message in found for own in _in_content(message)]
        if self.tools_in_message and (tools := arguments.pop("tools", None)):
            found.insert(0, {"role": "system", "content": "", "tools": tools})
        return found, arguments


def _in_content(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message.get("role") == "tool":
        return [{"role": "observation", "content": message["content"]}]
    calls = message.pop("tool_calls", None) or []
    found = [message] if message.get("content") or not calls else []
    for call in calls:
        text = arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            text = json.dumps(arguments, ensure_ascii=False)
        name = call["function"]["name"]
        found.append({"role": "assistant", "metadata": name, "content": text})
    return found


def tool_template(render: Render) -> ToolTemplate:
    """Return what the template behind ``render`` makes of tools."""

    def text_of(form: ToolTemplate, messages: Messages, **given: Any) -> str | None:
        adapted, arguments = form.adapted(messages, given)
        try:
            return render(adapted, **arguments)
        except RequestError:
            return None

    forms = [ToolTemplate(shows_tools=True, tools_in_message=inside) for inside in (False, True)]
    asked = _history(0)
    shown = [form for form in forms if _NAME in (text_of(form, asked, tools=[_TOOL]) or "")]
    form = shown[0] if shown else ToolTemplate()
    plain = text_of(form, _history(1))
    if plain is None:  # says so itself where it matters
        return form
    if _RESULT not in plain or _ARGUMENT not in plain:
        in_content = form._replace(calls_in_content=True)
        text = text_of(in_content, _history(1)) or ""
        if all(part in text for part in (_NAME, _ARGUMENT, _RESULT)):
            return in_content
    several = text_of(form, _history(2)) is not None
    return form._replace(shows_results=_RESULT in plain, takes_several=several)


def _history(calls: int) -> Messages:
    """Return a question, and with ``calls`` of the tool their results."""
    function = {"name": _NAME, "arguments": {"text": _ARGUMENT}}
    called = [{"id": id_, "type": "function", "function": function} for id_ in _IDS[:calls]]
    results = [{"role": "tool", "tool_call_id": i, "content": _RESULT} for i in _IDS[:calls]]
    asked = {"role": "user", "content": "a"}
    if not calls:
        return [asked]
    return [asked, {"role": "assistant", "content": "", "tool_calls": called}, *results]
