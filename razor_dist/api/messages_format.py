"""Answers in the shape of Anthropic's ``/v1/messages``: blocks of content, citations, events."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

from razor_dist.api.conversation import CitedDocument
from razor_dist.api.errors import MESSAGES, Failure
from razor_dist.api.formats import EventFormat
from razor_dist.api.logprobs import Json
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.outputs import AnswerSentence, Source
from razor_dist.frontend.passages import cited

_STOP_REASONS: dict[str | None, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class MessagesFormat(EventFormat):
    """An answer is one block of text, or with citations one for each sentence, then the calls.

    A sentence's block ends where the next sentence begins, so that the blocks' texts together are
    the whole answer. Each call of a tool is a block.
    """

    prefix = "msg"

    def _start(self) -> None:
        super()._start()
        # The opening must not name a context that is refused, which the first token rules out.
        self.opens_late = self._request.kept_as is not None
        documents = (self._request.described or {}).get("documents", ())
        self._documents = [CitedDocument(*document) for document in documents]
        # Of the stream so far: characters of the text in blocks, the sentences of blocks that have
        # not ended, the number of blocks that have, and whether another has begun.
        self._sent = 0
        self._sentences: deque[AnswerSentence] = deque()
        self._blocks, self._open = 0, False
        self._stop: str | None = None

    def whole(self) -> Json:
        """Return the message that a client makes of the stream's events."""
        [choice] = self._choices
        events = [event for piece in choice.pieces for event in self.piece(0, piece)]
        events += self._end()
        content: list[Json] = []
        for event in events:
            if event["type"] == "content_block_start":
                content.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                _add(content[-1], event["delta"])
        return self._message(content)

    @property
    def heartbeat(self) -> str:
        return self.frame({"type": "ping"})

    def opening(self) -> list[Json]:
        return [{"type": "message_start", "message": self._message([])}]

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        piece = self._read(piece)
        if isinstance(piece.stop_reason, str) and not self._calls:
            self._stop = piece.stop_reason
        self._sentences += piece.sentences
        return self._advance()

    def closing(self, include_usage: bool) -> list[Json]:
        message = self._message([])
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        end = {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        return [*self._end(), end, {"type": "message_stop"}]

    def failure(self, failure: Failure) -> list[Json]:
        return [failure.body(MESSAGES)]

    def usage(self, completion: int | None = None) -> Json:
        usage = super().usage(completion)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        created = sum(choice.pinned_tokens for choice in self._choices[:1])
        return {
            "input_tokens": usage["prompt_tokens"] - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _message(self, content: list[Json]) -> Json:
        reason = "tool_calls" if self._calls and self._finish == "stop" else self._finish
        return {
            "id": self._head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": content,
            "stop_reason": _STOP_REASONS.get(reason, reason)
            if self._stop is None
            else "stop_sequence",
            "stop_sequence": self._stop,
            "usage": self.usage(),
            **self._contexts,
        }

    def _advance(self) -> list[Json]:
        """Return the events of new text, and of the sentences whose blocks end with it."""
        events = []
        while self._sentences:
            rest = self._text[self._sentences[0].end :]
            if not (following := rest.lstrip()) and self._finish is None:
                break  # more blanks may follow the sentence
            events += self._say(len(self._text) - len(following))
            events += self._close(cited(self._sentences.popleft()))
        return events + self._say(len(self._text))

    def _end(self) -> list[Json]:
        """Return the events behind the last piece."""
        events = self._close([])
        for call in self._calls:
            own = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            events += self._begin(own | {"input": {}})
            events += [self._delta(delta), *self._close([])]
        return events

    def _say(self, end: int) -> list[Json]:
        """Return the events of the text up to character ``end``, in the open block or a new one."""
        text = self._text[self._sent : end]
        if not text:
            return []
        self._sent = end
        begun = [] if self._open else self._begin({"type": "text", "text": "", "citations": None})
        return [*begun, self._delta({"type": "text_delta", "text": text})]

    def _begin(self, block: Json) -> list[Json]:
        self._open = True
        return [{"type": "content_block_start", "index": self._blocks, "content_block": block}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _close(self, sources: Sequence[Source]) -> list[Json]:
        """Return the events of the open block's citations and end; none without an open block."""
        if not self._open:
            return []
        events = [
            self._delta({"type": "citations_delta", "citation": self._citation(source)})
            for source in sources
            if source.message is not None  # not in a document
        ]
        events.append({"type": "content_block_stop", "index": self._blocks})
        self._open, self._blocks = False, self._blocks + 1
        return events

    def _citation(self, source: Source) -> Json:
        assert source.message is not None
        document = self._documents[source.message]
        begin, end = document.offset + source.start, document.offset + source.end
        first, last = (bisect_right(document.begins, at) for at in (begin, end - 1))
        place = {
            "char_location": {"start_char_index": begin, "end_char_index": end},
            "page_location": {"start_page_number": first, "end_page_number": last + 1},
            "content_block_location": {"start_block_index": first - 1, "end_block_index": last},
        }
        return {
            "type": document.kind,
            "cited_text": source.text,
            "document_index": source.message,
            "document_title": document.title,
            **place[document.kind],
        }


def _add(block: Json, delta: Json) -> None:
    """Add a delta of the stream to its block, as clients do."""
    kind: Any = delta["type"]
    if kind == "text_delta":
        block["text"] += delta["text"]
    elif kind == "citations_delta":
        block["citations"] = [*(block["citations"] or []), delta["citation"]]
    else:
        block["input"] = json.loads(delta["partial_json"])
