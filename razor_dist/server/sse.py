"""Server-sent events: a request's answers as they come."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from razor_dist.api.errors import Failure
from razor_dist.api.formats import Format
from razor_dist.api.logprobs import Json
from razor_dist.config.errors import RazorError
from razor_dist.frontend.answers import ChoiceEvent
from razor_dist.frontend.assembler import TextPiece
from razor_dist.server.request_log import current_record

log = logging.getLogger(__name__)

# Seconds of silence after which heartbeats come only this often. A prompt may take 45 minutes to
# read on a CPU, and Go's most used client ends a stream after 300 lines without data: 53 minutes.
# Proxies and clients that give a silent stream up wait 30 seconds or more.
_LONG_SILENCE_SECONDS, _RARE_HEARTBEAT_SECONDS = 60.0, 24.0


async def stream(
    events: AsyncIterator[ChoiceEvent | None],
    form: Format,
    *,
    include_usage: bool,
    continuous_usage: bool = False,
    heartbeat: float = math.inf,
) -> AsyncIterator[str]:
    """Stream the text of server-sent events, with a heartbeat for each event that is ``None``.

    There is one too after ``heartbeat`` seconds of tokens that show nothing, as those of a tool's
    call. In a long silence heartbeats are rarer. The opening comes at once, or with the first event
    if the format `opens_late`. With ``include_usage`` the last chunk has the token counts, and the
    others ``"usage": null``, or the counts so far with ``continuous_usage``.
    """
    sent = 0  # tokens of the answers
    clock = asyncio.get_running_loop().time

    def line(chunk: Json) -> str:
        if include_usage:
            chunk["usage"] = form.usage(sent) if continuous_usage else None
        return form.frame(chunk)

    def opened() -> Iterator[str]:
        yield from map(line, form.opening())  # shaped when it is sent

    def framed(event: ChoiceEvent) -> list[str]:
        if isinstance(event.what, TextPiece):
            return list(map(line, form.piece(event.index, event.what)))
        return list(map(line, form.progress(event.index, event.what)))

    try:
        opening = opened()
        if not form.opens_late:
            for text in opening:
                yield text
        last = shown = clock()
        async for event in events:
            lines: list[str] = []
            if event is not None:
                current_record().begun = True
                lines = list(opening)
                sent += isinstance(event.what, TextPiece)
                lines += await asyncio.to_thread(framed, event) if form.is_slow else framed(event)
            for text in lines:
                yield text
                last = shown = clock()
            due = event is None or clock() - last >= heartbeat
            rare = clock() - shown > _LONG_SILENCE_SECONDS
            if not lines and due and (not rare or clock() - last >= _RARE_HEARTBEAT_SECONDS):
                yield form.heartbeat
                last = clock()
        for chunk in form.closing(include_usage):
            yield form.frame(chunk)
    except Exception as error:
        # The status line has gone out, so the stream must tell it.
        if not isinstance(error, RazorError):
            log.exception("a stream failed")
        yield "".join(map(form.frame, form.failure(Failure.of(error))))
    yield form.end


class EventStream(StreamingResponse):
    """A streaming response that calls ``close`` however it ends, a vanished client included.

    A generator's own ``finally`` would not do: if the client is gone before the first byte is
    sent, the generator is never started.
    """

    def __init__(self, lines: AsyncIterator[str], *, close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
