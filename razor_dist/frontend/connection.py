"""The frontend's end of the socket to rank 0: one connection, in frames of messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from razor_dist.config.errors import EngineError
from razor_dist.protocol.messages import (
    Shutdown,
    ToEngine,
    ToFrontend,
    decode_to_frontend,
    encode,
    read_frame,
)

log = logging.getLogger(__name__)

# sockaddr_un holds 108 bytes, the closing zero included.
_MAX_PATH_BYTES = 107


class RankConnection:
    """Listens at a path for rank 0, which connects again after each restart of the ranks.

    Only the newest connection is used. ``opened`` is called when rank 0 connects, ``handle`` with
    each of its messages, and ``lost`` with the reason when the connection ends by itself or a
    message cannot be handled. A rank 0 that connects after `shutdown` gets the message to end.
    """

    def __init__(
        self,
        path: Path,
        opened: Callable[[], None],
        handle: Callable[[ToFrontend], None],
        lost: Callable[[str], None],
    ) -> None:
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise EngineError(
                f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes; "
                "set TMPDIR to a shorter folder"
            )
        self.path = path
        self.received = 0  # messages of all rank 0s so far
        self._opened, self._handle, self._lost = opened, handle, lost
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ending = False

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    async def listen(self) -> None:
        # Rank 0 connects once it sees the path: a socket refuses until it listens.
        draft = self.path.with_name("new")
        self._server = await asyncio.start_unix_server(self._serve, path=draft)
        draft.chmod(0o600)
        draft.replace(self.path)

    def send(self, message: ToEngine) -> None:
        # Without a connection nothing is sent: the requests fail when its end is noticed.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    def shutdown(self) -> None:
        """Tell rank 0 to end, the present process and any that connects later."""
        self._ending = True
        self.send(Shutdown())

    def drop(self) -> None:
        """Close the connection without calling ``lost``."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
            self._writer = None

    def close(self) -> None:
        """Close the connection and stop listening."""
        self.drop()
        if self._server is not None:
            self._server.close()
            self._server = None
            self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._ending:
            writer.write(encode(Shutdown()))
            writer.close()
            return
        if self._writer is not None:
            self._lost("rank 0 connected anew")
        self._writer = writer
        self._opened()
        try:
            while True:
                message = decode_to_frontend(await read_frame(reader))
                if self._writer is not writer:
                    return  # this rank 0 was given up already
                self.received += 1
                self._handle(message)
        except asyncio.CancelledError:
            pass  # the loop is ending
        except Exception as error:
            reason = "rank 0 closed its connection"
            if not isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                reason = f"rank 0 sent a message that cannot be handled: {error}"
                log.exception(reason)
            if self._writer is writer:
                self._lost(reason)
        finally:
            writer.close()
