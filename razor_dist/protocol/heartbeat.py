"""Signs of life, which rank 0 sends from a thread of its own.

A chunk may keep rank 0's main thread busy for minutes, so silence between its messages means
nothing. A thread beside it shows that the process runs, though not that the main thread gets on: a
rank that waits for another in vain is found by the collectives' time-out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from razor_dist.protocol.messages import Alive

# Seconds between two signs of life, if that is not too long for the frontend's patience.
_INTERVAL_SECONDS = 1.0
# Seconds to wait for the thread's end: a frontend that no longer reads can block it.
_GRACE_SECONDS = 1.0


def interval(timeout: float) -> float:
    """Seconds between two signs of life, for a frontend that waits ``timeout`` seconds for one."""
    return min(_INTERVAL_SECONDS, timeout / 4)


@contextmanager
def heartbeat(
    send: Callable[[Alive], None], seconds: float, seconds_left: Callable[[], dict[str, float]]
) -> Iterator[None]:
    """Send ``alive`` messages, ``seconds`` apart, while the ``with`` block lasts.

    ``send`` and ``seconds_left`` may be called from any thread. The first `OSError` ends the
    heartbeat: the main thread finds out by itself that the frontend has gone.
    """
    over = threading.Event()

    def run() -> None:
        with suppress(OSError):
            ended = False
            while not ended:
                send(Alive(os.getpid(), seconds_left()))
                ended = over.wait(seconds)

    # A daemon: a frontend that no longer reads can block it in the socket.
    thread = threading.Thread(target=run, name="razor-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # Its closures may be the last that hold the engine. A daemon thread that frees tensors
        # while the interpreter ends is aborted: "terminate called without an active exception".
        thread.join(_GRACE_SECONDS)
