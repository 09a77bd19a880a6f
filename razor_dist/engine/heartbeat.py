"""Signs of life, which rank 0 sends from a thread of its own.

A chunk may keep rank 0's main thread busy for minutes, so silence between its messages means
nothing. A thread beside it shows that the process runs, though not that the main thread gets on: a
rank that waits for another in vain is found by the collectives' time-out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Self

from razor_dist.engine.messages import Message

# Seconds between two signs of life, if that is not too long for the frontend's patience.
_INTERVAL = 1.0


def interval(timeout: float) -> float:
    """Seconds between two signs of life of which a frontend with that patience misses none."""
    return min(_INTERVAL, timeout / 4)


class Heartbeat:
    """Sends ``alive`` messages, ``seconds`` apart, while the ``with`` block lasts.

    ``send`` may be called from any thread. Its first `OSError` ends the heartbeat: the main thread
    finds out by itself that the frontend has gone.
    """

    def __init__(self, send: Callable[[Message], None], seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._over = threading.Event()
        # A daemon: a frontend that reads no more can block it in the socket.
        self._thread = threading.Thread(target=self._run, name="razor-heartbeat", daemon=True)

    def _run(self) -> None:
        message = {"t": "alive", "pid": os.getpid()}
        try:
            self._send(message)
            while not self._over.wait(self._seconds):
                self._send(message)
        except OSError:
            return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
