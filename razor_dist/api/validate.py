"""A body's fields, checked by pydantic: unsupported fields, and errors as sentences."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from razor_dist.api.fields import Strict
from razor_dist.config.errors import RequestError
from razor_dist.config.validation import nearest

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=Strict)
# Names of unsupported fields that are logged at most; bounded, since clients choose them.
_MOST_LOGGED = 256
_LOGGED: dict[str, object] = {}
# Types of images, and of the texts in their place; fields of messages that may hold them.
_TEXTS = {"image": "text", "image_url": "text", "input_image": "input_text"}
_NO_IMAGE = "[an image, which this model cannot see]"
_HOLD = frozenset({"content", "output", "source"})
# Fields of vLLM until 0.12, and the fields that replaced them.
_GUIDED = {
    f"guided_{kind}": f'structured_outputs: {{"{kind}": ...}}'
    for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
}


def validated(cls: type[Body], data: object, ignored: list[str] | None = None) -> Body:
    """Validate a parsed request body; `RequestError` names the first field at fault.

    An unsupported field that is null is ignored. With a list ``ignored``, all unsupported fields
    are, and their names are added to it.
    """
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    fields = {}
    for name, value in data.items():
        if name == "store" and value is True and ignored is not None:
            ignored.append(name)
        elif name in cls.model_fields:
            fields[name] = value
        elif value is None or _is_neutral(value, cls.neutral.get(name, ())):
            continue
        elif name == "best_of" and name in cls.neutral and _is_neutral(value, [data.get("n")]):
            continue  # the best n of n answers are all n
        elif ignored is not None:
            ignored.append(name)
        else:
            hint = _GUIDED.get(name) or nearest(name, cls.model_fields)
            suffix = f"; did you mean {hint!r}?" if hint and name not in cls.neutral else ""
            raise RequestError(f"unsupported field {name!r}{suffix}", param=name)
    said = {name: fields[name] for name in fields.keys() & {"messages", "input"}}
    if ignored is not None and said != (seen := {k: _without_images(v) for k, v in said.items()}):
        fields |= seen
        ignored.append("images")
    _leave_out_tools(cls, fields, ignored)
    try:
        body = cls(**fields)
    except ValidationError as error:
        if ignored is None or not (unknown := _left_out(fields, error)):
            raise _request_error(error) from None
        ignored += unknown
        return validated(cls, fields, ignored)
    body.check()
    return body


def warn_of(fields: Iterable[str]) -> None:
    """Log the fields that are ignored, each name once; requests run in several threads."""
    for field in fields:
        mine = object()
        if len(_LOGGED) < _MOST_LOGGED and _LOGGED.setdefault(field, mine) is mine:
            log.warning("requests have the unsupported field %.80r, which is ignored", field)


def _left_out(fields: dict[str, Any], error: ValidationError) -> list[str]:
    """Remove the unknown nested fields that the error names; return their names."""
    found = []
    for problem in error.errors(include_url=False, include_input=False):
        *path, name = problem["loc"]
        at: Any = fields
        for part in path:  # parts that name a kind of object are no keys
            if isinstance(at, list) and isinstance(part, int):
                at = at[part]
            elif isinstance(at, dict):
                at = at.get(part, at)
        unknown = problem["type"] == "extra_forbidden"
        if unknown and isinstance(at, dict) and name in at:
            del at[name]
            found.append(_where(problem["loc"], numbers=False))
    return found


def _without_images(value: Any) -> Any:
    """Return messages or a part of them with a text in place of each image.

    An agent whose tool has read an image sends it with all requests that follow.
    """
    if isinstance(value, list):
        return [_without_images(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind in _TEXTS:
        mark = {name: value[name] for name in value.keys() & {"cache_control"}}
        return {"type": _TEXTS[kind], "text": _NO_IMAGE, **mark}
    return {name: _without_images(v) if name in _HOLD else v for name, v in value.items()}


def _leave_out_tools(cls: type[Strict], fields: dict[str, Any], ignored: list[str] | None) -> None:
    """Remove tools of types that this server does not have; `RequestError` without ``ignored``.

    Codex and Anthropic's clients, for instance, send a tool for web search with every request.
    """
    tools, own = fields.get("tools"), cls.tool_types
    if not isinstance(tools, list) or not own:
        return
    types = [one.get("type", own[0]) if isinstance(one, dict) else own[0] for one in tools]
    others = [at for at, type_ in enumerate(types) if isinstance(type_, str) and type_ not in own]
    if not others:
        return
    if ignored is None:
        raise RequestError(
            f"tools[{others[0]}].type must be {' or '.join(map(repr, own))}: "
            f"{types[others[0]]!r:.80} is not supported; turn it off in the client, or serve with "
            "--unknown-fields warn, which leaves it out",
            param=f"tools[{others[0]}].type",
        )
    ignored += [f"tools[] of type {types[at]}" for at in others]
    fields["tools"] = [one for at, one in enumerate(tools) if at not in others] or None
    choice, gone = fields.get("tool_choice"), [tools[at] for at in others]
    kind = choice.get("type") if isinstance(choice, dict) else choice
    asked = kind in [tool["type"] for tool in gone]
    if isinstance(choice, dict) and choice.get("name") is not None:  # as in Anthropic's API
        asked |= choice["name"] in [tool.get("name") for tool in gone]
    if fields["tools"] is None:
        asked |= kind == "required" or (isinstance(choice, dict) and kind not in ("auto", "none"))
    if asked:
        raise RequestError(
            "tool_choice asks for a tool of a type that this server does not have and leaves out: "
            f"{', '.join(sorted({tool['type'] for tool in gone}))}",
            param="tool_choice",
        )


def _where(place: Sequence[int | str], *, numbers: bool = True) -> str:
    # Parts with "@" name a kind of object (`razor_dist.api.fields.Kinds`), not a field.
    field, *rest = (part for part in place if not str(part).startswith("@"))
    index = "[{}]" if numbers else "[]"
    return f"{field}" + "".join(index.format(p) if isinstance(p, int) else f".{p}" for p in rest)


def _is_neutral(value: object, neutral: Sequence[Any]) -> bool:
    # 0 == False in Python, not in JSON.
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral)


def _request_error(error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False, include_input=False)[0]
    reason = problem.get("ctx", {}).get("error")
    if isinstance(reason, RequestError):
        return reason
    where = _where(problem["loc"])
    match problem["type"]:
        case "missing":
            message = f"missing required field {where!r}"
        case "extra_forbidden":
            message = f"unsupported field {where!r}"
        case "value_error":
            message = f"{where} {problem['ctx']['error']}"
        case _:
            # As in "Input should be a valid string" and "String should have …".
            said = problem["msg"].partition(" or instance of ")[0]
            message = f"{where} " + re.sub(r"^[A-Z]\w+ should", "must", said)
    return RequestError(message, param=where)
