"""A function in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from razor_dist.jobs.process import Child, call


def start_another(connection: Connection | None, file: str) -> None:
    """Start a process that sleeps, and die."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(str(other.pid))
    os._exit(3)


def call_another(file: str) -> dict[str, object]:
    start_another(None, file)
    return {}


def has_ended(pid: int) -> bool:
    """True once a process is gone, or a zombie that nobody waits for."""
    for _ in range(500):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("called", [True, False])
def test_a_process_that_has_died_leaves_no_children(called: bool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    if called:
        assert call(call_another, str(file)) == {"failed": "exit code 3"}
    else:
        with Child(start_another, str(file)) as child:
            os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(int(file.read_text()))
