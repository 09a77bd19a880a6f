"""The frontend's requests to rank 0, and the engine's state.

Everything here runs in one event loop, which nothing blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from razor_dist.config.errors import EngineError, RefusedError, RequestError
from razor_dist.frontend.connection import RankConnection
from razor_dist.frontend.grammar_process import GrammarProcess
from razor_dist.frontend.observer import Observer
from razor_dist.frontend.stream import RequestStream
from razor_dist.protocol.counters import Counters
from razor_dist.protocol.messages import (
    ANY_REQUEST,
    Abort,
    AboutRequest,
    Add,
    Alive,
    CacheScope,
    EngineInfo,
    Failed,
    Ready,
    Stats,
    StatsQuery,
    ToFrontend,
    Token,
    Tokens,
    answer_ids,
)
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import GrammarText

if TYPE_CHECKING:  # `razor-dist serve --help` does not wait for transformers
    from razor_dist.frontend.prompts import Checked

log = logging.getLogger(__name__)

# OpenAI's clients do not heed a ``Retry-After`` of more seconds, but come after one or two.
_LONGEST_RETRY = 60

State = Literal["loading", "ready", "restarting", "draining", "failed", "closed"]


@dataclass(frozen=True)
class Status:
    """The engine's state and, unless it is ready, the reason in a sentence."""

    state: State
    reason: str = ""
    refused: bool = False  # the ranks refuse the settings or the model


class StartClock:
    """The time of the ranks' last start, by which that of the present one is estimated."""

    def __init__(self) -> None:
        self._took, self._since, self._is_ready = 0.0, time.monotonic(), False

    def note(self, state: State) -> None:
        """Note the engine's new state."""
        if state == "ready":
            self._took = time.monotonic() - self._since
        elif self._is_ready:
            self._since = time.monotonic()
        self._is_ready = state == "ready"

    @property
    def seconds_left(self) -> int:
        """Whole seconds until the ranks are likely to be ready, 1 to `_LONGEST_RETRY`."""
        left = self._took - (time.monotonic() - self._since)
        return min(_LONGEST_RETRY, max(1, math.ceil(left)))


class EngineBusyError(EngineError):
    """The engine is alive but does not answer now: rank 0 reads no message during a chunk."""


class EngineClient:
    """The frontend's end of an engine: submits requests, hands out messages, knows the state.

    The folder of ``socket_path`` must be private to the user. At most ``max_queue`` requests may
    be unfinished at once; ``None`` sets no bound.
    """

    def __init__(self, socket_path: Path, *, max_queue: int | None = None) -> None:
        self.rank0 = RankConnection(socket_path, self.loading, self.receive, self.lost)
        self.max_queue = max_queue
        self.observer = Observer()
        # Compiles structured outputs; None until the tokenizer is loaded.
        self.grammars: GrammarProcess | None = None
        # Of the present ranks; None until they are ready; kept when they die.
        self.info: EngineInfo | None = None
        self.served = False  # True once ready: a later start that fails is tried again
        # From rank 0's heartbeat: its process id, and the estimated seconds until requests end.
        self.rank0_pid: int | None = None
        self._seconds_left: dict[str, float] = {}
        self.status = Status("loading", "the model is being loaded")
        self.start = StartClock()
        self._changed = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._stats: dict[int, asyncio.Future[Counters]] = {}
        self._being_read, self._tags = 0, itertools.count(1)

    @property
    def unfinished(self) -> int:
        """The number of requests being read or in the engine, pinned prefixes not included."""
        return self._being_read + sum(not stream.lasting for stream in self._streams.values())

    def retry_after(self, groups: Iterable[Iterable[str]] | None = None) -> int:
        """Whole seconds, at least 1, until the first answer is likely to end.

        With ``groups`` of answers' ids, until all answers of some group are.
        """
        if groups is None:
            groups = [[id_] for id_ in self._streams]
        left = self._seconds_left
        known = [[left[id_] for id_ in group if id_ in left] for group in groups]
        return max(1, math.ceil(min((max(ends) for ends in known if ends), default=0)))

    async def wait_change(self) -> Status:
        await self._changed.wait()
        return self.status

    async def compiled(self, prompts: Sequence[Checked], key: Hashable = None) -> list[Checked]:
        """Return prompts as `submit` takes them: see `GrammarProcess.compiled`."""
        if all(prompt.params.structured_outputs is None for prompt in prompts):
            return list(prompts)
        assert self.grammars is not None
        try:
            return await self.grammars.compiled(prompts, key)
        except EngineError:
            if self.status.state == "closed":
                raise EngineError(self.status.reason) from None
            raise

    async def ready(self) -> EngineInfo:
        """Wait until the engine is ready; `EngineError` if it failed for good or was closed."""
        while self.status.state in ("loading", "restarting"):
            await self.wait_change()
        return self.require_ready()

    def require_ready(self) -> EngineInfo:
        """Return the engine's description; `EngineError` unless it is ready now."""
        if self.status.state != "ready" or self.info is None:
            verb = "failed" if self.status.state == "failed" else f"is {self.status.state}"
            kind = RefusedError if self.status.refused else EngineError
            raise kind(f"the engine {verb}: {self.status.reason}")
        return self.info

    def loading(self) -> None:
        """Note that the ranks are being started (again)."""
        self.info = None
        if self.status.state != "loading":
            self._set(Status("loading", "the ranks were restarted and load the model"))

    def lost(self, reason: str) -> None:
        """Note that the engine died: every unfinished request fails at once."""
        self._disconnect(f"the engine failed: {reason}")
        if self.status.state not in ("failed", "closed"):
            self._set(Status("restarting", reason))

    def failed(self, reason: str, *, refused: bool = False) -> None:
        """Note that the engine is not restarted: it died too often, or refuses to start."""
        self._disconnect(f"the engine failed: {reason}")
        if self.status.state != "closed":
            self._set(Status("failed", reason, refused))

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | Tokens,
        params: SamplingParams,
        *,
        pin: bool = False,
        quota: tuple[str, int] | None = None,
        prefix: RequestStream | None = None,
        scope: CacheScope = ANY_REQUEST,
    ) -> list[RequestStream]:
        """Submit a request; return a stream for each of its ``params.n`` answers.

        The id must be unique among unfinished requests, the prompt checked by
        `PromptLimits.checked`, structured outputs compiled by `GrammarProcess.compiled`. With
        ``pin`` the prompt is only prefilled, and its caches are kept until the stream is closed.
        ``prefix`` is the stream of such a request, which the prompt continues. Streams have `Token`
        messages, the first one also `Progress` and `PromptLogprobs`.

        Raises `RequestError` with the code ``queue_full``, or if ``prefix`` was closed, and
        `EngineError` if the engine is not ready or has died since ``prefix`` was pinned.
        """
        self.require_ready()
        compiled = params.structured_outputs
        assert isinstance(compiled, GrammarText | None)
        if prefix is not None:
            prefix.require_pinned()
        if not pin:
            self.check_room(params.n)
        ids = answer_ids(request_id, params.n)
        length = len(prompt_ids) + (0 if prefix is None else prefix.prompt_tokens)
        streams = {
            id_: RequestStream(id_, self.abort, self.observer, lasting=pin, prompt_tokens=length)
            for id_ in ids
        }
        assert self._streams.keys().isdisjoint(streams)
        continued = None if prefix is None else prefix.request_id
        prompt = np.asarray(prompt_ids, np.int32)
        values = vars(params) | {"structured_outputs": None}
        text = None if compiled is None else compiled.text
        self.rank0.send(Add(request_id, values, prompt, pin, continued, quota, scope, text))
        self._streams |= streams
        if pin:
            self.observer.pinned(request_id)
        return list(streams.values())

    def check_room(self, requests: int) -> None:
        """Raise `RequestError` (``queue_full``) if ``requests`` more would exceed ``max_queue``."""
        if self.max_queue is not None and self.unfinished + requests > self.max_queue:
            raise RequestError(
                f"the queue is full: {self.unfinished} requests are unfinished and at most "
                f"{self.max_queue} may be; try again later",
                code="queue_full",
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Count a request as unfinished while its body is read; raises as `check_room`."""
        self.check_room(1)
        self._being_read += 1
        try:
            yield
        finally:
            self._being_read -= 1

    def abort(self, request_id: str) -> None:
        """Abort a request and free its cache; ignored if it has ended."""
        if self._streams.pop(request_id, None) is not None:
            self.rank0.send(Abort(request_id))

    async def stats(self, timeout: float = 30.0) -> Counters:
        """Ask the ranks for their counters; `EngineBusyError` after ``timeout`` seconds."""
        self.require_ready()
        tag = next(self._tags)
        future = self._stats[tag] = asyncio.get_running_loop().create_future()
        try:
            self.rank0.send(StatsQuery(tag))
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise EngineBusyError(
                f"the engine is busy and did not answer within {timeout:g} s; try again later"
            ) from None
        finally:
            self._stats.pop(tag, None)

    def shutdown(self, reason: str = "the engine was closed") -> None:
        """Tell the ranks to end; every unfinished request fails at once."""
        if self.status.state == "closed":
            return
        self.rank0.shutdown()
        self._set(Status("closed", reason))
        self._fail_requests(reason)
        if self.grammars is not None:
            self.grammars.end()

    async def close(self) -> None:
        self.shutdown()
        if self.grammars is not None:
            await self.grammars.aclose()
        self._disconnect(self.status.reason)
        self.rank0.close()

    def receive(self, message: ToFrontend) -> None:
        """Take in a message of rank 0: the engine's state, or a part of an answer."""
        match message:
            case Alive():
                self.rank0_pid, self._seconds_left = message.pid, message.seconds_left
            case Ready():
                self.info = message.info
                self.served = True
                self._set(Status("ready"))
            case Stats():
                future = self._stats.get(message.tag)
                if future is not None and not future.done():
                    future.set_result(message.counters)
            case Failed(id=""):
                if self.served:
                    self.lost(message.message)
                else:
                    self.failed(message.message, refused=True)
            case _:
                self._deliver(message)

    def _deliver(self, message: AboutRequest) -> None:
        stream = self._streams.get(message.id)
        if stream is None:
            return  # aborted: the message was sent before the engine knew
        last = isinstance(message, Failed) or (
            isinstance(message, Token) and message.finish is not None
        )
        if last:
            del self._streams[message.id]
        stream.put(message.exception if isinstance(message, Failed) else message, last=last)

    def _disconnect(self, error: str) -> None:
        self.rank0.drop()
        self.rank0_pid = None  # another process may get this id
        self._fail_requests(error)

    def _fail_requests(self, error: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineError(error), last=True)
            self.observer.ended(stream.request_id, "error")
        for future in self._stats.values():
            if not future.done():
                future.set_exception(EngineError(error))

    def _set(self, status: Status) -> None:
        # Failures are not logged here: the code that waits for the engine raises and logs them.
        if status.state == "ready":
            log.info("engine ready")
        elif status.state not in ("failed", "closed"):
            log.info("engine %s: %s", status.state, status.reason)
        self.status = status
        self.start.note(status.state)
        self._changed.set()
        self._changed = asyncio.Event()
