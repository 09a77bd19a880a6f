"""Real rank processes over gloo for tests, kept alive between tests.

A `RankPool` holds P processes that form one process group; `run` calls a module-level function on
every rank and returns what each returned. Starting processes costs seconds, calls cost
milliseconds, so that property-based tests can afford real collectives.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from tests import pretended_gpu

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch.distributed", "transformers", "tests.cases"])


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection, gpu: bool) -> None:
    if gpu:
        pretended_gpu.install()
    import torch
    import torch.distributed as dist

    from razor_dist.parallel.comm import Communicator
    from razor_dist.parallel.shared_memory import connect

    torch.set_num_threads(1)
    comm = Communicator(None)
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        timeout = timedelta(seconds=60)
        comm = connect(dist.group.WORLD, timeout) or Communicator(dist.group.WORLD)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        function, args = call
        try:
            pipe.send((True, function(comm, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class RankPool:
    """P rank processes.

    Parameters
    ----------
    size : int
        P.
    gpu : bool
        The processes see a pretended GPU (`tests.pretended_gpu`).
    """

    def __init__(self, size: int, *, gpu: bool = False) -> None:
        self.size = size
        self.failed = False
        self.answers: list[Any] = []  # what ranks returned in the last call, as far as it went
        self._directory = tempfile.TemporaryDirectory()
        rendezvous = f"file://{self._directory.name}/store"
        self._pipes, self.processes = [], []
        for rank in range(size):
            context = multiprocessing.get_context("spawn") if gpu else FORKSERVER
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, rendezvous, theirs, gpu), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        """``function(comm, *args)`` on every rank; the results in the order of ranks."""
        for pipe in self._pipes:
            pipe.send((function, args))
        self.answers = results = []
        for rank, pipe in enumerate(self._pipes):
            self.failed = True
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer in {timeout} s")
            ok, value = pipe.recv()
            if not ok:
                raise AssertionError(f"rank {rank} of {self.size} failed:\n{value}")
            self.failed = False
            results.append(value)
        return results

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._directory.cleanup()


Ranks = Callable[[int], RankPool]  # the fixture ``ranks``
