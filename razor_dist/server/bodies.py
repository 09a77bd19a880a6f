"""Bodies of requests, read within bounds of size, memory and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from razor_dist.config.errors import RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.server.request_log import current_record

# A step of a body's progress, for which the body gets one more second.
_STEP_BYTES = 64 * 1024
# A body that is not small must come a step further in this time.
STALL_SECONDS = 10.0
# The same while another body lacks room.
PATIENCE_SECONDS = 3.0
# The largest small body.
_SMALL_BYTES = 256 * 1024
# Room beyond the bound for small bodies alone.
_RESERVE_BYTES = 8 * 2**20
_JSON = "application/json"


class Body(bytearray):
    """A body that counts for its reader's bound for as long as it is in memory."""

    progress_at = 0.0  # when it last came a step further, on the loop's clock
    dropped = False
    held = 0  # bytes that count beside its own

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader

    def grow(self, chunk: bytes) -> None:
        self._reader.used += len(chunk)
        self += chunk

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes, of a text read from the body, while the body is in memory.

        Raises `RequestError` (``bodies_full``) if there is no room for them.
        """
        self._reader.make_room(self, size, asyncio.get_running_loop().time())
        self._reader.used += size
        self.held += size

    def drop(self) -> None:
        """Give up what has come, for others."""
        self._reader.used -= len(self) + self.held
        self.clear()
        self.held = 0
        self.dropped = True

    def answered(
        self, answer: bytes, media_type: str = _JSON, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return a response, which counts in the body's place until it is sent.

        Raises `RequestError` as `BodyReader.response` does.
        """
        self.drop()
        return self._reader.response(answer, media_type, headers)

    def __del__(self) -> None:
        self._reader.used -= len(self) + self.held


class BodyReader:
    """Reads bodies; ``used`` is the number of bytes of all that are in memory."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_bytes = int(config.max_body_mb * 2**20)
        self._max_total = max(self._max_bytes, int(config.max_total_body_mb * 2**20))
        self._seconds = config.body_timeout
        # Bodies of a step and more that are being read; the first has stalled for the longest.
        self._reading: dict[asyncio.Timeout, Body] = {}
        self.used = 0

    def response(
        self, answer: bytes, media_type: str = _JSON, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return a response that counts as a body until it is sent.

        Raises `RequestError` if there is no room for it now (``bodies_full``), or if there never
        is (``answer_too_large``).
        """
        if len(answer) > self._room(len(answer)):
            raise RequestError(
                f"the answer would have {len(answer)} bytes, more than the {self._max_total} that "
                "all requests and such answers may take (--max-total-body-mb); ask for less at "
                "once",
                code="answer_too_large",
            )
        body = Body(self)
        self.make_room(body, len(answer), asyncio.get_running_loop().time())
        body.grow(answer)
        own = {"Content-Length": str(len(answer)), **(headers or {})}
        return StreamingResponse(_pieces(body), headers=own, media_type=media_type)

    async def read_json(self, request: Request) -> Body:
        """Return the body of a request that says it is JSON; raises as `read` does."""
        return await self.read(request, _JSON, "JSON")

    async def read(self, request: Request, wanted: str = "", what: str = "") -> Body:
        """Return the body of a request.

        Its media type must be ``wanted``, which errors call ``what``; "" allows any.

        Raises `RequestError` if it has another type or is compressed (``unsupported_media_type``),
        is larger than one body may be (``body_too_large``, at once if its length is declared), if
        all bodies together are (``bodies_full``), or if it comes too slowly (``body_timeout``).
        When there is no room, the other body that has stalled for the longest is dropped.
        """
        _check_kind(request.headers, wanted, what)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        body, loop = Body(self), asyncio.get_running_loop()
        begun, limit = loop.time(), asyncio.timeout(self._seconds)
        try:
            async with limit:
                async for chunk in request.stream():
                    if body.dropped:  # with the time-out on its way
                        raise TimeoutError
                    if len(body) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    self.make_room(body, len(chunk), loop.time())
                    steps = len(body) // _STEP_BYTES
                    body.grow(chunk)
                    if len(body) // _STEP_BYTES > steps:
                        body.progress_at = loop.time()
                        self._reading.pop(limit, None)
                        self._reading[limit] = body
                    end = begun + self._seconds + len(body) / _STEP_BYTES
                    if len(body) > _SMALL_BYTES:
                        end = min(end, body.progress_at + STALL_SECONDS)
                    limit.reschedule(end)
        except BaseException as error:
            body.drop()  # now: the traceback may keep it for a while
            if not isinstance(error, TimeoutError):
                raise
            raise RequestError(
                f"the body came too slowly: it has {self._seconds:g} s and one for each 64 KiB "
                f"(--body-timeout), beyond 256 KiB {STALL_SECONDS:g} s at most for each 64 KiB, "
                f"and {PATIENCE_SECONDS:g} s when others lack the room",
                code="body_timeout",
            ) from None
        finally:
            self._reading.pop(limit, None)
        return body

    def _room(self, size: int) -> int:
        """Return the bytes that all bodies may have together if one has ``size``."""
        return self._max_total + (_RESERVE_BYTES if size <= _SMALL_BYTES else 0)

    def make_room(self, body: Body, size: int, now: float) -> None:
        """See to it that a body can grow by ``size`` bytes, or raise `RequestError`."""
        room = self._room(len(body) + size)
        while size and self.used + size > room:
            limit, stalled = next(iter(self._reading.items()), (None, body))
            if limit is None or stalled is body or now - stalled.progress_at < PATIENCE_SECONDS:
                raise RequestError(
                    "the requests that are being read fill the memory set aside for them "
                    "(--max-total-body-mb); try again later",
                    code="bodies_full",
                )
            del self._reading[limit]
            stalled.drop()
            if not limit.expired():
                limit.reschedule(now)

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body is larger than {self._max_bytes} bytes, the server's limit (--max-body-mb)",
            code="body_too_large",
        )


def _check_kind(headers: Mapping[str, str], wanted: str, what: str) -> None:
    """Raise `RequestError` if a body is not of the media type ``wanted``, or is compressed."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page may send anything else to any server without asking it first.
    if wanted and kind != wanted:
        raise RequestError(
            f"the body must be {what} with the header 'Content-Type: {wanted}', not "
            f"{kind or 'without one'!r:.80}",
            code="unsupported_media_type",
        )
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            f"Content-Encoding {encoding!r:.80} is not supported; send the body as it is",
            code="unsupported_media_type",
        )


def in_pieces(answer: bytes) -> Response:
    """Return a response of JSON; a client must take each piece in time, and not all of it."""
    if len(answer) <= _STEP_BYTES:
        return Response(answer, media_type=_JSON)
    length = {"Content-Length": str(len(answer))}
    return StreamingResponse(_pieces(answer), headers=length, media_type=_JSON)


async def _pieces(answer: bytes | Body) -> AsyncIterator[bytes]:
    current_record().begun = True
    for begin in range(0, len(answer), _STEP_BYTES):
        yield bytes(memoryview(answer)[begin : begin + _STEP_BYTES])
