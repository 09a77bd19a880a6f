"""An event loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from razor_dist.config.errors import EngineError

T = TypeVar("T")

CLOSED = "the LLM was closed; make a new one"
FORKED = (
    "this process was forked from the one that made the LLM, which alone can call it: make another "
    "LLM here, or start this process with multiprocessing's spawn"
)


class LoopThread:
    """Runs coroutines for any thread, until it is finished.

    Calls then raise `EngineError`. So do calls in a forked child, which has no copy of the thread
    and would wait for ever.
    """

    def __init__(self) -> None:
        self.finished = False
        self._pid = os.getpid()
        # Reentrant: garbage collection may call `finish` in a thread that submits.
        self._submitting = threading.RLock()
        self._loop = asyncio.new_event_loop()
        # A daemon: else the interpreter would wait for the thread before the exit handlers end it.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="razor-engine", daemon=True
        )
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_forked:  # before the lock, which another thread may have held at the fork
            coroutine.close()
            raise EngineError(FORKED)
        with self._submitting:
            if not self.finished:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise EngineError(CLOSED)

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            if not self.finished:
                raise
            raise EngineError(CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def tidy(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the clean-up of a piece of work, as `run` does; nothing once the loop is finished.

        In the loop's own thread, where garbage collection may call this, the clean-up runs after
        this returns: the thread cannot wait for itself.
        """
        if self.finished or self._is_forked:
            coroutine.close()
        elif threading.current_thread() is self._thread:
            self.submit(coroutine)
        else:
            self.run(coroutine)

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the last clean-up, cancel all other tasks, and end the thread.

        Does nothing in a forked child, since the thread and its work are its parent's.
        """
        if self._is_forked:
            coroutine.close()
            return

        async def last() -> None:
            try:
                await coroutine
            finally:
                # Tasks left over would never go on, and their callers would wait for ever.
                left = asyncio.all_tasks() - {asyncio.current_task()}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
                self._loop.call_soon(self._loop.stop)

        with self._submitting:  # work submitted before has its task before ``last`` runs
            self.finished = True
            future = asyncio.run_coroutine_threadsafe(last(), self._loop)
        # Garbage collection may call this in the loop's own thread, which cannot wait for itself.
        if threading.current_thread() is not self._thread:
            future.result()
            self._thread.join()
            self._loop.close()
