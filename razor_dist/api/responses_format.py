"""Answers in the shape of OpenAI's ``/v1/responses``: items, and streams of typed events."""

from __future__ import annotations

import itertools
import json
import uuid
from typing import Any

from razor_dist.api.annotations import citations
from razor_dist.api.errors import Failure
from razor_dist.api.formats import ChatFormat, CompletionFormat, EventFormat, Format
from razor_dist.api.logprobs import Json
from razor_dist.api.messages_format import MessagesFormat
from razor_dist.api.request import Endpoint
from razor_dist.frontend.assembler import TextPiece


class ResponsesFormat(EventFormat):
    """A message, calls of tools, or both; a stream's events have types and numbers."""

    prefix = "resp"

    def _start(self) -> None:
        super()._start()
        self._item = f"msg_{uuid.uuid4().hex}"
        self._numbers = itertools.count()
        self._at = {"item_id": self._item, "output_index": 0, "content_index": 0}
        self._annotations: list[Json] = []  # of the answer so far

    def whole(self) -> Json:
        [choice] = self._choices
        for piece in choice.pieces:
            self._read(piece)
        return self._response(self._items())

    def opening(self) -> list[Json]:
        begun = self._response([])
        kinds = "response.created", "response.in_progress"
        return [self._event(kind, response=begun) for kind in kinds]

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        has_begun, before = bool(self._text), len(self._annotations)
        text = self._read(piece).text
        events = []
        if text:
            events += [] if has_begun else self._begin_message()
            delta = {"delta": text, "logprobs": []}
            events.append(self._event("response.output_text.delta", **self._at, **delta))
        added = "response.output_text.annotation.added"
        for number, annotation in enumerate(self._annotations[before:], start=before):
            own = {"annotation_index": number, "annotation": annotation}
            events.append(self._event(added, **self._at, **own))
        return events

    def closing(self, include_usage: bool) -> list[Json]:
        items, events = self._items(), []
        for index, item in enumerate(items):
            if item["type"] == "message":
                events += [] if self._text else self._begin_message()
                events += self._end_message(item)
            else:
                events += self._whole_call(index, item)
        whole = self._response(items)
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def failure(self, failure: Failure) -> list[Json]:
        """Return an error and the failed response; Codex, for example, reads the latter alone."""
        about = {"code": failure.code, "message": failure.message, "param": failure.param}
        failed = self._response([]) | {"status": "failed", "error": about}
        return [self._event("error", **about), self._event("response.failed", response=failed)]

    def _read(self, piece: TextPiece) -> TextPiece:
        piece = super()._read(piece)
        if self._request.titles is not None:
            found = citations(piece.sentences, self._request.titles)
            self._annotations += [{"type": "url_citation", **citation} for citation in found]
        return piece

    def _event(self, type_: str, **fields: Any) -> Json:
        return {"type": type_, "sequence_number": next(self._numbers), **fields}

    def _begin_message(self) -> list[Json]:
        empty = self._message("", "in_progress") | {"content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=empty),
            self._event("response.content_part.added", **self._at, part=_part("", [])),
        ]

    def _end_message(self, item: Json) -> list[Json]:
        text = self._text
        return [
            self._event("response.output_text.done", **self._at, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._at, part=self._part()),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _whole_call(self, index: int, item: Json) -> list[Json]:
        at = {"output_index": index}
        own = {"item_id": item["id"], **at}
        field = "input" if "input" in item else "arguments"
        kind = f"response.{item['type']}_{field}"
        done = {} if field == "input" else {"name": item["name"]}
        empty = item | {field: "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", **at, item=empty),
            self._event(f"{kind}.delta", **own, delta=item[field]),
            self._event(f"{kind}.done", **own, **done, **{field: item[field]}),
            self._event("response.output_item.done", **at, item=item),
        ]

    def _items(self) -> list[Json]:
        calls = list(map(self._call_item, self._calls))
        message = self._message(self._text, self._status)
        return [message, *calls] if self._text or not calls else calls

    def _call_item(self, call: Json) -> Json:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        own = self._request.called.get(name, {"type": "function_call", "name": name})
        given = {"arguments": arguments}
        if own["type"] == "custom_tool_call":
            text = json.loads(arguments).get("input")
            given = {"input": text if isinstance(text, str) else arguments}
        kind = "ctc" if "input" in given else "fc"
        head = {"id": f"{kind}_{uuid.uuid4().hex}", "status": "completed", "call_id": call["id"]}
        return {**head, **own, **given}

    def _message(self, text: str, status: str) -> Json:
        head = {"id": self._item, "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [self._part() if text else _part("", [])]}

    def _part(self) -> Json:
        return _part(self._text, self._annotations)

    @property
    def _status(self) -> str:
        cut = "incomplete"
        return {None: "in_progress", "length": cut, "repetition": cut}.get(
            self._finish, "completed"
        )

    def _response(self, items: list[Json]) -> Json:
        head = {k: v for k, v in self._head.items() if k != "created"}
        reason = "max_output_tokens" if self._finish == "length" else self._finish
        incomplete = {"reason": reason} if self._status == "incomplete" else None
        return {
            **head,
            "object": "response",
            "created_at": self._head["created"],
            "status": self._status,
            "error": None,
            "incomplete_details": incomplete,
            "output": items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self.usage() if self._finish else None,
            **(self._request.described or {}),
            **self._contexts,
        }

    def usage(self, completion: int | None = None) -> Json:
        usage = super().usage(completion)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(text: str, annotations: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}


FORMATS: dict[Endpoint, type[Format]] = {
    "chat": ChatFormat,
    "completions": CompletionFormat,
    "responses": ResponsesFormat,
    "messages": MessagesFormat,
}
