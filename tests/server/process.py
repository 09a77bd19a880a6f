"""Starts servers as processes and reads what they say."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from razor_dist.evals import serving
from razor_dist.evals.serving import wait_until as wait_until

ROOT = Path(__file__).parents[2]


class ServerProcess(serving.ServerProcess):
    """A server on a free port with this checkout's package; it must end by itself, and whole."""

    def __init__(self, *command: str, cwd: Path = ROOT) -> None:
        # Without an empty entry, which would be the working directory.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = (*command, "--port", "0")
        super().__init__(*command, cwd=cwd, env={**os.environ, "PYTHONPATH": path})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        family = self.family()
        super().__exit__(kind, error, trace)
        if error is not None:
            print(self.log)
        assert not self.ended_late
        assert wait_until(lambda: not alive(family), 10), f"orphans: {alive(family)}"

    def url(self, line: str = serving.SERVING, timeout: float = 60.0) -> str:
        try:
            return super().url(line, timeout)
        except serving.ServingError as error:
            raise AssertionError(f"{error}: {self.log}") from None


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


def health(url: str) -> tuple[int, str]:
    """Status code and state of a server."""
    response = httpx.get(f"{url}/health")
    return response.status_code, response.json()["status"]


def hang_up(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
    """Ask for a completion that never comes, and leave once the engine, idle before, has it."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            while (await client.get("/stats")).json()["running"] == 0:
                await asyncio.sleep(0.02)
            asked.cancel()

    asyncio.run(main())


def free_ports(count: int) -> list[int]:
    """Ports for programs that take no 0, below those that the kernel gives to others meanwhile."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(end // 2, end)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


def folder(parent: Path, name: str) -> str:
    """A model folder whose name tells `tests.fake_engine` how to fail; it has no tokenizer."""
    path = parent / name
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    return str(path)
