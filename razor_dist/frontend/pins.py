"""Prefixes that an engine keeps for a client until they are released."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from razor_dist.config.errors import RequestError
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.stream import RequestStream
from razor_dist.protocol.messages import CacheScope, Progress, Tokens
from razor_dist.protocol.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class Pin:
    """A pinned prefix, from its submission on; requests may continue it at once.

    ``tokens`` include the tokens of ``behind``, which are neither sent nor prefilled again. Raises
    as `EngineClient.submit`; the engine's refusal is in ``error``. If the engine refuses a
    ``hint``, requests go on without it.
    """

    def __init__(
        self,
        client: EngineClient,
        tokens: Tokens,
        *,
        behind: Pin | None = None,
        quota: tuple[str, int] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        hint: bool = False,
    ) -> None:
        base, before = (0, None) if behind is None else (behind.tokens, behind.stream)
        self.behind = behind
        self.hint = hint
        self.stream: RequestStream
        self.tokens: int = len(tokens)
        self.nbytes = 0
        [self.stream] = client.submit(
            uuid.uuid4().hex,
            tokens[base:],
            SamplingParams(priority=priority),
            pin=True,
            quota=quota,
            prefix=before,
            scope=CacheScope(cache_salt),
        )
        self.cached: int | None = None  # tokens found in the caches at its admission
        self.is_whole = False  # all tokens are prefilled
        self.error: Exception | None = None
        self.listeners: set[Callable[[Progress], None]] = set()
        self._reading = asyncio.create_task(self._read())

    @property
    def is_kept(self) -> bool:
        """False once the engine has refused it or has died, or `close` was called."""
        return not self.stream.ended

    def close(self) -> None:
        self.behind = None
        self._reading.cancel()
        self.stream.close()

    async def _read(self) -> None:
        try:
            async for message in self.stream:
                if isinstance(message, Progress):
                    if self.cached is None:
                        self.cached = message.cached
                    self.nbytes = message.nbytes
                    self.is_whole = message.processed == message.total
                    for listener in list(self.listeners):
                        listener(message)
        except Exception as error:
            self.error = error
            self.stream.close()
            if self.hint and getattr(error, "code", None) is not None:
                log.info("a context is not kept: %s", error)


class Pinned:
    """The prefix that a request's prompts continue: the last, and longest, of ``pins``.

    Pins in ``new`` were made for this request. The prompts wait for the new pins behind the last
    old pin; new pins in front of an old one are read beside the answer. ``end`` is called once,
    when the request has ended, with True if it was answered.
    """

    def __init__(
        self, pins: Sequence[Pin], new: Sequence[Pin], end: Callable[[bool], None]
    ) -> None:
        self._pins, self._end = pins, end
        self._awaited = [*takewhile(lambda pin: pin in new, reversed(pins))][::-1]
        self._beside = [pin for pin in new if pin not in self._awaited]
        self.last: Pin | None = pins[-1]
        self._heard: dict[Pin, Callable[[Progress], None]] = {}
        self._closed = False

    @property
    def error(self) -> Exception | None:
        """The first error of a pin without which the request cannot go on; else None."""
        for pin in self._pins:
            if pin.error and not (pin.hint and isinstance(pin.error, RequestError)):
                return pin.error
        return None

    def leave_out(self, why: Exception) -> bool:
        """Leave out the last pin if it is a hint: the prompts then continue the pin before it.

        False if it is no hint. ``why`` is logged.
        """
        last = self.last
        if last is None or not last.hint:
            return False
        lower = [pin for pin in (last.behind, *self._pins) if pin is not None and pin.is_kept]
        shorter = (pin for pin in lower if pin.tokens < last.tokens)
        self.last = max(shorter, key=lambda pin: pin.tokens, default=None)
        if last.error is None:  # the pin's own error was logged already
            log.info("a context is given up for its own request: %s", why)
        last.close()
        self._awaited = [pin for pin in self._awaited if pin.is_kept]
        return True

    def counts(self, cached: int) -> tuple[int, int]:
        """Split a prompt's ``cached`` tokens: cached before the request, and by its new pins."""
        new = sum(pin.tokens - pin.cached for pin in self._awaited if pin.cached is not None)
        return cached - new, new

    def listen(self, listener: Callable[[bool, Progress], None]) -> None:
        """Call ``listener`` with the progress of pins that are read before the request's prompts.

        Its first argument is True for a pin that was made for this request.
        """
        for pin in self._pins:
            if not (pin.is_whole or pin in self._beside):
                self._heard[pin] = partial(listener, pin in self._awaited)
                pin.listeners.add(self._heard[pin])

    def close(self, *, answered: bool = False) -> None:
        if not self._closed:
            self._closed = True
            for pin, hear in self._heard.items():
                pin.listeners.discard(hear)
            self._end(answered)
