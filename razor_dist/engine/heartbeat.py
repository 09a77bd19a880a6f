"""Signs of life: rank 0 sends them from a thread of its own, the frontend waits for them.

A chunk may keep rank 0's main thread busy for minutes, so that silence between its messages means
nothing. A thread beside it shows that the process runs. That the main thread gets on it does not
show: a rank that waits for another in vain is found by the collectives' time-out.

A rank 0 that has not connected yet sends nothing. It connects before it loads anything, so what it
does until then is to import its libraries, and more than `patience` says of that is a failure too.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from razor_dist.engine.messages import Message
from razor_dist.frontend.client import EngineClient

# Seconds between two signs of life, if that is not too long for the frontend's patience.
_INTERVAL = 1.0
# Seconds that rank 0 gets to import its libraries and connect, however short the frontend's
# patience is with a silence: cold disks of many ranks take minutes.
_LEAST_PATIENCE = 120.0


def interval(timeout: float) -> float:
    """Seconds between two signs of life of which a frontend with that patience misses none."""
    return min(_INTERVAL, timeout / 4)


def patience(timeout: float) -> float:
    """Seconds until rank 0 must have connected: ten ``heartbeat_timeout``, at least 120."""
    return max(_LEAST_PATIENCE, 10 * timeout)


class Heartbeat:
    """Sends ``alive`` messages from a thread while the ``with`` block lasts.

    Parameters
    ----------
    send : callable
        Sends a message; may be called from any thread. The first `OSError` ends the heartbeat:
        the main thread finds out by itself that the frontend has gone.
    seconds : float
        Between two messages.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()


async def silence(client: EngineClient, timeout: float) -> str:
    """Wait until a connected rank 0 has been silent for too long, or none has connected in time.

    Only time in which this process runs is counted: a frontend that was stopped itself finds, when
    it goes on, old signs of life that it has not read yet.

    Parameters
    ----------
    client : EngineClient
    timeout : float
        The setting ``heartbeat_timeout``: seconds of silence that are too long; without a
        connection, `patience` of it are.

    Returns
    -------
    str
        What happened, in words.
    """
    step, silent, before = interval(timeout), 0.0, (client.connected, client.received)
    while silent < (timeout if client.connected else patience(timeout)):
        await asyncio.sleep(step)
        now = client.connected, client.received
        silent, before = (silent + step if now == before else 0.0), now
    if client.connected:
        return f"rank 0 gave no sign of life for {timeout:g} s"
    return f"rank 0 did not connect within {patience(timeout):g} s"
