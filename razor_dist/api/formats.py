"""Answers in the shapes of OpenAI's two text endpoints, with their two of log-probabilities."""

from __future__ import annotations

import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from razor_dist.api.errors import Failure
from razor_dist.api.tools import ToolParser, ToolUse
from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece, decode_one, prompt_logprobs
from razor_dist.frontend.detokenizer import REPLACEMENT, Detokenizer
from razor_dist.frontend.outputs import Logprob, Source, TokenLogprobs
from razor_dist.protocol.messages import Progress

Json = dict[str, Any]
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
# The byte of each character that byte-level BPE (GPT-2's) writes.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


class Format(ABC):
    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, model: str, choices: Sequence[Choice], tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._choices, self._tokenizer = choices, tokenizer
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def is_slow(self) -> bool:
        """True if shaping takes time that grows with the prompt."""
        return False

    def whole(self) -> Json:
        choices = [self._choice(i, c.pieces, c.text) for i, c in enumerate(self._choices)]
        head = {**self._head, "object": self.whole_object}
        return {**head, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[Json]:
        return []

    @abstractmethod
    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        """Chunks for one piece of the answer ``index``; none if there is nothing to see yet."""

    def progress(self, index: int, progress: Progress) -> Json:
        """A chunk with llama.cpp's ``prompt_progress``."""
        fields = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.processed,
            "time_ms": round(progress.seconds * 1000),
        }
        return self._chunk([self._empty(index)], prompt_progress=fields)

    def closing(self, include_usage: bool) -> list[Json]:
        """Chunks for the end of a stream."""
        return [self._chunk([], usage=self.usage())] if include_usage else []

    def failure(self, failure: Failure) -> Json:
        """A chunk for a failure, after which the stream ends."""
        return failure.body()

    def frame(self, chunk: Json) -> str:
        """A chunk as a server-sent event."""
        # ensure_ascii keeps U+2028 and its like, which some clients take for line ends, escaped.
        return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"

    @property
    def end(self) -> str:
        """The bytes that follow all chunks."""
        return "data: [DONE]\n\n"

    @abstractmethod
    def _choice(self, index: int, pieces: Sequence[TextPiece], text: str) -> Json: ...

    @abstractmethod
    def _empty(self, index: int) -> Json: ...

    def _chunk(self, choices: Sequence[Json], **more: Any) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": list(choices), **more}

    def usage(self, completion: int | None = None) -> Json:
        """Return the token counts, of the whole answers or of their first ``completion`` tokens."""
        # One prompt's choices read it once.
        prompt = sum(len(choice.prompt) for choice in self._choices if choice.answer == 0)
        cached = sum(choice.cached_tokens for choice in self._choices)
        if completion is None:
            completion = sum(len(choice.pieces) for choice in self._choices)
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        pieces = [piece for choice in self._choices for piece in choice.pieces]
        drafted = {
            "accepted_prediction_tokens": sum(piece.accepted for piece in pieces),
            "rejected_prediction_tokens": sum(piece.rejected for piece in pieces),
        }
        if any(drafted.values()):
            usage["completion_tokens_details"] = drafted
        return usage


class ChatFormat(Format):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        choices: Sequence[Choice],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        tools: ToolUse | None = None,
    ) -> None:
        super().__init__(model, choices, tokenizer)
        self._tools = tools
        self._parsers = {} if tools is None else {i: self._parser() for i in range(len(choices))}

    def _parser(self) -> ToolParser:
        assert self._tools is not None
        return ToolParser(self._tools, self._tokenizer)

    def opening(self) -> list[Json]:
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([{**self._empty(i), **role}]) for i in range(len(self._choices))]

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        """As `Format.piece`; the reason for the end comes in a chunk of its own, as OpenAI's."""
        news: list[Json] = []
        logprobs = chat_logprobs(self._tokenizer, [piece])
        text, finish = piece.text, piece.finish_reason
        rendered = rendered_sources(self._choices[index], [piece])
        calls: list[Json] = []
        if parser := self._parsers.get(index):
            text = parser.push(piece)
            if finish:
                rest, calls, finish = parser.end(finish)
                text += rest
        if text or logprobs:
            news.append({"delta": {"content": text}, "logprobs": logprobs})
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            news.append({"delta": {"tool_calls": numbered}})
        if finish:
            news.append({"finish_reason": finish})
        if rendered and not news:
            news.append({"delta": {"content": ""}})
        if rendered:
            news[-1] |= rendered
        return [self._chunk([{**self._empty(index), **new}]) for new in news]

    def _choice(self, index: int, pieces: Sequence[TextPiece], text: str) -> Json:
        message: Json = {"role": "assistant", "content": text}
        finish = pieces[-1].finish_reason
        if self._tools is not None and finish:
            said, calls, finish = self._parser().read(pieces, finish)
            if calls:
                message |= {"content": said or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, pieces),
            "finish_reason": finish,
            **rendered_sources(self._choices[index], pieces),
        }

    def _empty(self, index: int) -> Json:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}


class CompletionFormat(Format):
    """For a model without a tokenizer the text is empty and each choice has ``token_ids``."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        model: str,
        choices: Sequence[Choice],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        echo: bool = False,
        prompt_only: bool = False,
    ) -> None:
        super().__init__(model, choices, tokenizer)
        self._echo, self._prompt_only = echo, prompt_only
        self._lengths: dict[int, int] = {}  # of the texts of prompts that were streamed

    @property
    def is_slow(self) -> bool:
        return self._echo

    def whole(self) -> Json:
        if not self._echo:
            return super().whole()
        choices = []
        for index, choice in enumerate(self._choices):
            pieces = self._with_prompt(choice, choice.pieces)
            choices.append(self._choice(index, pieces, "".join(piece.text for piece in pieces)))
        head = {**self._head, "object": self.whole_object}
        return {**head, "choices": choices, "usage": self.usage()}

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        pieces = [piece]
        if self._echo and index not in self._lengths:
            pieces = self._with_prompt(self._choices[index], pieces)
            self._lengths[index] = pieces[-1].offset - piece.offset
        elif self._echo:
            pieces = [replace(piece, offset=self._lengths[index] + piece.offset)]
        choice = self._choice(index, pieces, "".join(piece.text for piece in pieces))
        silent = not choice["text"] and not piece.finish_reason
        silent = silent and choice["logprobs"] is None and not piece.sentences
        return [] if silent and self._tokenizer is not None else [self._chunk([choice])]

    def _with_prompt(self, choice: Choice, pieces: Sequence[TextPiece]) -> list[TextPiece]:
        """Return the pieces of a prompt, and those of its answer, if that was asked for."""
        prompt = prompt_pieces(self._tokenizer, choice)
        if self._prompt_only:
            return [*prompt[:-1], replace(prompt[-1], finish_reason="length")]
        length = sum(len(piece.text) for piece in prompt)
        return prompt + [replace(piece, offset=length + piece.offset) for piece in pieces]

    def usage(self, completion: int | None = None) -> Json:
        return super().usage(0 if self._prompt_only else completion)

    def _empty(self, index: int) -> Json:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, pieces: Sequence[TextPiece], text: str) -> Json:
        choice = {
            "index": index,
            "text": text,
            "logprobs": legacy_logprobs(self._tokenizer, pieces),
            "finish_reason": pieces[-1].finish_reason,
            **rendered_sources(self._choices[index], pieces),
        }
        if self._tokenizer is None:
            choice["token_ids"] = [piece.token for piece in pieces]
        return choice


def rendered_sources(choice: Choice, pieces: Sequence[TextPiece]) -> Json:
    """Fields for a choice's sources: of its sentences, and with its last piece of the whole."""
    rendered: Json = {}
    if pieces[-1].finish_reason and choice.sources is not None:
        rendered = {
            "sources": _sources(choice.sources),
            "grounded": choice.grounded,
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


def chat_logprobs(
    tokenizer: PreTrainedTokenizerBase | None, pieces: Sequence[TextPiece]
) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a chat completion; ``None`` unless they were asked for."""
    content = []
    for piece in pieces:
        if piece.logprobs is None:
            return None
        # An entry without a rank is the chosen token itself, unlikelier than those asked for.
        top = [(t, lp) for t, lp in piece.logprobs.items() if lp.rank is not None]
        entry = _chat_entry(tokenizer, piece.token, piece.logprobs[piece.token])
        content.append({**entry, "top_logprobs": [_chat_entry(tokenizer, *item) for item in top]})
    return {"content": content, "refusal": None}


def prompt_pieces(tokenizer: PreTrainedTokenizerBase | None, choice: Choice) -> list[TextPiece]:
    """Return a prompt as pieces, with log-probabilities if the engine has sent them.

    Those of the first token are an empty mapping: nothing comes before it.
    """
    ids = choice.prompt.tolist()
    known: Sequence[TokenLogprobs | None] = [None] * len(ids)
    if choice.prompt_entries:
        found = prompt_logprobs(tokenizer, ids, choice.prompt_entries)
        known = [{} if entry is None else entry for entry in found]
    if tokenizer is None:
        return [TextPiece(token, "", own) for token, own in zip(ids, known, strict=True)]
    detokenizer, pieces = Detokenizer(tokenizer), []
    for token, own in zip(ids, known, strict=True):
        offset = detokenizer.length
        pieces.append(TextPiece(token, detokenizer.push(token), own, offset=offset))
    return [*pieces[:-1], replace(pieces[-1], text=pieces[-1].text + detokenizer.flush())]


def legacy_logprobs(
    tokenizer: PreTrainedTokenizerBase | None, pieces: Sequence[TextPiece]
) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a completion; without a tokenizer of tokens ``token_id:17``."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[Json | None] = []
    for piece in pieces:
        if piece.logprobs is None:
            return None
        own = piece.logprobs.get(piece.token)
        if own is None:  # a prompt's first
            tokens.append(
                _spell(piece.token, Logprob(0.0, None, decode_one(tokenizer, piece.token)))
            )
            chosen.append(None)
            top.append(None)
            continue
        tokens.append(_spell(piece.token, own))
        chosen.append(_finite(own))
        top.append({_spell(t, lp): _finite(lp) for t, lp in piece.logprobs.items()})
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": [piece.offset for piece in pieces],
    }


def _chat_entry(
    tokenizer: PreTrainedTokenizerBase | None, token: int, logprob: Logprob
) -> dict[str, Any]:
    text = _spell(token, logprob)
    spelt = token_bytes(tokenizer, token, text)
    return {"token": text, "logprob": _finite(logprob), "bytes": spelt}


def _finite(logprob: Logprob) -> float:
    # JSON has no infinity; OpenAI writes this value for a vanishing probability.
    return max(logprob.logprob, -9999.0)


def _spell(token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def token_bytes(
    tokenizer: PreTrainedTokenizerBase | None, token: int, text: str
) -> list[int] | None:
    """Return the bytes of a token, decoded as ``text``; ``None`` if they are unknown."""
    if tokenizer is None:
        return None
    if REPLACEMENT not in text:
        return list(text.encode("utf-8"))
    piece = str(tokenizer.convert_ids_to_tokens(token))
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    if fallback:
        return [int(fallback[1], 16)]
    return [_BYTES[c] for c in piece] if all(c in _BYTES for c in piece) else None
