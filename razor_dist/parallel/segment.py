"""The memory that ranks of one host share, and the open files by which they find it.

The segment is a file without a name (``memfd``), so a kill leaves nothing behind. It holds

* for each rank a *board* of two places, to which it writes its part of a collective;
* for each ordered pair of ranks a *channel* of two places, for messages from one to the other;
* for each board and each channel two counters, of pieces written and of pieces read, and a counter
  of the pieces that are on all boards.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

_LINE = 64  # bytes; counters of different ranks must not share a cache line
PLACES = 2
BOARD_BYTES = 256 << 10
CHANNEL_BYTES = 512 << 10


class Process(NamedTuple):
    """A rank's process, and the numbers of its open files."""

    pid: int
    pipe: int  # the writing end of its pipe
    segment: int  # on rank 0; else -1


def own_files(nbytes: int, files: contextlib.ExitStack) -> tuple[Process | None, int]:
    """Make this rank's pipe, and a segment of ``nbytes`` if not 0; the caller closes ``files``.

    Return the process and the pipe's reading end; (None, -1) if the files cannot be made.
    """
    works = sys.platform == "linux" and platform.machine() == "x86_64"
    if not works or not hasattr(os, "pidfd_open"):
        return None, -1
    segment = -1
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        for fd in (reading, writing):
            files.callback(os.close, fd)
        if nbytes:
            segment = os.memfd_create("razor_dist")
            files.callback(os.close, segment)
            os.ftruncate(segment, nbytes)
    except OSError:  # such as a limit on the size of files
        return None, -1
    return Process(os.getpid(), writing, segment), reading


def host() -> tuple[str, ...]:
    """A key that is equal only for processes that see each other in ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return (socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"))
    except OSError:
        return (socket.gethostname(), str(os.getpid()))


class SharedSegment:
    """The mapped memory of all ranks, as arrays; a counter is the first number of a cache line."""

    def __init__(self, fd: int, size: int) -> None:
        memory = mmap.mmap(fd, self.nbytes(size))
        pairs, boards = size * size, size * PLACES * BOARD_BYTES
        counters = 2 * (size + pairs) + 1
        lines = np.frombuffer(memory, np.int64, counters * _LINE // 8).reshape(counters, -1)[:, 0]
        # Pieces written to and read from the boards [P], then the channels [from, to].
        self.posted, self.read = lines[:size], lines[size : 2 * size]
        self.sent = lines[2 * size : 2 * size + pairs].reshape(size, size)
        self.received = lines[2 * size + pairs : -1].reshape(size, size)
        self.complete = lines[-1:]
        at = counters * _LINE
        self.boards = np.frombuffer(memory, np.uint8, boards, at).reshape(size, PLACES, -1)
        self.channels = np.frombuffer(memory, np.uint8, offset=at + boards)
        self.channels = self.channels.reshape(size, size, PLACES, -1)
        arrays = self.boards, self.posted, self.read, self.complete
        self.for_torch = [torch.from_numpy(array) for array in arrays]

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes for ``size`` ranks; memory is taken only for the parts that are used."""
        places = size * BOARD_BYTES + size * size * CHANNEL_BYTES
        return (2 * (size + size * size) + 1) * _LINE + PLACES * places
