"""Starts servers as processes and reads what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A server on a free port, ended with the ``with`` block.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments, ``--port 0`` excepted.
    cwd : Path
        Its working directory.
    """

    def __init__(self, *command: str, cwd: Path = ROOT) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the object
        # Without an empty entry, which would be the working directory.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [*command, "--port", "0"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        family = self.family()
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            if error is not None:
                print(self.log)
        assert wait_until(lambda: not alive(family), 10), f"orphans: {alive(family)}"

    @property
    def log(self) -> str:
        """All that the process and its children have printed."""
        self._log.seek(0)
        return self._log.read()

    def url(self, line: str = r"^Serving .* on (http://\S+)$", timeout: float = 60.0) -> str:
        """The server's address, once it has printed the line that tells it; of several the last."""

        def found() -> list[str]:
            assert self.process.poll() is None, self.log
            return re.findall(line, self.log, re.MULTILINE)

        assert wait_until(found, timeout), self.log
        return found()[-1]

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def fake_server(*arguments: str) -> ServerProcess:
    """``razor-dist serve`` with two ranks that compute nothing."""
    return server_on("tests.fake_engine", *arguments)


def server_on(worker: str, *arguments: str) -> ServerProcess:
    """``razor-dist serve`` with two ranks of another module."""
    command = [sys.executable, "-m", "tests.server.serve_on", worker]
    return ServerProcess(*command, "--world-size", "2", *arguments)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run."""
    return [p for p in processes if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


def wait_until(condition: Callable[[], Any], timeout: float) -> bool:
    """Poll ``condition``; return whether it came true within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def health(url: str) -> tuple[int, str]:
    """Status code and state of a server."""
    response = httpx.get(f"{url}/health")
    return response.status_code, response.json()["status"]
