"""A child process that answers one question after the other, and may die of any of them.

`ChildProcess` is the frontend's handle of it, `Pipes` the process's own end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

import psutil

from razor_dist.config.errors import ProcessKilledError
from razor_dist.config.memory import die_first
from razor_dist.frontend.guard import child_environment, guarded, send_signal
from razor_dist.protocol.messages import HEADER_SIZE, body_length, read_frame

T = TypeVar("T")

# Error of questions after `ChildProcess.end`.
CLOSED = "the process that was to work on the request is being closed"
# Bytes written to the process at a time, since each write copies what the pipe does not take.
_PIECE_BYTES = 1 << 20
# Time for a process that has closed its pipes to end by itself: its exit code then says more.
_LAST_SECONDS = 1.0


class ProcessDiedError(ConnectionError):
    """The process died; ``code`` is its exit code, or minus a signal's number."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with {code}")
        self.code = code


class Turns:
    """A lock whose waiters take turns by key; waiters of one key are first come, first served."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        self._holder: Hashable = None
        self._locked = False

    async def acquire(self, key: Hashable = None) -> None:
        if not self._locked:
            self._locked, self._holder = True, key
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The lock may have been passed on to this waiter at the same moment.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release()
            raise

    def release(self) -> None:
        """Pass the lock on; the present holder's key becomes the last in turn."""
        if self._holder in self._waiting:
            self._waiting[self._holder] = self._waiting.pop(self._holder)
        while self._waiting:
            key = next(iter(self._waiting))
            turn = self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            if not turn.done():
                self._holder = key
                turn.set_result(None)
                return
        self._locked = False

    def refuse(self, error: Exception) -> None:
        """Raise an error in all waiters."""
        waiting, self._waiting = self._waiting, {}
        for turns in waiting.values():
            for turn in turns:
                if not turn.done():
                    turn.set_exception(error)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))


class ChildProcess:
    """The handle of a process that runs a module, and is started by the first question.

    Frames (`razor_dist.protocol.messages`) go to its standard input and come from its standard
    output. The process is killed with this one, when a question fails, and between two questions
    when its resident memory exceeds ``largest`` bytes; the next question starts another.
    """

    def __init__(self, module: str, *arguments: str, largest: int = 1 << 30) -> None:
        self._command = guarded(module, *arguments)
        self.largest = largest
        self._process: Process | None = None
        self._killed: Process | None = None  # the last process that `close` has killed
        self._turn = Turns()
        self._asking: asyncio.Task[Any] | None = None
        self._ended = False

    @property
    def pid(self) -> int | None:
        """The process's id; None while no process runs."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    @property
    def is_busy(self) -> bool:
        return self._asking is not None and not self._asking.done()

    @property
    def waiting(self) -> int:
        """The number of questions that wait for their turn."""
        return len(self._turn)

    async def in_turn(self, work: Callable[[], Coroutine[Any, Any, T]], key: Hashable = None) -> T:
        """Run ``work``, which uses the process, when it is its turn; keys take turns.

        If this is cancelled, since a client hung up, waiting work is forgotten. Work that has begun
        goes on, and its result is dropped: the process's answer must be read before the next
        question. Raises `ProcessKilledError` once `end` was called.
        """
        if self._ended:
            raise ProcessKilledError(CLOSED)
        await self._turn.acquire(key)
        self._asking = asyncio.create_task(self._work(work))
        # Retrieves the error, which asyncio would log if the caller has gone.
        self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        result: T = await asyncio.shield(self._asking)
        return result

    async def _work(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            result = await work()
            if self._size() > self.largest:
                self.close()
            return result
        finally:
            self._turn.release()

    async def ask(self, seconds: float, *parts: bytes | bytearray) -> bytes:
        """Write a question and return the answer's body; only for work that `in_turn` runs.

        Raises `TimeoutError` after ``seconds`` and `ProcessDiedError`; then the process is killed.
        """
        try:
            process = await self._running()
            async with asyncio.timeout(seconds):
                return await exchange(process, *parts)
        except BaseException:
            self.close()
            raise

    async def _running(self) -> Process:
        if self._ended:
            raise ProcessKilledError(CLOSED)
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                env=child_environment(),
                start_new_session=True,  # a terminal's Ctrl-C is the frontend's to handle
            )
            if self._ended:  # while it was started; `ask` kills it
                raise ProcessKilledError(CLOSED)
            await self._prepare(self._process)
        return self._process

    async def _prepare(self, process: Process) -> None:
        """Send a new process what it needs before the first question."""

    def _size(self) -> int:
        """Resident bytes of the process, 0 if it does not run."""
        with contextlib.suppress(psutil.Error):
            if self.pid is not None:
                return int(psutil.Process(self.pid).memory_info().rss)
        return 0

    async def aclose(self) -> None:
        """As `end`, and wait until the process and the work that uses it have ended."""
        self.end()
        while self._asking is not None and not self._asking.done():
            await asyncio.wait({self._asking})
        if self._killed is not None:
            await self._killed.wait()

    def end(self) -> None:
        """Kill the process for good; waiting and later work fails. Never waits."""
        self._ended = True
        self._turn.refuse(ProcessKilledError(CLOSED))
        self.close()

    def close(self) -> None:
        """Kill the process, if one runs. Never waits."""
        if self._process is not None:
            self._killed, self._process = self._process, None
            send_signal(self._killed, signal.SIGKILL)


async def exchange(process: Process, *parts: bytes | bytearray) -> bytes:
    """Write a question to a process and read its answer's body; `ProcessDiedError` if it dies."""
    assert process.stdin is not None and process.stdout is not None
    try:
        for part in parts:
            with memoryview(part) as view:  # an error's traceback would hold it
                for begin in range(0, len(part), _PIECE_BYTES):
                    process.stdin.write(view[begin : begin + _PIECE_BYTES])
                    await process.stdin.drain()
        return await read_frame(process.stdout)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise ProcessDiedError(await _exit_code(process)) from None


async def _exit_code(process: Process) -> int:
    """Return the exit code of a process that has closed its pipes; it is killed if it stays."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_SECONDS):
            return await process.wait()
    send_signal(process, signal.SIGKILL)
    await process.wait()
    return 1  # a failure: this SIGKILL is not from outside


class Pipes:
    """Questions on standard input and answers on standard output, as frames.

    From construction on, what libraries print goes to standard error instead of between the frames,
    and the kernel ends this process before others when memory is short.
    """

    def __init__(self) -> None:
        die_first()
        self._source, self._sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def read(self) -> bytes | None:
        """Return the body of the next question; None at the end of the input."""
        header = self._source.read(HEADER_SIZE)
        return self._source.read(body_length(header)) if header else None

    def read_bytes(self, size: int) -> bytes:
        """Return the ``size`` bytes that follow a question."""
        return self._source.read(size)

    def write(self, frame: bytes) -> None:
        self._sink.write(frame)
        self._sink.flush()
