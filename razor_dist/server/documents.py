"""Files that clients send, read to text by processes of their own (`razor_dist.documents`)."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE
from pathlib import Path

from razor_dist.config.errors import (
    DocumentError,
    ProcessKilledError,
    ReaderKilledError,
    RequestError,
)
from razor_dist.documents.read import (
    ReadLimits,
    kind_of,
    reader_arguments,
    reader_environment,
    reader_output,
)
from razor_dist.frontend.guard import guarded, send_signal

# Files that are read at a time; others wait.
_AT_ONCE = 2


class DocumentReader:
    """Reads files whose kind is found by their content; a text may have ``max_characters``."""

    def __init__(self, max_characters: int) -> None:
        self._limits = ReadLimits(characters=max_characters)
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def read(self, data: bytes | bytearray, name: str) -> bytes:
        """Return a file's text in UTF-8; if this is cancelled, the process is killed.

        Raises `RequestError` (``unreadable_document``) that says what is wrong with the file.
        """
        try:
            async with self._room:
                return await self._read(data, kind_of(Path(name)))
        except ReaderKilledError as error:
            raise ProcessKilledError(f"the file {error}") from None
        except DocumentError as error:
            raise RequestError(f"the file {error}", code="unreadable_document") from None

    async def _read(self, data: bytes | bytearray, named: str | None) -> bytes:
        arguments = reader_arguments(None, limits=self._limits, named=named)
        process = await asyncio.create_subprocess_exec(
            *guarded("razor_dist.documents.read", arguments),
            stdin=PIPE,
            stdout=PIPE,
            env=reader_environment(),
            start_new_session=True,  # a terminal's Ctrl-C is the server's to handle
        )
        try:
            async with asyncio.timeout(self._limits.patience):
                output, _ = await process.communicate(data)
        except TimeoutError:
            raise self._limits.too_slow() from None
        finally:
            send_signal(process, signal.SIGKILL)
            await process.wait()
        assert process.returncode is not None
        text, _ = reader_output(process.returncode, output, self._limits)
        return text
