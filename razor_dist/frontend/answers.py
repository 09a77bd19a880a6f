"""The answers to prompts that are submitted together, as one sequence of events."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec import structs
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import RequestError
from razor_dist.frontend.assembler import Assembler, TextPiece
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.outputs import Source
from razor_dist.frontend.passages import Trace
from razor_dist.frontend.pins import Pinned
from razor_dist.frontend.prompts import Checked
from razor_dist.frontend.stream import RequestStream
from razor_dist.protocol.messages import (
    ANY_REQUEST,
    CacheScope,
    Progress,
    PromptLogprobs,
    Token,
    Tokens,
)

# Codes of refusals for which a request is tried again with fewer pinned prefixes.
_NO_ROOM = {"kv_capacity_exceeded", "pinned_prefixes_hold_cache"}


@dataclass(frozen=True)
class ChoiceEvent:
    """A piece of the choice ``index``, or the progress of its prompt."""

    index: int
    what: TextPiece | Progress


@dataclass
class Choice:
    """One answer to a prompt, as far as it has come."""

    prompt: Tokens
    answer: int = 0  # index among the prompt's answers
    pieces: list[TextPiece] = field(default_factory=list)
    cached_tokens: int = 0  # tokens of the prompt found in the caches
    pinned_tokens: int = 0  # tokens of the prompt read for its new contexts
    # Entries of `PromptLogprobs`: the same list for all answers to a prompt.
    prompt_entries: list[Any] = field(default_factory=list)
    # As in `CompletionOutput`.
    sources: list[Source] | None = None
    grounded: float | None = None
    question_match: float | None = None
    sent: int = 0  # pieces that a stream has sent

    def forget_sent(self) -> None:
        """Drop the log-probabilities of the piece that a stream has just sent."""
        self.pieces[self.sent] = replace(self.pieces[self.sent], logprobs=None)
        self.sent += 1

    async def traced(self, trace: Trace, piece: TextPiece) -> TextPiece:
        """Return the piece with the sentences that it ended; set the sources if it is the last."""
        last = piece.finish_reason is not None
        if spans := trace.ended(last=last):
            piece = replace(piece, sentences=await asyncio.to_thread(trace.sentences, spans))
        if last:
            found = await asyncio.to_thread(trace.whole)
            self.sources, self.grounded, self.question_match = found
        return piece


class LiveChoices:
    """Choices that are being generated; construction submits their requests.

    Each prompt has ``params.n`` choices, in the order of the prompts. With ``report_progress``
    `events` yields `Progress` as well, for a prompt's first choice. The prompts begin with the
    tokens of ``pinned``; ``prefix`` and ``scope`` are as in `EngineClient.submit`. Raises
    `RequestError` (``queue_full``) with nothing submitted, and `EngineError` if the engine is not
    ready.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: PreTrainedTokenizerBase | None,
        prompts: Sequence[Checked],
        *,
        report_progress: bool = False,
        prefix: RequestStream | None = None,
        pinned: Pinned | None = None,
        scope: CacheScope = ANY_REQUEST,
    ) -> None:
        client.check_room(sum(prompt.params.n for prompt in prompts))
        self.choices: list[Choice] = []
        self._client, self._report_progress = client, report_progress
        self._events: asyncio.Queue[ChoiceEvent | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._pinned = pinned
        self._submit = partial(self._submitted, prompts, prefix, scope)
        self._streams: list[RequestStream] = []
        self._streams = self._submit()
        for tokens, params, text in prompts:
            entries: list[Any] = []
            for answer in range(params.n):
                choice = Choice(tokens, answer, prompt_entries=entries)
                trace = None
                if params.return_sources:
                    trace = Trace(tokens, text, tokenizer, params.return_sources)
                pump = self._pump(len(self.choices), Assembler(tokenizer, params), choice, trace)
                self._tasks.append(asyncio.create_task(pump))
                self.choices.append(choice)
        self._unfinished = len(self.choices)
        if pinned is not None:
            pinned.listen(self._context_progress)

    def _submitted(
        self, prompts: Sequence[Checked], prefix: RequestStream | None, scope: CacheScope
    ) -> list[RequestStream]:
        """Submit the prompts' tokens behind the pinned prefix; return the answers' streams."""
        begin, streams = 0, list[RequestStream]()
        if self._pinned is not None and self._pinned.last is not None:
            prefix, begin = self._pinned.last.stream, self._pinned.last.tokens
        for tokens, params, _ in prompts:
            name, rest = uuid.uuid4().hex, tokens[begin:]
            new = self._client.submit(name, rest, params, prefix=prefix, scope=scope)
            if not self._streams:
                ids = [stream.request_id for stream in new]
                self._client.observer.submitted(ids, new[0].prompt_tokens, params)
            streams += new
        return streams

    @property
    def ids(self) -> list[str]:
        """The engine's names for the answers."""
        return [stream.request_id for stream in self._streams]

    def _context_progress(self, for_these: bool, message: Progress) -> None:
        """Note the progress of a context that these prompts continue."""
        for choice, id_ in zip(self.choices, self.ids, strict=True):
            if choice.answer == 0:
                self._client.observer.reading(id_)
        if self._report_progress and for_these:
            whole = structs.replace(message, total=len(self.choices[0].prompt))
            self._events.put_nowait(ChoiceEvent(0, whole))

    async def events(
        self, heartbeat: float | None = None, *, forgets: bool = False
    ) -> AsyncIterator[ChoiceEvent | None]:
        """Stream events until an answer fails or all have ended.

        Yields None after ``heartbeat`` seconds without an event. With ``forgets``, pieces lose
        their log-probabilities, kilobytes each, when the next event is asked for.
        """
        while self._unfinished or not self._events.empty():
            try:
                event = await asyncio.wait_for(self._events.get(), heartbeat)
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Exception):
                raise event
            yield event
            if forgets and isinstance(event.what, TextPiece):
                self.choices[event.index].forget_sent()

    def fail_at(self, time: float, error: Exception) -> None:
        """Abort unfinished answers at a ``time`` of the loop's clock; `events` raises ``error``.

        The engine hears of it at that time, however slowly the events are read.
        """

        def fail() -> None:
            if self._unfinished:
                self.close()
                self._events.put_nowait(error)

        if time < math.inf:
            self._timer = asyncio.get_running_loop().call_at(time, fail)

    def close(self) -> None:
        """Abort unfinished answers. Never waits."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            stream.close()
        if self._pinned is not None:
            self._pinned.close(
                answered=all(
                    choice.pieces and choice.pieces[-1].finish_reason for choice in self.choices
                )
            )

    async def _pump(
        self, index: int, assembler: Assembler, choice: Choice, trace: Trace | None
    ) -> None:
        try:
            while True:
                stream = self._streams[index]
                try:
                    await self._read(index, stream, assembler, choice, trace)
                    break
                except RequestError as error:
                    if not self._ask_again(stream, error):
                        raise
                finally:  # after `_ask_again`, which gives answers their new ids
                    stream.close()
        except Exception as error:
            refused = None if self._pinned is None else self._pinned.error
            self._events.put_nowait(refused or error)
        finally:
            self._unfinished -= 1

    def _ask_again(self, refused: RequestStream, error: RequestError) -> bool:
        """Ask again without the last context, if it is lost or leaves no room, and is a hint.

        False if the answers have begun, or ``error`` has another cause.
        """
        pinned = self._pinned
        if pinned is None or pinned.error is not None:
            return False
        if refused not in self._streams:  # another answer's refusal came first
            return True
        if pinned.last is None or any(choice.pieces for choice in self.choices):
            return False
        if error.param != "prefix" and error.code not in _NO_ROOM:
            return False
        if again := pinned.leave_out(error):
            before, self._streams = self.ids, self._submit()
            self._client.observer.asked_again(before, self.ids)
        return again

    async def _read(
        self,
        index: int,
        stream: RequestStream,
        assembler: Assembler,
        choice: Choice,
        trace: Trace | None,
    ) -> None:
        async for message in stream:
            if isinstance(message, Progress):
                choice.cached_tokens = message.cached
                if self._pinned is not None:
                    # Rank 0 reports a refused pin before the progress of later prompts.
                    if self._pinned.error is not None:
                        raise self._pinned.error
                    found = self._pinned.counts(message.cached)
                    choice.cached_tokens, choice.pinned_tokens = found
                self._client.observer.cached(stream.request_id, choice.cached_tokens)
                if self._report_progress:
                    self._events.put_nowait(ChoiceEvent(index, message))
            elif isinstance(message, PromptLogprobs):
                choice.prompt_entries += message.logprobs
            elif isinstance(message, Token):
                piece = assembler.push(message)
                if trace is not None:
                    trace.add(message.sources or (), piece.offset, piece.text)
                    piece = await choice.traced(trace, piece)
                choice.pieces.append(piece)
                self._events.put_nowait(ChoiceEvent(index, piece))
                if piece.finish_reason is not None:
                    stream.close(piece.finish_reason)
                    break
