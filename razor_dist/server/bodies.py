"""Bodies of requests, read within bounds of size, memory and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from razor_dist.config.errors import RequestError
from razor_dist.config.schema import ServerConfig

# Bytes of a body for which it gets a second more.
_BYTES_PER_SECOND = 64 * 1024


class Body(bytearray):
    """A body that counts for its reader's bound for as long as it is in memory."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader

    def grow(self, chunk: bytes) -> None:
        self._reader.used += len(chunk)
        self += chunk

    def __del__(self) -> None:
        self._reader.used -= len(self)


class BodyReader:
    """Reads bodies; ``used`` is the number of bytes of all that are in memory."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_bytes = int(config.max_body_mb * 2**20)
        self._max_total = max(self._max_bytes, int(config.max_total_body_mb * 2**20))
        self._seconds = config.body_timeout
        self.used = 0

    async def read_json(self, request: Request) -> Body:
        """Return the body of a request that says it is JSON; raises as `read` does."""
        return await self.read(request, "application/json", "JSON")

    async def read(self, request: Request, wanted: str, what: str) -> Body:
        """Return the body of a request whose media type is ``wanted``, which stands for ``what``.

        Raises `RequestError` if it says otherwise (``unsupported_media_type``), is larger than one
        body may be (``body_too_large``, at once if its length is declared), if all bodies together
        are (``bodies_full``), or if it comes too slowly (``body_timeout``).
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A page may send anything else to any server without asking it first.
        if kind != wanted:
            raise RequestError(
                f"the body must be {what} with the header 'Content-Type: {wanted}', not "
                f"{kind or 'without one'!r:.80}",
                code="unsupported_media_type",
            )
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        body = Body(self)
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(begun + self._seconds) as limit:
                async for chunk in request.stream():
                    if len(body) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    if self.used + len(chunk) > self._max_total:
                        raise RequestError(
                            "the requests that are being read fill the memory set aside for them "
                            "(--max-total-body-mb); try again later",
                            code="bodies_full",
                        )
                    body.grow(chunk)
                    limit.reschedule(begun + self._seconds + len(body) / _BYTES_PER_SECOND)
        except TimeoutError:
            raise RequestError(
                f"the body came too slowly: {len(body)} bytes in {self._seconds:g} s and one for "
                "each 64 KiB (--body-timeout)",
                code="body_timeout",
            ) from None
        return body

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body is larger than {self._max_bytes} bytes, the server's limit (--max-body-mb)",
            code="body_too_large",
        )
