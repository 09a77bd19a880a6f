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
    """Runs coroutines, for any thread, until it is finished; `EngineError` from then on.

    In a forked child it raises `EngineError` too: fork copies no threads, so that a call would wait
    for ever.
    """

    def __init__(self) -> None:
        self.finished = False
        self._pid = os.getpid()
        # Reentrant: garbage collection may finish it in a thread that submits.
        self._submitting = threading.RLock()
        self._loop = asyncio.new_event_loop()
        # A daemon: else the interpreter would wait for it before it runs the exit handlers.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="razor-engine", daemon=True
        )
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_forked:  # another thread may have held the lock meanwhile
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
        """Run what ends a piece of work, as `run` does; nothing once the loop is finished.

        In the loop's own thread, which cannot wait for itself, it is done after this returns:
        garbage collection may end the work there.
        """
        if self.finished or self._is_forked:
            coroutine.close()
        elif threading.current_thread() is self._thread:
            self.submit(coroutine)
        else:
            self.run(coroutine)

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what ends everything, cancel what is left, and end the thread.

        Nothing in a forked child: all of that is its parent's.
        """
        if self._is_forked:
            coroutine.close()
            return

        async def last() -> None:
            try:
                await coroutine
            finally:
                # They would never go on, and their callers wait for them for ever.
                left = asyncio.all_tasks() - {asyncio.current_task()}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
                self._loop.call_soon(self._loop.stop)

        with self._submitting:  # what was submitted before is a task by then
            self.finished = True
            future = asyncio.run_coroutine_threadsafe(last(), self._loop)
        # Garbage collection may end an LLM in this very thread, which cannot wait for itself.
        if threading.current_thread() is not self._thread:
            future.result()
            self._thread.join()
            self._loop.close()
