"""Runs a module as ``python -m`` would, but without the working directory on the path.

``python -P razor_dist/frontend/guard.py PARENT_PID MODULE [ARGUMENTS...]``

Python's ``-m`` puts the working directory first on the path, where a file called ``numpy.py`` would
be imported instead of numpy. ``-P`` prevents that, so this file must find its own package.

The process dies with its parent, unless PARENT_PID is 0. The parent-death signal is set here and
not between fork and exec, since that takes a ``preexec_fn``, which is unsafe with threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import runpy
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each rank and reader runs this module
    from asyncio.subprocess import Process

_PR_SET_PDEATHSIG = 1
# Variables that torchrun sets for its own children, which would mislead ours; and the API key,
# since the other processes run code that a model brings.
_WITHHELD = re.compile(
    r"TORCHELASTIC_.*|(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|OMP_NUM_THREADS|TORCH_NCCL_ASYNC_ERROR_HANDLING|RAZOR_API_KEY"
)


def guarded(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process that dies with this one."""
    return [sys.executable, "-P", __file__, str(os.getpid()), module, *arguments]


def independent(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process that may outlive this one."""
    return [sys.executable, "-P", __file__, "0", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return the environment for our own processes: without torchrun's variables and API keys."""
    return {name: value for name, value in os.environ.items() if not _WITHHELD.fullmatch(name)}


def send_signal(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process that asyncio has started, unless it has ended.

    `Process.send_signal` polls, which reaps a process that has just ended; asyncio then cannot wait
    for it, logs that, and takes 255 for the exit code.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (on Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    # SIGKILL: a rank that is stuck in a collective must not be able to miss it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the call above
        os._exit(1)


def import_own_package() -> None:
    """Import this file's package, which need not be on the path."""
    folder = Path(__file__).parents[1]
    spec = spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules[folder.name] = module_from_spec(spec)
    spec.loader.exec_module(package)


def main() -> None:
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    if parent_pid:
        die_with_parent(parent_pid)
    del sys.argv[1:3]
    if "razor_dist" not in sys.modules:
        import_own_package()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
