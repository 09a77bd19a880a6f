"""Seconds, memory, and what a device can do at most: bytes read per second, matrix products.

Peaks of data sheets belong to other clocks, dtypes and numbers of threads. The ceilings are
measured in this process, in the dtype and with the threads of the runs that are held against them.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from razor_dist.config.errors import ConfigError
from razor_dist.engine.memory import resident_bytes
from razor_dist.kernels.linear import linear

# Linux's way to begin a new peak of resident memory (proc_pid_clear_refs(5)).
_NEW_PEAK = Path("/proc/self/clear_refs")


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; CUDA works behind the program's back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Cost:
    """Seconds of a piece of work; bytes held when it began, and at most during it."""

    seconds: float = 0.0
    before_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def cost_on(device: torch.device) -> Iterator[Cost]:
    """Measure a ``with`` block; the figures are there once it has ended.

    Memory is torch's allocations on CUDA, and the process's resident memory on CPU.

    Raises
    ------
    ConfigError
        Where a CPU's peak cannot be measured.
    """
    cost, cuda = Cost(), device.type == "cuda"
    if cuda:
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif _NEW_PEAK.exists():
        _NEW_PEAK.write_text("5")
    else:
        raise ConfigError(
            "the peak of a CPU's memory is measured with Linux's /proc/self/clear_refs, which is "
            "missing here; measure on Linux, or with device cuda"
        )
    cost.before_bytes = torch.cuda.memory_allocated(device) if cuda else resident_bytes()[0]
    began = time.perf_counter()
    yield cost
    synchronize(device)
    cost.seconds = time.perf_counter() - began
    cost.peak_bytes = torch.cuda.max_memory_allocated(device) if cuda else resident_bytes()[1]


class CeilingSizes(NamedTuple):
    """Sizes of the operations that measure a device, and about how long each is repeated."""

    buffer_bytes: int  # read again and again; far more than the caches hold
    side: int  # rows and columns of the matrices
    seconds: float = 1.0


# The last-level caches are 50 MB on an H100 or H200, and tens of MB for each socket of a CPU. More
# than 2 GiB in 16 bits would be more numbers than kernels index in 32 bits.
SIZES = {"cuda": CeilingSizes(2 << 30, 8192), "cpu": CeilingSizes(1 << 30, 2048)}
_WIDTH = 4096
# Calls are timed so many seconds at a time: launching one takes microseconds.
_BATCH = 0.02
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Ceilings:
    """Bytes read and operations of a matrix product, per second, at best.

    A multiplication and an addition are two operations.
    """

    bandwidth: float
    matmul: float

    def or_better(self, other: Ceilings) -> Ceilings:
        """Return the better one of each, for a machine may be busy while it is measured."""
        return Ceilings(max(self.bandwidth, other.bandwidth), max(self.matmul, other.matmul))


@torch.inference_mode()
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure a device at `SIZES`, with torch's present number of threads.

    Bytes are those of a buffer that is summed or multiplied with a vector, whichever is faster:
    both read it once and write next to nothing. A matrix product is computed by torch's ``matmul``
    and as the engine's linear layers do (`razor_dist.kernels.linear`), which on some CPUs is much
    faster.
    """
    size, side, seconds = SIZES[device.type]

    def best(*operations: Callable[[], object]) -> float:
        return min(fastest(operation, device, seconds) for operation in operations)

    rows = -(-size // (_WIDTH * dtype.itemsize))
    buffer = torch.ones(rows, _WIDTH, dtype=dtype, device=device)
    vector = torch.ones(_WIDTH, dtype=dtype, device=device)
    reading = best(buffer.sum, lambda: buffer @ vector, lambda: linear(vector, buffer))
    # Random numbers: a GPU that multiplies zeros draws less power and keeps a higher clock.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in "ab")
    multiplying = best(lambda: a @ b, lambda: linear(a, b))
    return Ceilings(buffer.nbytes / reading, 2 * side**3 / multiplying)


def fastest(operation: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of one call at best, over about so many ``seconds`` of calls."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    operation()
    timer = timeit.Timer(operation, timer=clock)
    once = timer.timeit(1)
    calls = max(1, int(_BATCH / once))
    rounds = max(_LEAST_ROUNDS, math.ceil(seconds / (calls * once)))
    return min(timer.repeat(rounds, calls)) / calls
