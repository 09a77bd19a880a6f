"""The messages of one request as they come from rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from razor_dist.config.errors import EngineError, RequestError
from razor_dist.frontend.observer import Observer
from razor_dist.protocol.messages import AboutRequest


class RequestStream(AsyncIterator[AboutRequest]):
    """The messages of one request, up to the token that finishes it.

    `close` aborts an unfinished request, and it alone ends a pinned prefix (``lasting``), whose
    messages cease once `Progress` says that it is prefilled. Iteration raises `RequestError` if the
    engine refuses the request, `EngineError` if the engine dies. ``prompt_tokens`` include the
    prefix's. ``observer`` hears of a message when it is read; messages behind a stop string are
    never read.
    """

    def __init__(
        self,
        request_id: str,
        abort: Callable[[str], None],
        observer: Observer,
        *,
        lasting: bool = False,
        prompt_tokens: int = 0,
    ) -> None:
        self.request_id, self.lasting, self.prompt_tokens = request_id, lasting, prompt_tokens
        self._abort, self._observer = abort, observer
        self._queue: asyncio.Queue[AboutRequest | Exception] = asyncio.Queue()
        self.ended = False  # the request has finished, failed or was aborted
        self._failed = False
        self.closed = False  # `close` has ended it, not its last token or a failure

    async def __anext__(self) -> AboutRequest:
        if self.ended and self._queue.empty():
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(item, Exception):
            raise item
        self._observer.received(item)
        return item

    def close(self, reason: str = "abort") -> None:
        """Abort the request, unless it has ended. Never waits.

        ``reason`` is for the metrics: "stop" if the answer was complete before its last token.
        """
        if not self.ended:
            self.ended = self.closed = True
            self._abort(self.request_id)
        # The observer may not have heard of the last message, if that is unread.
        self._observer.ended(self.request_id, "error" if self._failed else reason)

    def require_pinned(self) -> None:
        """Raise unless a request may continue this pinned prefix: see `EngineClient.submit`."""
        if self.closed:  # by another thread, since the caller looked
            raise RequestError("the prefix was released; prefill it again", param="prefix")
        if self.ended:
            raise EngineError("the pinned prefix was lost with its engine; prefill it again")

    def put(self, item: AboutRequest | Exception, *, last: bool) -> None:
        """Add a message or an error for the reader; ``last`` if it ends the request."""
        self._queue.put_nowait(item)
        self.ended = self.ended or last
        self._failed = self._failed or isinstance(item, Exception)
