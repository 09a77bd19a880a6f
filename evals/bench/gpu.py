"""The first nine minutes on a GPU: every path that only CUDA runs, measured by one command.

The parts (`PARTS`, in `razor_dist.evals.bench.gpu_parts`) run one after the other in one process,
since importing torch and its friends takes seconds of the nine minutes. A part that fails, hangs or
ends its CUDA context takes that process with it, and the next part begins in another. Figures and
page are written anew after everything that a part reports. Without a GPU the parts run at small
sizes, and what needs CUDA says so.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from razor_dist.config.schema import EngineConfig
from razor_dist.evals.bench.measure import BenchRecord, Table
from razor_dist.evals.bench.settings import GpuBenchSettings
from razor_dist.evals.one_rank import torch_device
from razor_dist.files import make_folder
from razor_dist.jobs.process import Child

log = logging.getLogger(__name__)

# Before its process is ended a part is asked to end, with what it has, this much earlier.
_GRACE_SECONDS = 5.0
# Until a new process has imported what it needs: gigabytes, which a cold disk may read slowly. They
# are not counted as the first part's.
_START_SECONDS = 120.0


class Skipped(Exception):
    """A part cannot run here; says why."""


@dataclass(frozen=True)
class Bench:
    """Arguments of every part."""

    device: torch.device
    until: float  # by `time.monotonic`: later than that nothing more should be begun

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.until - time.monotonic())

    @property
    def is_late(self) -> bool:
        return not self.left


# Yields figures and tables, as soon as they are there; later figures join the earlier ones.
Part = Callable[[Bench], Iterator[tuple[dict[str, Any], list[Table]]]]
Parts = Mapping[str, tuple[Part, float]]  # parts by name, each with its limit in seconds


@dataclass
class _Record:
    """A part's figures and tables so far."""

    seconds: float = 0.0
    status: str = "skipped: no time was left"
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def add(self, event: Mapping[str, Any]) -> None:
        self.status = event.get("status", self.status)
        self.figures |= event.get("figures", {})
        self.tables += event.get("tables", ())


def run(
    settings: GpuBenchSettings, module: str = "razor_dist.evals.bench.gpu_parts"
) -> BenchRecord:
    """Run the parts of ``module``; ``gpu.json``, ``gpu.md`` and ``gpu.log`` grow on the way."""
    device = torch_device(EngineConfig(device=settings.device), 0)
    make_folder(settings.out)
    said = settings.out / "gpu.log"
    said.write_text("")
    parts: Parts = import_module(module).PARTS
    waiting = {name: (part, settings.patience * limit) for name, (part, limit) in parts.items()}
    records = {name: _Record() for name in waiting}
    end = time.monotonic() + 60 * settings.minutes
    while waiting and time.monotonic() < end:
        with _Worker(device, end, waiting, said) as worker:
            going_on = True
            while waiting and going_on and time.monotonic() < end:
                name = next(iter(waiting))
                _, seconds = waiting.pop(name)
                limit = min(seconds, end - time.monotonic())
                for _ in worker.results(records[name], limit):
                    _record(settings, records).write()
                log.info("%s: %s", name, records[name].status)
                going_on = not records[name].status.startswith("failed")
    found = _record(settings, records)
    found.write()
    return found


def _record(settings: GpuBenchSettings, records: Mapping[str, _Record]) -> BenchRecord:
    rows = [["part", "s", "status"]]
    rows += [[name, f"{one.seconds:.0f}", one.status] for name, one in records.items()]
    parts = {
        name: {"status": one.status, "seconds": one.seconds, **one.figures}
        for name, one in records.items()
    }
    tables = [Table("", rows, "left"), *(t for one in records.values() for t in one.tables)]
    return BenchRecord("gpu", settings, {"parts": parts}, tables)


class _Worker(Child):
    """A process that works through parts, one after the other, and says what they say."""

    def __init__(self, device: torch.device, end: float, parts: Parts, said: Path) -> None:
        self._start = _START_SECONDS
        # On CPU Triton's kernels are interpreted, which they have to know as they are imported.
        own = {"TRITON_INTERPRET": "1"} if device.type == "cpu" else {}
        with said.open("a") as output:
            super().__init__(work, device, end, parts, output=output, env=os.environ | own)

    def results(self, record: _Record, limit: float) -> Iterator[None]:
        """Fill in the next part's record; yield whenever there is more of it."""
        self.connection.poll(self._start)
        self._start, began, status = 0.0, time.monotonic(), None
        while status is None:
            event = {"status": f"failed: not done within {limit:.0f} s"}
            try:
                if self.connection.poll(max(0.0, began + limit - time.monotonic())):
                    event = self.connection.recv()
            except (EOFError, OSError):
                event = {"status": f"failed: ended with {self.wait()}"}
            record.seconds = time.monotonic() - began
            status = event.get("status")
            record.add(event)
            yield


def work(connection: Connection, device: torch.device, end: float, parts: Parts) -> None:
    """Run parts and send what comes of them, until one fails."""
    connection.send({})  # torch and its friends are imported
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, (part, seconds) in parts.items():
        print(f"--- {name}", flush=True)
        bench = Bench(device, min(end, time.monotonic() + seconds) - _GRACE_SECONDS)
        try:
            for figures, tables in part(bench):
                connection.send({"figures": figures, "tables": tables})
            status = "done"
        except Skipped as reason:
            status = f"skipped: {reason}"
        except Exception as error:  # whatever a kernel or a driver raises; its context may be lost
            traceback.print_exc()
            said = str(error).strip().partition("\n")[0]
            status = f"failed: {said[:200] or type(error).__name__}"
        connection.send({"status": status})
        if status.startswith("failed"):
            return
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()
