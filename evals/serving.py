"""A server as a process of its own, for evaluations that go through HTTP."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

# The first start converts the embedded model; eight ranks may share two cores.
START_SECONDS = 600.0
_STOP_SECONDS = 20.0
_SERVING = re.compile(r"Serving .* on (http://\S+)")


class ServingError(Exception):
    """The server cannot be used; the message says why."""


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """``razor-dist serve`` on a free port, ended however the block is left.

    Parameters
    ----------
    *flags : str
        Of the command.

    Yields
    ------
    str
        Its address, once it is ready.

    Raises
    ------
    ServingError
        If it does not become ready.
    """
    code = (
        "import sys; from razor_dist.frontend.guard import die_with_parent; "
        f"die_with_parent({os.getpid()}); "  # even if this process is killed
        "from razor_dist.cli import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port=0", "--log-level=warning", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is ours: it ends the server below, in order
    )
    try:
        yield _address(process)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    """The address that the server prints once it is ready."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:  # to the end: a full pipe would stop the server
            match = _SERVING.search(line)
            if match:
                found.put(match[1])
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        url = found.get(timeout=START_SECONDS)
    except queue.Empty:
        raise ServingError(f"the server was not ready within {START_SECONDS:.0f} s") from None
    if url is None:
        raise ServingError(f"the server ended with code {process.wait()}; its message is above")
    return url
