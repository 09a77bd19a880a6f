"""Seconds and peak memory of a piece of work."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from razor_dist.config.errors import ConfigError
from razor_dist.engine.memory import resident_bytes

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
