"""What a run of an evaluation was made with, beside its results: settings, machine, versions."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.evals.bench import machine
from razor_dist.files import replacing
from razor_dist.jobs.config import JobConfig

CONFIG, ENVIRONMENT = "config.json", "environment.json"


def note_run(folder: Path, config: JobConfig) -> None:
    """Write down with what settings and where a run is made; earlier runs stay listed.

    Raises
    ------
    ConfigError
        If the list of earlier runs is damaged.
    """
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
    """Write a file for people and programs, whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
