"""Answers in the shapes of OpenAI's two text endpoints."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from razor_dist.engine.messages import Message
from razor_dist.frontend.assembler import TextPiece
from razor_dist.server.answers import ServedChoice, ServedChoices
from razor_dist.server.logprobs import chat_logprobs, legacy_logprobs

Json = dict[str, Any]


class Format(ABC):
    """The shape of one request's answers."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, model: str, answers: ServedChoices, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._choices = answers
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": answers.created,
            "model": model,
        }

    def whole(self) -> Json:
        """The response of a request that does not stream, once every answer is finished."""
        choices = [self._choice(i, answer) for i, answer in enumerate(self._choices.choices)]
        head = {**self._head, "object": self.whole_object}
        return {**head, "choices": choices, "usage": self._usage()}

    def opening(self) -> list[Json]:
        """Chunks that begin a stream."""
        return []

    @abstractmethod
    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        """Chunks for one piece of the answer ``index``; none if there is nothing to see yet."""

    def progress(self, index: int, message: Message) -> Json:
        """A chunk with llama.cpp's ``prompt_progress`` for the engine's ``progress`` message."""
        progress = {
            "total": message["total"],
            "cache": message["cached"],
            "processed": message["processed"],
            "time_ms": round(message["seconds"] * 1000),
        }
        return self._chunk([self._empty(index)], prompt_progress=progress)

    def usage(self) -> Json:
        """The chunk that ends a stream with ``include_usage``."""
        return self._chunk([], usage=self._usage())

    @abstractmethod
    def _choice(self, index: int, answer: ServedChoice) -> Json: ...

    @abstractmethod
    def _empty(self, index: int) -> Json: ...

    def _chunk(self, choices: Sequence[Json], **more: Any) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": list(choices), **more}

    def _usage(self) -> Json:
        prompt, completion = self._choices.prompt_tokens, self._choices.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


class ChatFormat(Format):
    """``chat.completion`` and its chunks."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[Json]:
        """A chunk with the role."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([{**self._empty(0), "delta": delta}])]

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        """As `Format.piece`; the reason for the end comes in a chunk of its own, as OpenAI's."""
        chunks = []
        logprobs = chat_logprobs(self._tokenizer, [piece])
        if piece.text or logprobs:
            delta = {"content": piece.text}
            choice = {**self._empty(index), "delta": delta, "logprobs": logprobs}
            chunks.append(self._chunk([choice]))
        if piece.finish_reason:
            choice = {**self._empty(index), "finish_reason": piece.finish_reason}
            chunks.append(self._chunk([choice]))
        return chunks

    def _choice(self, index: int, answer: ServedChoice) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": chat_logprobs(self._tokenizer, answer.pieces),
            "finish_reason": answer.finish_reason,
        }

    def _empty(self, index: int) -> Json:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}


class CompletionFormat(Format):
    """``text_completion``, whole or in chunks.

    For a model without a tokenizer the text is empty and each choice has ``token_ids``.
    """

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        """As `Format.piece`."""
        choice = self._made_of(index, [piece], piece.text)
        silent = not piece.text and not piece.finish_reason and choice["logprobs"] is None
        return [] if silent and self._tokenizer is not None else [self._chunk([choice])]

    def _choice(self, index: int, answer: ServedChoice) -> Json:
        return self._made_of(index, answer.pieces, answer.text)

    def _empty(self, index: int) -> Json:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _made_of(self, index: int, pieces: Sequence[TextPiece], text: str) -> Json:
        choice = {
            "index": index,
            "text": text,
            "logprobs": legacy_logprobs(self._tokenizer, pieces),
            "finish_reason": pieces[-1].finish_reason,
        }
        if self._tokenizer is None:
            choice["token_ids"] = [piece.token for piece in pieces]
        return choice
