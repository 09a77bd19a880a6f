"""Runs a module as ``python -m`` would, in a process that dies with the one that started it.

``python -m razor_dist.frontend.guard PARENT_PID MODULE [ARGUMENTS...]``

Setting the parent-death signal here, and not between fork and exec, spares the parent a
``preexec_fn``, which is unsafe in a process with threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each rank and reader runs this module
    from asyncio.subprocess import Process

_PR_SET_PDEATHSIG = 1


def guarded(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module in a process that dies with this one."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def send_signal(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process that asyncio has started, unless it has ended.

    The process's own method would wait for one that has just ended, and asyncio then finds none to
    wait for: it logs that, and takes 255 for the exit code.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process once its parent is gone (Linux; elsewhere do nothing)."""
    if not sys.platform.startswith("linux"):
        return
    # SIGKILL: a rank that is stuck in a collective must not be able to miss it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def main() -> None:
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent_pid)
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
