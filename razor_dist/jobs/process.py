"""A function in a process of its own: its memory, crashes and time touch no other."""

from __future__ import annotations

import os
import pkgutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, Self

from razor_dist.config.errors import RazorError
from razor_dist.frontend.guard import guarded


class Child:
    """A new process that calls ``function(connection, *arguments)``; it dies with this one.

    ``connection`` is the other end of the child's. Function and arguments travel by pickle; a
    function that is not imported here is given as ``module:name``. ``output`` takes all that is
    printed, by default this process's own.
    """

    def __init__(
        self,
        function: Callable[..., object] | str,
        *arguments: Any,
        output: IO[str] | int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            guarded(__name__, str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
            env=env,
        )
        theirs.close()
        # If it has ended before it read this, `recv` says so. Modules may lie beside a script.
        with suppress(OSError):
            self.connection.send(sys.path)
            self.connection.send((function, arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self) -> int:
        """Wait until the process has ended, kill its children, and return its exit code."""
        with suppress(ChildProcessError):  # another thread has called `end`
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # and do not reap it
        return self._kill()

    def end(self) -> None:
        """Kill the process and its children, also in the midst of another thread's call."""
        self._kill()
        self.connection.close()

    def _kill(self) -> int:
        if self.process.returncode is None:  # its id, if dead, is still its group's
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def call(
    function: Callable[..., dict[str, Any]],
    *arguments: Any,
    output: IO[str] | int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Call a function in a `Child`; return its result, or ``{"failed": reason}``."""
    with Child(_answer, function, *arguments, output=output, env=env) as child:
        try:
            found: dict[str, Any] = child.connection.recv()
        except (EOFError, OSError):  # a reset, if it ended before it had read the function
            code = child.wait()
            return {"failed": f"ended by signal {-code}" if code < 0 else f"exit code {code}"}
        return found


def _answer(connection: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        found = function(*arguments)
    except Exception as error:
        traceback.print_exc()
        own = isinstance(error, RazorError)  # whose message says all
        found = {"failed": str(error) if own else f"{type(error).__name__}: {error}"}
    connection.send(found)


if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    sys.path.extend(place for place in connection.recv() if place not in sys.path)
    function, arguments = connection.recv()
    if isinstance(function, str):
        function = pkgutil.resolve_name(function)
    function(connection, *arguments)
