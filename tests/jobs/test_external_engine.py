"""Models that another library runs: each in a process of its own, which may end at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from razor_dist.config.errors import EngineError
from razor_dist.config.schema import EngineConfig
from razor_dist.jobs.host_engine import host_pool
from razor_dist.jobs.job import run_task
from razor_dist.jobs.pool import run_items
from razor_dist.jobs.results import read_job
from razor_dist.jobs.task import ExternalEngineConfig, Item, PartResult, Updates
from tests.jobs.test_process import has_ended


class Model:
    """Loads for minutes if its folder holds the file ``long``; leaves ``closed`` beside it."""

    def __init__(self, config: EngineConfig) -> None:
        if Path(config.model, "long").exists():
            time.sleep(600)
        self._closed = Path(config.model).with_name("closed")
        torch.set_num_threads(config.threads_per_rank(1))

    def close(self) -> None:
        self._closed.touch()


class ForeignError(Exception):
    """Cannot be unpickled, as some errors of other libraries."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@dataclass(frozen=True)
class Errands:
    """Items do what their names say, in ``folder``."""

    folder: Path
    names: tuple[str, ...]

    @property
    def settings(self) -> Mapping[str, Any]:
        return {}

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        own: dict[str, Any] = {"attention": "full", "model": str(self.folder / "model")}
        opens = f"{__name__}:Model"
        return {"default": ExternalEngineConfig(opens=opens, **own)}

    def items(self) -> Sequence[Item]:
        return [Item(name) for name in self.names]

    def run(self, llm: Model, item: Item) -> Mapping[str, Any] | Updates:
        return self._in_parts(item) if item.id.endswith("parts") else self._work(item)

    def _in_parts(self, item: Item) -> Updates:
        yield PartResult("part", {"of": item.id}, 1)
        return self._work(item)

    def _work(self, item: Item) -> Mapping[str, Any]:
        mark = self.folder / item.id
        match item.id.partition("-")[0]:
            case "foreign":
                raise ForeignError("a", "b")
            case "wrong":
                raise KeyError("no such thing")
            case "dies" if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "waits":
                mark.write_text(str(os.getpid()))
                time.sleep(600)
            case "starts":
                other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                mark.write_text(str(other.pid))
            case "meets":
                mark.touch()
                while len(list(self.folder.glob("meets-*"))) < len(self.names):
                    time.sleep(0.01)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {"process": os.getpid(), "threads": torch.get_num_threads(), "gpus": gpus}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path


@pytest.mark.long
def test_what_goes_wrong_in_its_process_costs_the_item_alone(folder: Path) -> None:
    names = ("fine", "foreign", "wrong", "wrong-parts", "fine-parts", "dies", "fine-again")
    task = Errands(folder, names)
    summary = run_task(task, folder / "out", host_pool(task))
    assert (summary.done, summary.failed) == (4, 3)
    records = {record["id"]: record for record in read_job(folder / "out").records}
    fine = ("fine", "fine-parts", "dies", "fine-again")
    processes = [records[name]["result"]["process"] for name in fine]
    assert len(set(processes)) == 2 and processes[0] == processes[1] != processes[2]
    assert os.getpid() not in processes
    assert not any(psutil.pid_exists(pid) for pid in processes)
    assert records["dies"]["run"]["attempts"] == 2
    for name in ("wrong", "wrong-parts"):
        assert records[name]["error"] == {"type": "KeyError", "message": "'no such thing'"}
        assert records[name]["run"]["attempts"] == 1
    error = records["foreign"]["error"]
    assert error == {"type": "RuntimeError", "message": "ForeignError: a b"}
    assert (folder / "closed").exists(), "it is closed when nothing is left to do"


@pytest.mark.long
def test_a_job_that_ends_kills_what_computes(folder: Path) -> None:
    """As after Ctrl-C, which would wait for the end of a long document."""
    task = Errands(folder, ("waits-parts",))
    with host_pool(task) as (open_engine, _):
        events = run_items(task.items(), open_engine, 1)
        assert next(events).item.id == "waits-parts"  # its first part
        while not ((there := folder / "waits-parts").exists() and there.read_text()):
            time.sleep(0.01)
        events.close()
    assert not psutil.pid_exists(int(there.read_text()))
    (folder / "model" / "long").touch()
    over = threading.Event()
    over.set()
    with host_pool(task) as (open_engine, _), pytest.raises(EngineError, match="the job is over"):
        open_engine("default", 0, 1, over)


@pytest.mark.long
def test_what_an_idle_engine_has_started_ends_with_it(folder: Path) -> None:
    task = Errands(folder, ("starts",))
    assert run_task(task, folder / "out", host_pool(task)).done == 1
    assert (folder / "closed").exists()
    assert has_ended(int((folder / "starts").read_text()))


@pytest.mark.long
def test_engines_of_a_host_divide_its_cores_and_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("razor_dist.config.schema.usable_cores", lambda: 6)
    task = Errands(folder, ("meets-0", "meets-1"))
    run_task(task, folder / "out", host_pool(task, 2))
    results = [record["result"] for record in read_job(folder / "out").records]
    assert sorted(result["gpus"] for result in results) == ["0", "1"]
    assert [result["threads"] for result in results] == [3, 3]
    assert len({result["process"] for result in results}) == 2


@pytest.mark.long
def test_a_script_finds_the_module_beside_it(tmp_path: Path) -> None:
    source = Path(__file__).read_text()
    (tmp_path / "beside.py").write_text(source)
    (tmp_path / "model").mkdir()
    (tmp_path / "script.py").write_text(
        "import sys; from pathlib import Path; import beside\n"
        "from razor_dist.jobs.job import run_task\n"
        "from razor_dist.jobs.host_engine import host_pool\n"
        "task = beside.Errands(Path(sys.argv[1]), ('fine',))\n"
        "assert run_task(task, sys.argv[1] + '/out', host_pool(task)).done == 1\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    assert subprocess.run(command, check=False, env=env, cwd="/").returncode == 0
