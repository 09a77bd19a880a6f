"""The way of a rank 0 under torchrun to its frontend, without starting either."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from razor_dist.config.errors import ModelError
from razor_dist.config.schema import EngineConfig, ServerConfig
from razor_dist.frontend.managed_engine import lock_folder
from razor_dist.protocol.messages import FrontendUnreachableError
from razor_dist.server import torchrun
from razor_dist.server.torchrun import Torchrun, ensure_frontend, serve_as_rank

CONFIG = ServerConfig(world_size=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process's frontend, if this process is taken for the agent."""
    monkeypatch.setattr(torchrun.tempfile, "gettempdir", lambda: str(tmp_path))
    return torchrun.private_folder(os.getpid())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders in which a frontend was started; it only listens."""
    folders: list[Path] = []

    class Frontend:
        def __init__(self, command: list[str], **_: Any) -> None:
            socket_path = Path(command[command.index("--socket") + 1])
            socket_path.touch()
            folders.append(socket_path.parent)

        def poll(self) -> None:
            return None

    monkeypatch.setattr(subprocess, "Popen", Frontend)
    return folders


def test_the_first_rank_0_starts_the_frontend(folder: Path, started: list[Path]) -> None:
    assert ensure_frontend(CONFIG, os.getpid()) == folder / "engine"
    assert started == [folder]


def test_setting_the_clock_does_not_move_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = torchrun.psutil.Process
    moved = process().create_time() + 5
    monkeypatch.setattr(process, "create_time", lambda self: moved)
    assert torchrun.private_folder(os.getpid()) == folder


def test_a_new_rank_0_waits_until_its_predecessors_frontend_listens(
    folder: Path, started: list[Path]
) -> None:
    lock = lock_folder(folder)
    timer = threading.Timer(0.3, (folder / "engine").touch)
    timer.start()
    assert ensure_frontend(CONFIG, os.getpid()) == folder / "engine"
    assert (folder / "engine").exists()
    timer.join()
    os.close(lock)
    assert started == []


def test_a_new_rank_0_starts_a_frontend_when_its_predecessors_ends_instead(
    folder: Path, started: list[Path]
) -> None:
    timer = threading.Timer(0.3, os.close, [lock_folder(folder)])
    timer.start()
    assert ensure_frontend(CONFIG, os.getpid()) == folder / "engine"
    timer.join()
    assert started == [folder]


def test_a_frontend_that_never_listens_is_told(folder: Path) -> None:
    lock = lock_folder(folder)
    with pytest.raises(FrontendUnreachableError, match="did not listen within"):
        ensure_frontend(CONFIG, os.getpid(), patience=0.1)
    os.close(lock)


def test_a_frontend_keeps_its_folder_when_the_files_in_it_are_cleared_away(
    folder: Path, started: list[Path]
) -> None:
    lock = lock_folder(folder)
    for file in folder.iterdir():
        file.unlink()
    (folder / "engine").touch()
    assert ensure_frontend(CONFIG, os.getpid()) == folder / "engine"
    os.close(lock)
    assert started == []


def fail_with(error: Exception) -> Callable[[EngineConfig, str | None], None]:
    def run_rank(config: EngineConfig, socket_path: str | None) -> None:
        raise error

    return run_rank


def test_what_the_frontend_cannot_know_is_raised_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr(torchrun, "ensure_frontend", lambda *_, **__: folder / "engine")
    first = Torchrun(rank=0, local_rank=0, world_size=2)
    with pytest.raises(FrontendUnreachableError):
        serve_as_rank(CONFIG, first, fail_with(FrontendUnreachableError("no socket")))
    assert not folder.exists()  # what a killed frontend has left
    assert serve_as_rank(CONFIG, first, fail_with(ModelError("no such folder"))) == 2
