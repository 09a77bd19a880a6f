"""Files that clients send, read to text by processes of their own (`razor_dist.documents`)."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from weakref import WeakValueDictionary

from razor_dist.config.errors import (
    DocumentError,
    ProcessKilledError,
    ReaderKilledError,
    RequestError,
)
from razor_dist.documents.read import (
    Document,
    ReadLimits,
    kind_of,
    reader_arguments,
    reader_environment,
    reader_output,
)
from razor_dist.frontend.guard import guarded, send_signal

# Large files, and small ones beside them, that are read at a time; others wait.
_AT_ONCE, _SMALL_AT_ONCE = 2, 1
# The largest small file.
_SMALL_BYTES = 2**20

ReadFile = Callable[[bytes | bytearray, str | None, ReadLimits], Awaitable[Document]]


class DocumentReader:
    """Reads files whose kind is found by their content; a text may have ``max_characters``.

    ``read`` reads one, as `read_apart` does.
    """

    def __init__(self, max_characters: int, read: ReadFile | None = None) -> None:
        self._limits = ReadLimits(characters=max_characters)
        self._read = read or read_apart
        self._large = asyncio.Semaphore(_AT_ONCE)
        self._small = asyncio.Semaphore(_SMALL_AT_ONCE)
        # By client and by whether the file is small, while such a file waits or is read.
        self._turns: WeakValueDictionary[tuple[str, bool], asyncio.Lock] = WeakValueDictionary()

    async def read(self, data: bytes | bytearray, name: str, key: str | None = None) -> Document:
        """Return a file's text and pages; if this is cancelled, the process is killed.

        Files of one client (``key``) are read one after the other, so that a second client's need
        not wait for all of them; small files do not wait for large ones.

        Raises `RequestError` (``unreadable_document``) that says what is wrong with the file, and
        `ProcessKilledError` if its reader was ended from outside.
        """
        small = len(data) <= _SMALL_BYTES
        try:
            async with self._turn(key, small), self._small if small else self._large:
                return await self._read(data, kind_of(Path(name)), self._limits)
        except ReaderKilledError as error:
            raise ProcessKilledError(f"the file {error}") from None
        except DocumentError as error:
            raise RequestError(f"the file {error}", code="unreadable_document") from None

    def _turn(self, key: str | None, small: bool) -> AbstractAsyncContextManager[None]:
        if key is None:
            return nullcontext()
        return self._turns.setdefault((key, small), asyncio.Lock())


async def read_apart(data: bytes | bytearray, named: str | None, limits: ReadLimits) -> Document:
    """Return the text of a file of the kind ``named``, read by a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *guarded("razor_dist.documents.read", reader_arguments(None, limits=limits, named=named)),
        stdin=PIPE,
        stdout=PIPE,
        env=reader_environment(),
        start_new_session=True,  # a terminal's Ctrl-C is the server's to handle
    )
    try:
        async with asyncio.timeout(limits.patience):
            output, _ = await process.communicate(data)
    except TimeoutError:
        raise limits.too_slow() from None
    finally:
        send_signal(process, signal.SIGKILL)
        await process.wait()
    assert process.returncode is not None
    text, pages = reader_output(process.returncode, output, limits)
    return Document(text.decode(), pages)
