"""Seconds, memory, and what a device can do at most: bytes read per second, matrix products.

Peaks of data sheets belong to other clocks, dtypes and numbers of threads. The ceilings are
measured in this process, in the dtype and with the threads of the runs that are held against them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


class Peak:
    """Seconds and peak memory of a ``with`` block.

    Memory is torch's allocations on CUDA, and the process's resident memory on CPU.

    Parameters
    ----------
    device : torch.device

    Attributes
    ----------
    seconds : float
    before, peak : int
        Bytes held when the block began, and at most during it. Known once it has ended.

    Raises
    ------
    ConfigError
        On entering, where a CPU's peak cannot be measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds, self.before, self.peak = 0.0, 0, 0

    def __enter__(self) -> Peak:
        synchronize(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.before = torch.cuda.memory_allocated(self._device)
        else:
            if not _NEW_PEAK.exists():
                raise ConfigError(
                    "the peak of a CPU's memory is measured with Linux's /proc/self/clear_refs, "
                    "which is missing here; measure on Linux, or with device cuda"
                )
            _NEW_PEAK.write_text("5")
            self.before, _ = resident_bytes()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        synchronize(self._device)
        self.seconds = time.perf_counter() - self._began
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device)
        else:
            _, self.peak = resident_bytes()


@dataclass(frozen=True)
class CeilingSizes:
    """Sizes of the operations that measure a device, and about how long each is repeated.

    Attributes
    ----------
    buffer_bytes : int
        Read again and again; far more than the caches hold.
    side : int
        Rows and columns of the matrices.
    seconds : float
    """

    buffer_bytes: int
    side: int
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
def measure_ceilings(
    device: torch.device, dtype: torch.dtype, sizes: CeilingSizes | None = None
) -> Ceilings:
    """Measure a device, with torch's present number of threads.

    Bytes are those of a buffer that is summed or multiplied with a vector, whichever is faster:
    both read it once and write next to nothing. A matrix product is computed by torch's ``matmul``
    and as the engine's linear layers do (`razor_dist.kernels.linear`), which on some CPUs is much
    faster.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
        Of the buffer and the matrices.
    sizes : CeilingSizes, optional
        By default large enough for the kind of device.
    """
    sizes = sizes or SIZES[device.type]

    def best(*operations: Callable[[], object]) -> float:
        return min(fastest(operation, device, sizes.seconds) for operation in operations)

    rows = -(-sizes.buffer_bytes // (_WIDTH * dtype.itemsize))
    buffer = torch.ones(rows, _WIDTH, dtype=dtype, device=device)
    vector = torch.ones(_WIDTH, dtype=dtype, device=device)
    reading = best(buffer.sum, lambda: buffer @ vector, lambda: linear(vector, buffer))
    # Random numbers: a GPU that multiplies zeros draws less power and keeps a higher clock.
    a, b = (torch.randn(sizes.side, sizes.side, device=device).to(dtype) for _ in "ab")
    multiplying = best(lambda: a @ b, lambda: linear(a, b))
    return Ceilings(buffer.nbytes / reading, 2 * sizes.side**3 / multiplying)


def fastest(operation: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of one call at best, over about so many ``seconds`` of calls."""
    operation()
    calls = max(1, int(_BATCH / _timed(operation, 1, device)))
    best, spent, rounds = float("inf"), 0.0, 0
    while spent < seconds or rounds < _LEAST_ROUNDS:
        batch = _timed(operation, calls, device)
        best, spent, rounds = min(best, batch / calls), spent + batch, rounds + 1
    return best


def _timed(operation: Callable[[], object], calls: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        operation()
    synchronize(device)
    return time.perf_counter() - began
