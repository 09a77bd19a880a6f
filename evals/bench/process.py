"""A function in a process of its own: its memory, crashes and time touch no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from razor_dist.frontend.guard import guarded


def call(
    module: str,
    function: str,
    *arguments: Any,
    seconds: float | None = None,
    log: Path = Path(os.devnull),
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Call a function in a new process, which ends after ``seconds`` with its children.

    Arguments and result pass as JSON. What it says is added to ``log``. ``env`` is the process's
    environment, by default this one's.
    Returns the result, or ``{"failed": reason}``.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("a") as output:
        result = Path(folder) / "result.json"
        process = subprocess.Popen(
            guarded(__name__, module, function, json.dumps(arguments), str(result)),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
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
            return {"failed": f"ended by signal {-code}" if code < 0 else f"exit code {code}"}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


if __name__ == "__main__":
    module, function, arguments, result = sys.argv[1:]
    try:
        found = getattr(import_module(module), function)(*json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        found = {"failed": str(error) or type(error).__name__}
    Path(result).write_text(json.dumps(found))
