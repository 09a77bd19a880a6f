"""Notes on a run of an evaluation or a bench: settings, machine, versions."""

from __future__ import annotations

import json
import os
import platform
import re
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import JobConfig
from razor_dist.files import replacing

CONFIG, ENVIRONMENT = "config.json", "environment.json"


def machine() -> dict[str, Any]:
    info = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: version(name) for name in ("torch", "transformers")},
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    return info


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.*)", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def note_run(folder: Path, config: JobConfig) -> None:
    """Add the settings and the machine of a run to a folder; earlier runs stay listed."""
    path = folder / ENVIRONMENT
    try:
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged; remove it, it is written anew") from None
    here = {"began": datetime.now(UTC).isoformat(timespec="seconds"), **machine()}
    here["razor_dist"] = version("razor-dist")
    with suppress(PackageNotFoundError):
        here["kvpress"] = version("kvpress")
    write_json(folder / CONFIG, config.model_dump(mode="json"))
    write_json(path, {"runs": [*runs, here]})


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
