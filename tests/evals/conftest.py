"""Commands of ``eval`` on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from razor_dist import cli
from razor_dist.jobs import host_engine
from razor_dist.jobs.task import ExternalEngineConfig


@pytest.fixture
def evaluate(letters: Path, tmp_path: Path) -> Callable[..., int]:
    """Return a function that runs a suite with flags; without ``--out`` results are in ``out``."""

    def run(suite: str, flags: str, out: Path = tmp_path / "out") -> int:
        shared = f"--model {letters} --no-ray --window-min 64 --block 16 --out {out}"
        return cli.main(["eval", suite, *shared.split(), *flags.split()])

    return run


@pytest.fixture
def opens_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Return a function that puts a model of this process in every external engine's place."""

    def use(model: object) -> None:
        monkeypatch.setattr(ExternalEngineConfig, "open", lambda config: model)
        opened = host_engine.OpenedEngine
        monkeypatch.setattr(host_engine, "ExternalEngine", lambda task, own, *_: opened(task, own))

    return use
