"""A function in a process of its own: its memory, its crash and its time are nobody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

NOWHERE = Path(os.devnull)


def call(
    module: str, function: str, *arguments: Any, seconds: float | None = None, log: Path = NOWHERE
) -> dict[str, Any]:
    """Call a function in a new process; arguments and result pass as JSON.

    Parameters
    ----------
    module, function : str
    *arguments
    seconds : float, optional
        The process and its children are ended after that time.
    log : Path
        File for what the process prints.

    Returns
    -------
    dict
        The function's, or ``{"failed": reason}``.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        result = Path(folder) / "result.json"
        words = [module, function, json.dumps(arguments), str(result)]
        process = subprocess.Popen(
            # It ends with this process, whatever ends that.
            [sys.executable, "-m", "razor_dist.frontend.guard", str(os.getpid()), __name__, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {seconds:.0f} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not result.exists():
            ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            return {"failed": ended}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def _main(module: str, function: str, arguments: str, result: str) -> None:
    try:
        found = getattr(import_module(module), function)(*json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        found = {"failed": str(error) or type(error).__name__}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
