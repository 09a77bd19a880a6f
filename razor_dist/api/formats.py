"""Answers in the shapes of OpenAI's chat completions and completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from razor_dist.api.annotations import citations
from razor_dist.api.answer_json import ESCAPED, dumped
from razor_dist.api.errors import Failure
from razor_dist.api.logprobs import Json, chat_logprobs, legacy_logprobs, prompt_pieces
from razor_dist.api.request import ParsedRequest
from razor_dist.api.tools import ToolParser
from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.outputs import AnswerSentence, Source
from razor_dist.protocol.messages import Progress

# Two empty lines, which are no event by the standard of server-sent events. Not a comment:
# ``vllm bench serve`` strips what it reads and so joins the next event to the comment's line, and
# `sglang.bench_serving` reads each line that is not blank as JSON. Some clients cut at two breaks.
HEARTBEAT = "\n\n"


class Format(ABC):
    """An endpoint's JSON for the answers to a request: whole, or in chunks of a stream."""

    prefix: ClassVar[str]  # of the answers' ids
    # True if a stream's opening waits for its first event: clients take it for the first token.
    opens_late: bool = False

    def __init__(
        self,
        request: ParsedRequest,
        model: str,
        choices: Sequence[Choice],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self._request, self._choices, self._tokenizer = request, choices, tokenizer
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._start()

    def _start(self) -> None:  # noqa: B027 - most endpoints keep nothing
        """Set the attributes in which an endpoint keeps its answers so far."""

    @property
    def is_slow(self) -> bool:
        """True if the time to shape a piece and its frame grows with the prompt."""
        return False

    @abstractmethod
    def whole(self) -> Json: ...

    @abstractmethod
    def opening(self) -> list[Json]: ...

    @abstractmethod
    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        """Chunks for one piece of the answer ``index``; none if it shows nothing yet."""

    def progress(self, index: int, progress: Progress) -> list[Json]:
        """Chunks for the progress of a prompt, on endpoints whose requests can ask for it."""
        return []

    @abstractmethod
    def closing(self, include_usage: bool) -> list[Json]:
        """Chunks for the end of a stream."""

    def failure(self, failure: Failure) -> list[Json]:
        """Chunks for a failure, after which the stream ends."""
        return [failure.body()]

    def frame(self, chunk: Json) -> str:
        """A chunk as a server-sent event."""
        return f"data: {dumped(chunk, ESCAPED).decode() if self.is_slow else ESCAPED(chunk)}\n\n"

    @property
    def heartbeat(self) -> str:
        """The bytes that are sent in silence, so that proxies see traffic."""
        return HEARTBEAT

    @property
    def end(self) -> str:
        """The bytes that follow all chunks."""
        return "data: [DONE]\n\n"

    def usage(self, completion: int | None = None) -> Json:
        """Return the token counts of the whole answers, or of their first ``completion`` tokens.

        Accepted and rejected tokens of drafts are only in the counts of whole answers.
        """
        # A prompt is read once for all its answers.
        prompt = sum(len(choice.prompt) for choice in self._choices if choice.answer == 0)
        cached = sum(choice.cached_tokens for choice in self._choices)
        whole = completion is None
        if completion is None:
            completion = sum(len(choice.pieces) for choice in self._choices)
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if whole:  # pieces that are here may not have been sent yet
            pieces = [piece for choice in self._choices for piece in choice.pieces]
            drafted = {
                "accepted_prediction_tokens": sum(piece.accepted for piece in pieces),
                "rejected_prediction_tokens": sum(piece.rejected for piece in pieces),
            }
            if any(drafted.values()):
                usage["completion_tokens_details"] = drafted
        return usage

    def _ending(self, reason: str | None) -> Json:
        """Return the fields for the end of an answer.

        The reason is "repetition" only if the request asked for that: clients check it against
        OpenAI's or Anthropic's list. Else it is "length", and ``stop_reason`` says "repetition".
        """
        if reason == "repetition" and not self._request.ends_in_repetition:
            return {"finish_reason": "length", "stop_reason": reason}
        return {"finish_reason": reason}

    @property
    def _contexts(self) -> Json:
        """The field ``contexts`` of an answer, if the request has made or named a context."""
        kept = self._request.kept_as and self._request.kept_as()
        return {"contexts": kept} if kept else {}

    def _parser(self) -> ToolParser | None:
        """Return a new parser for the calls of tools in one answer, if the request allows any."""
        if self._request.tools is None:
            return None
        skip = all(prompt.params.skip_special_tokens for prompt in self._request.prompts)
        return ToolParser(self._request.tools, self._tokenizer, skip_special=skip)


class EventFormat(Format):
    """An endpoint with one answer, text and then calls of tools, and named events in a stream."""

    def _start(self) -> None:
        self._parser_of_calls = self._parser()
        # The answer so far.
        self._text = ""
        self._calls: list[Json] = []
        self._finish: str | None = None

    def frame(self, chunk: Json) -> str:
        return f"event: {chunk['type']}\n{super().frame(chunk)}"

    @property
    def end(self) -> str:
        return ""

    def _read(self, piece: TextPiece) -> TextPiece:
        """Add a piece; return it with the text and the sentences that are in no call."""
        if parser := self._parser_of_calls:
            piece, self._calls = parser.read(piece)
        self._finish = self._ending(piece.finish_reason)["finish_reason"]
        self._text += piece.text
        return piece


class ChoicesFormat(Format):
    """An endpoint whose answers are ``choices``."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self) -> Json:
        choices = [self._choice(i, c.pieces) for i, c in enumerate(self._choices)]
        head = {**self._head, "object": self.whole_object}
        return {**head, "choices": choices, "usage": self.usage(), **self._contexts}

    def progress(self, index: int, progress: Progress) -> list[Json]:
        """A chunk with llama.cpp's ``prompt_progress``."""
        fields = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.processed,
            "time_ms": round(progress.seconds * 1000),
        }
        return [self._chunk([self._empty(index)], prompt_progress=fields)]

    def closing(self, include_usage: bool) -> list[Json]:
        return [self._chunk([], usage=self.usage())] if include_usage else []

    @abstractmethod
    def _choice(self, index: int, pieces: Sequence[TextPiece]) -> Json: ...

    @abstractmethod
    def _empty(self, index: int) -> Json: ...

    def _chunk(self, choices: Sequence[Json], **more: Any) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": list(choices), **more}


class ChatFormat(ChoicesFormat):
    prefix = "chatcmpl"
    opens_late = True
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _start(self) -> None:
        self._parsers = [self._parser() for _ in self._choices]  # of a stream

    def opening(self) -> list[Json]:
        role = {"delta": {"role": "assistant", "content": ""}}
        empty = [self._empty(i) for i in range(len(self._choices))]
        return [self._chunk([{**one, **role}], **self._contexts) for one in empty]

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        """As `Format.piece`; the reason for the end has a chunk of its own, as in OpenAI's API."""
        news: list[Json] = []
        logprobs = chat_logprobs(self._tokenizer, [piece])
        calls: list[Json] = []
        if parser := self._parsers[index]:
            piece, calls = parser.read(piece)
        rendered = self._sources(index, [piece])
        if piece.text or logprobs:
            news.append({"delta": {"content": piece.text}, "logprobs": logprobs})
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            news.append({"delta": {"tool_calls": numbered}})
        if piece.finish_reason:
            news.append(self._ending(piece.finish_reason))
        annotations = self._annotations(piece.sentences)
        if (rendered or annotations) and not news:
            news.append({"delta": {"content": ""}})
        if rendered:
            news[-1] |= rendered
        if annotations:
            news[-1]["delta"] = news[-1].get("delta", {}) | {"annotations": annotations}
        return [self._chunk([{**self._empty(index), **new}]) for new in news]

    def _choice(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        calls: list[Json] = []
        if parser := self._parser():
            read = [parser.read(piece) for piece in pieces]
            pieces, calls = [piece for piece, _ in read], read[-1][1]
        said = "".join(piece.text for piece in pieces)
        message: Json = {"role": "assistant", "content": said}
        if calls:
            message |= {"content": said or None, "tool_calls": calls}
        if self._request.titles is not None:
            sentences = [sentence for piece in pieces for sentence in piece.sentences]
            message["annotations"] = self._annotations(sentences)
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, pieces),
            **self._ending(pieces[-1].finish_reason),
            **self._sources(index, pieces),
        }

    def _sources(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        if not self._request.return_sources:
            return {}
        return rendered_sources(self._choices[index], pieces)

    def _annotations(self, sentences: Sequence[AnswerSentence]) -> list[Json]:
        if self._request.titles is None:
            return []
        found = citations(sentences, self._request.titles)
        return [{"type": "url_citation", "url_citation": citation} for citation in found]

    def _empty(self, index: int) -> Json:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}


class CompletionFormat(ChoicesFormat):
    """For a model without a tokenizer the text is empty and each choice has ``token_ids``."""

    prefix = "cmpl"
    opens_late = True
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _start(self) -> None:
        self._lengths: dict[int, int] = {}  # of prompts that were shown, in characters

    @property
    def is_slow(self) -> bool:
        return self._request.echo

    def opening(self) -> list[Json]:
        kept = self._contexts
        return [self._chunk([self._empty(0)], **kept)] if kept else []

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        choice = self._choice(index, [piece])
        silent = not choice["text"] and not piece.finish_reason
        silent = silent and choice["logprobs"] is None and not piece.sentences
        return [] if silent and self._tokenizer is not None else [self._chunk([choice])]

    def _with_prompt(self, index: int, pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
        """Yield a choice's prompt as pieces, once, and the pieces of its answer, if wanted."""
        only = self._request.prompt_only
        if index not in self._lengths:
            self._lengths[index] = 0
            choice = self._choices[index]
            alike = (c.prompt_entries is choice.prompt_entries for c in self._choices)
            free = all(n in self._lengths for n, same in enumerate(alike) if same)
            prompt = prompt_pieces(self._tokenizer, choice, free=free)
            for count, piece in enumerate(prompt, start=1):
                self._lengths[index] += len(piece.text)
                ends = only and count == len(choice.prompt)
                yield replace(piece, finish_reason="length") if ends else piece
        for piece in () if only else pieces:
            yield _moved(piece, self._lengths[index])

    def usage(self, completion: int | None = None) -> Json:
        return super().usage(0 if self._request.prompt_only else completion)

    def _empty(self, index: int) -> Json:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        texts, tokens = list[str](), list[int]()
        # Only pieces with sentences, and the last: those of a prompt take too much memory.
        shown: list[TextPiece] = []

        def noted() -> Iterator[TextPiece]:
            for piece in self._with_prompt(index, pieces) if self._request.echo else pieces:
                texts.append(piece.text)
                tokens.append(piece.token)
                if piece.sentences or piece.finish_reason:
                    shown.append(piece)
                yield piece

        logprobs = legacy_logprobs(self._tokenizer, noted())
        choice = {
            "index": index,
            "text": "".join(texts),
            "logprobs": logprobs,
            **self._ending(shown[-1].finish_reason if shown else None),
            **(rendered_sources(self._choices[index], shown) if shown else {}),
        }
        if self._tokenizer is None:
            choice["token_ids"] = tokens
        return choice


def _moved(piece: TextPiece, by: int) -> TextPiece:
    """Return a piece with its places in the answer moved by ``by`` characters."""
    own = [replace(s, start=s.start + by, end=s.end + by) for s in piece.sentences]
    return replace(piece, offset=piece.offset + by, sentences=own)


def rendered_sources(choice: Choice, pieces: Sequence[TextPiece]) -> Json:
    """Return the fields of a choice's sources: of its sentences, with the last piece of all."""
    rendered: Json = {}
    if pieces[-1].finish_reason and choice.sources is not None:
        rendered = {
            "sources": _sources(choice.sources),
            "grounded": choice.grounded,
            "question_match": choice.question_match,
            "sentences": [],
        }
    if found := [sentence for piece in pieces for sentence in piece.sentences]:
        rendered["sentences"] = [
            {"start": s.start, "end": s.end, "sources": _sources(s.sources), "grounded": s.grounded}
            for s in found
        ]
    return rendered


def _sources(sources: Sequence[Source]) -> list[Json]:
    rendered = map(asdict, sources)
    return [{k: v for k, v in s.items() if (k, v) != ("message", None)} for s in rendered]
