"""One generation of rank processes on this host: started together, ended together."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from razor_dist.config.cores import set_library_defaults
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.guard import child_environment, guarded, send_signal


class RankExit(NamedTuple):
    """A rank that ended: the exit code of its process, and a reason if one is known."""

    rank: int
    code: int
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"rank {self.rank} ended: {self.reason}"
        if self.code >= 0:
            return f"rank {self.rank} exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"rank {self.rank} was killed by {name}"


class Ranks(ABC):
    """One generation of ranks, however they were started.

    ``ends`` has a coroutine for each rank that waits for its end.
    """

    def __init__(self, ends: Iterable[Coroutine[Any, Any, RankExit]]) -> None:
        self._ends = [asyncio.create_task(end) for end in ends]

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids by rank, each on its host; empty if they did not all start."""

    @abstractmethod
    async def stop(self, patience: float = 2.0) -> None:
        """Terminate the ranks that still run, and after ``patience`` seconds `kill` them."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the ranks that still run, without waiting."""

    async def first_exit(self) -> RankExit:
        """Wait until a rank ends; if several have, return the lowest rank's exit."""
        await asyncio.wait(self._ends, return_when=asyncio.FIRST_COMPLETED)
        return next(end.result() for end in self._ends if end.done())

    async def wait(self, timeout: float) -> list[RankExit]:
        """Wait up to ``timeout`` seconds for all ranks to end; return the exits so far."""
        await asyncio.wait(self._ends, timeout=timeout)
        return [end.result() for end in self._ends if end.done()]


# (settings, private empty folder, path of the frontend's socket) -> ranks that are starting.
StartRanks = Callable[[EngineConfig, Path, Path], Awaitable[Ranks]]


class RankGroup(Ranks):
    """The processes of all ranks, built by `start`.

    Each has a session of its own, so that a terminal's Ctrl-C is the frontend's to handle.
    """

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        super().__init__(_end(rank, process) for rank, process in enumerate(processes))
        self._processes = processes

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        folder: Path,
        socket_path: Path,
        module: str = "razor_dist.engine.worker",
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> RankGroup:
        """Start ``config.world_size`` ranks.

        The ranks meet at a file in ``folder``, which is private and empty: a port could be taken
        by another process. Rank 0 connects to ``socket_path``. Tests replace the worker's
        ``module``. ``env`` has additional variables: if other engines share the host,
        ``LOCAL_WORLD_SIZE`` counts their ranks as well.
        """
        config_file = folder / "config.json"
        config_file.write_text(config.engine_json())
        options = ("--config-json", str(config_file), "--socket", str(socket_path))
        size = str(config.world_size)
        shared = {
            **child_environment(),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "RAZOR_RENDEZVOUS": f"file://{folder / 'rendezvous'}",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            **env,
        }
        shared["OMP_NUM_THREADS"] = str(config.threads_per_rank(int(shared["LOCAL_WORLD_SIZE"])))
        set_library_defaults(shared)
        processes: list[asyncio.subprocess.Process] = []
        try:
            for rank in range(config.world_size):
                process = await asyncio.create_subprocess_exec(
                    *guarded(module, *options),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,
                )
                processes.append(process)
        except BaseException:  # out of processes or memory, or cancelled: leave none behind
            for process in processes:
                send_signal(process, signal.SIGKILL)
            raise
        return cls(processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def stop(self, patience: float = 2.0) -> None:
        self._signal(signal.SIGTERM)
        if len(await self.wait(patience)) < len(self._processes):
            self.kill()
            await asyncio.wait(self._ends)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            send_signal(process, number)


async def _end(rank: int, process: asyncio.subprocess.Process) -> RankExit:
    return RankExit(rank, await process.wait())
