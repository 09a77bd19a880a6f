"""Jobs from a task to its results, on engines that answer at once."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from razor_dist.config.errors import (
    ClusterError,
    ConfigError,
    DocumentError,
    EngineError,
    HeadMapError,
    RequestError,
)
from razor_dist.config.extras import install_command
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.config.sources import load_config
from razor_dist.heads.head_map import shipped_head_map
from razor_dist.jobs.host_engine import HostEngine, host_pool, share_of_host
from razor_dist.jobs.job import JobSummary, run_job, run_task
from razor_dist.jobs.pool import EnginePool, JobEngine, run_items
from razor_dist.jobs.results import RESULTS, read_job
from razor_dist.jobs.task import Item, job_settings, settings_hash
from razor_dist.llm.progress import ReadingLog
from tests.fake_engine import WAIT, told
from tests.fake_llm import FakeHostLLM, FakeLLM
from tests.jobs.tasks import Completions
from tests.tiny_models import Tiny

FULL = EngineConfig(attention="full", world_size=2)
STREAMING = EngineConfig(attention="streaming")


class Answers:
    """An engine without a model: the result is the prompt's length."""

    def __init__(self, task: Completions) -> None:
        self._task = task

    def run(self, item: Item) -> Mapping[str, Any]:
        match self._task.harm.get(item.id):
            case "error":
                raise KeyError("no such thing")
            case "rank":
                raise EngineError("a rank died")
            case "room":
                raise RequestError("give it a larger kv_tokens", code="kv_capacity_exceeded")
            case "reader":
                raise DocumentError("its reader is not installed", retryable=True)
            case "nan":
                return {"loss": float("nan")}
        return {"n": len(item.data["prompt"])}

    def close(self) -> None:
        pass


@contextmanager
def pool(task: Completions, engines: int = 2) -> Iterator[EnginePool]:
    yield EnginePool(lambda name, *_: Answers(task), engines)


@contextmanager
def no_pool() -> Iterator[EnginePool]:
    raise ClusterError("nothing is missing, so no engine is asked for")
    yield


def without_times(folder: Path) -> list[dict[str, Any]]:
    """The results as they must be in every run."""
    records = read_job(folder).records
    for record in records:
        assert set(record.pop("run")) == {"seconds", "attempts", "engine", "finished"}
        (record["result"] or {}).pop("timing", None)
    return records


def test_a_job_is_done_once(tmp_path: Path) -> None:
    task = Completions({"full": FULL, "streaming": STREAMING})
    assert run_task(task, tmp_path, pool(task)) == JobSummary(tmp_path, 12, 0, 0)
    first = (tmp_path / RESULTS).read_bytes()
    assert [r["id"] for r in without_times(tmp_path)] == [item.id for item in task.items()]
    assert run_task(task, tmp_path, no_pool()) == JobSummary(tmp_path, 12, 0, 12)
    assert (tmp_path / RESULTS).read_bytes() == first


def test_what_is_missing_is_computed(tmp_path: Path) -> None:
    task = Completions({"full": FULL})
    run_task(task, tmp_path / "whole", pool(task))
    run_task(task, tmp_path / "cut", pool(task))
    path = tmp_path / "cut" / RESULTS
    path.write_bytes(path.read_bytes()[:-300])
    kept = len(read_job(tmp_path / "cut").records)
    assert 0 < kept < 6
    assert run_task(task, tmp_path / "cut", pool(task)) == JobSummary(tmp_path / "cut", 6, 0, kept)
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")
    more = Completions({"full": FULL}, count=8)
    assert run_task(more, tmp_path / "cut", pool(more)).earlier == 6


def test_failures_are_recorded_and_tried_again_when_asked(tmp_path: Path) -> None:
    harm = {"full-0": "error", "full-1": "rank", "full-2": "nan"}
    task = Completions({"full": FULL}, harm=harm)
    assert run_task(task, tmp_path, pool(task)) == JobSummary(tmp_path, 3, 3, 0)
    records = {record["id"]: record for record in read_job(tmp_path).records}
    assert records["full-0"]["error"] == {"type": "KeyError", "message": "'no such thing'"}
    assert records["full-1"]["error"] == {"type": "EngineError", "message": "a rank died"}
    assert records["full-1"]["run"]["attempts"] == 3
    assert "not JSON data" in records["full-2"]["error"]["message"]
    assert all(records[id]["result"] is None for id in harm)
    healthy = Completions({"full": FULL})
    assert run_task(healthy, tmp_path, no_pool()).failed == 3
    summary = run_task(healthy, tmp_path, pool(healthy), JobConfig(retry_failed=True))
    assert summary == JobSummary(tmp_path, 6, 0, 3)


def test_failures_of_items_that_are_no_longer_asked_are_not_counted(tmp_path: Path) -> None:
    task = Completions({"full": FULL}, count=8, harm={"full-7": "error"})
    assert run_task(task, tmp_path, pool(task)) == JobSummary(tmp_path, 7, 1, 0)
    fewer = Completions({"full": FULL})
    assert run_task(fewer, tmp_path, no_pool()) == JobSummary(tmp_path, 6, 0, 6)


@pytest.mark.parametrize(
    ("why", "kind", "message"),
    [
        ("reader", "DocumentError", "its reader is not installed"),
        ("room", "RequestError", "give it a larger kv_tokens"),
    ],
)
def test_a_failure_that_is_not_the_items_is_tried_again_by_the_next_run(
    tmp_path: Path, why: str, kind: str, message: str
) -> None:
    harm = {"full-0": "error", "full-1": why}
    task = Completions({"full": FULL}, harm=harm)
    assert run_task(task, tmp_path, pool(task)) == JobSummary(tmp_path, 4, 2, 0)
    assert read_job(tmp_path).records[1]["error"] == {
        "type": kind,
        "message": message,
        "retryable": True,
    }
    healthy = Completions({"full": FULL})
    assert run_task(healthy, tmp_path, pool(healthy)) == JobSummary(tmp_path, 5, 1, 5)


def test_other_settings_are_another_job(tmp_path: Path) -> None:
    task = Completions({"full": FULL})
    run_task(task, tmp_path / "a", pool(task))
    other = Completions({"full": FULL}, max_tokens=5)
    with pytest.raises(ConfigError, match=r"task\.max_tokens is 4 there and 5 here"):
        run_task(other, tmp_path / "a", no_pool())
    summary = run_task(other, tmp_path / "a", pool(other), JobConfig(new_folder=True))
    assert summary == JobSummary(tmp_path / "a-2", 6, 0, 0)


def test_which_settings_decide(tmp_path: Path) -> None:
    def name(**settings: Any) -> str:
        task = Completions({"e": EngineConfig(**settings)})
        return settings_hash(job_settings(task))

    assert name() == name(world_size=8, decode="tensor", threads=3, max_num_seqs=9)
    prefixes = {"prefix_tail_tokens": 7, "prefix_host_gb": 1.0, "prefix_store": str(tmp_path)}
    assert name() == name(prefix_store_gb=2.0, **prefixes) == name(prefix_cache=False)
    assert name() == name(speculative_config=None)
    different = [name(), name(attention="full"), name(window_min=5), name(prefill="exact")]
    # A request that brings no seed, or no temperature, gets the engine's.
    different += [name(seed=0), name(seed=1), name(generation_config="none")]
    assert len(set(different)) == 7
    shipped = shipped_head_map("smollm2").parent
    copy = tmp_path / "copy.json"
    copy.write_bytes((shipped / "smollm2.json").read_bytes())
    assert name(head_map=str(copy)) == name(), "a map is known by what is in it"
    assert name(head_map=str(shipped / "smollm2-14-1.json")) != name()
    maps = [None, str(copy), str(shipped / "smollm2-14-1.json")]  # they choose the heads of sources
    assert len({name(attention="full", head_map=file) for file in maps}) == 3
    assert len({name(attention="streaming", head_map=file) for file in maps}) == 1
    with pytest.raises(ConfigError, match="cannot read the head map"):
        name(head_map="/no/such.json")
    with pytest.raises(HeadMapError, match="no head map is shipped"):
        name(model="nobody/nothing")


def test_another_model_in_the_same_folder_is_another_job(tmp_path: Path, tiny: Tiny) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    task = Completions({"full": EngineConfig(model=str(folder), attention="full")})
    run_task(task, tmp_path / "out", pool(task))
    assert run_task(task, tmp_path / "out", no_pool()).earlier == 6
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "q_proj" in name)
    changes = [
        lambda: save_file({**tensors, name: tensors[name] + 1}, weights, {"format": "pt"}),
        lambda: (folder / "chat_template.jinja").write_text("{{ messages }}"),
    ]
    for number, change in enumerate(changes):
        change()
        with pytest.raises(ConfigError, match=r"engines\.full\.model_content is .* there"):
            run_task(task, tmp_path / "out", no_pool())
        other = run_task(task, tmp_path / f"other-{number}", pool(task))
        assert other.done == 6


def test_tasks_that_are_wrong(tmp_path: Path) -> None:
    class Twice(Completions):
        def items(self) -> list[Item]:
            return [Item("a", engine="full")] * 2

    class Elsewhere(Completions):
        def items(self) -> list[Item]:
            return [Item("a", engine="fall")]

    class Odd(Completions):
        @property
        def settings(self) -> Mapping[str, Any]:
            return {"x": {1, 2}}

    for kind, message in [
        (Twice, "two items of the job have the id 'a'"),
        (Elsewhere, "names the engine 'fall'; the task has 'full'"),
        (Odd, "the task's settings are not JSON data"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run_task(kind({"full": FULL}), tmp_path, no_pool())
    assert not list(tmp_path.iterdir())


def test_engines_end_before_the_pool_if_a_result_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would be shut down under the threads that use it."""
    task, closed, left = Completions({"full": FULL}), threading.Event(), list[list[str]]()

    class Stuck(Answers):
        def run(self, item: Item) -> Mapping[str, Any]:
            closed.wait()
            raise EngineError("the engine was closed")

        def close(self) -> None:
            closed.set()

    @contextmanager
    def one_is_stuck() -> Iterator[EnginePool]:
        try:
            yield EnginePool(lambda name, number, *_: (Stuck if number else Answers)(task), 2)
        finally:
            names = [thread.name for thread in threading.enumerate()]
            left.append([name for name in names if name.startswith("engine-")])

    full = ConfigError("the disk is full")
    monkeypatch.setattr("razor_dist.jobs.results.ResultStore.append", Mock(side_effect=full))
    with pytest.raises(ConfigError, match="the disk is full"):
        run_task(task, tmp_path, one_is_stuck())
    assert left == [[]]


@pytest.mark.long
def test_processes_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item whose rank is killed is tried again on the same engine, whose rank comes back."""
    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", FakeHostLLM)
    harm = {"full-2": f"rank:{tmp_path / 'once'}", "full-4": "rank"}
    task = Completions({"full": FULL}, harm=harm, max_tokens=3)
    summary = run_task(task, tmp_path / "out", host_pool(task))
    assert (summary.done, summary.failed) == (5, 1)
    records = {record["id"]: record for record in read_job(tmp_path / "out").records}
    assert records["full-2"]["run"]["attempts"] == 2
    assert records["full-4"]["run"]["attempts"] == 3
    assert records["full-4"]["error"]["type"] == "EngineError"
    prompts = {item.id: item.data["prompt"] for item in task.items()}
    for id, record in records.items():
        if id != "full-4":  # the fake engine answers with the prompt's end reversed
            assert record["result"]["tokens"] == prompts[id][:-4:-1]


def started_with(config: EngineConfig, number: int, engines: int) -> dict[str, str]:
    """The environment of an engine's first rank."""
    env = share_of_host(config, config.world_size, number, engines)
    with FakeHostLLM(config, env, threading.Event()) as llm:
        env: dict[str, str] = told(llm.info.decode_reason)["env"]
        return env


@pytest.mark.long
def test_engines_of_a_host_share_its_memory_and_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = FULL.model_copy(update={"world_size": 2})
    for engines in (1, 3):
        env = started_with(config, 0, engines)
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", str(2 * engines))
        assert env["OMP_NUM_THREADS"] == str(config.threads_per_rank(2 * engines))


@pytest.mark.long
@pytest.mark.parametrize(
    ("visible", "shares"), [(None, ["0,1", "2,3"]), ("7,5,MIG-a,2", ["7,5", "MIG-a,2"])]
)
def test_each_engine_of_a_host_has_gpus_of_its_own(
    visible: str | None, shares: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = FULL.model_copy(update={"world_size": 2})
    told = [started_with(config, number, 2)["CUDA_VISIBLE_DEVICES"] for number in range(2)]
    assert told == shares
    assert "CUDA_VISIBLE_DEVICES" not in share_of_host(config, 2, 0, 1)
    on_cpu = config.model_copy(update={"device": "cpu"})
    assert "CUDA_VISIBLE_DEVICES" not in share_of_host(on_cpu, 2, 2, 3)
    # Ranks of one engine share GPUs.
    assert share_of_host(config.model_copy(update={"world_size": 8}), 8, 0, 1) == {}
    # One of a single rank, beside others of two: kvpress's methods beside ours.
    alone = config.model_copy(update={"world_size": 1})
    assert share_of_host(alone, 2, 1, 2)["CUDA_VISIBLE_DEVICES"] == shares[1]
    with pytest.raises(ConfigError, match=r"engines is 3 and world_size 2, .* has 4 GPUs"):
        share_of_host(config, 2, 0, 3)


def ranks() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [each for each in found if "tests.fake_engine" in each.cmdline()]


def test_an_engine_that_loads_is_given_up_when_the_job_is_over(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    (model / WAIT).touch()  # the ranks never come to anything
    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", FakeHostLLM)
    task = Completions({"full": FULL.model_copy(update={"model": str(model)})})
    before, loading = ranks(), list[psutil.Process]()
    with host_pool(task) as (open_engine, _):

        def first_loads(name: str, number: int, engines: int, over: threading.Event) -> JobEngine:
            if number == 0:
                return open_engine(name, number, engines, over)
            while len(loading) < FULL.world_size:
                time.sleep(0.01)
                loading[:] = [rank for rank in ranks() if rank not in before]
            raise ConfigError("a mistake ends the job")

        with pytest.raises(ConfigError, match="ends the job"):
            list(run_items(task.items(), first_loads, 2))
    assert (model / WAIT).exists() and not any(rank.is_running() for rank in loading)


def test_an_engines_log_names_the_item(tmp_path: Path) -> None:
    task = Completions({"full": FULL})
    with FakeLLM(attention="full") as llm:
        for item in task.items()[:2]:
            list(HostEngine(task, llm).run(item))
            assert isinstance(llm.use_tqdm, ReadingLog) and llm.use_tqdm.what == item.id


def test_job_settings_come_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"engines": 4, "world_size": 8, "placement": "PACK"}))
    env = {"RAZOR_ENGINES": "3", "RAZOR_CPUS_PER_RANK": "0.5", "RAZOR_PORT": "1"}
    config = load_config(JobConfig, {"engines": "2"}, env, file)
    assert (config.engines, config.world_size, config.placement) == (2, 8, "PACK")
    assert config.cpus_per_rank == 0.5
    with pytest.raises(ConfigError, match="placement must be"):
        JobConfig(placement="SPREAD")
    with pytest.raises(ConfigError, match="engines must be at least 1, got 0"):
        JobConfig(engines=0)


def test_packages_of_an_extra_are_named_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_command("documents", tmp_path) == (
        "pip install 'beautifulsoup4>=4.13' 'lxml>=5' 'pypdfium2<6,>=4.30' 'python-docx>=1.1'"
    )
    (tmp_path / "pyproject.toml").touch()  # in Ray's copy of a checkout, too
    assert install_command("train", tmp_path) == "pip install 'deepspeed<0.20,>=0.19' 'ninja'"
    (tmp_path / ".git").touch()  # in a worktree it is a file
    assert install_command("train", tmp_path) == f"pip install -e '{tmp_path}[train]'"
    (tmp_path / ".git").unlink()
    monkeypatch.setattr("razor_dist.config.extras._NAME", "not-installed")
    assert install_command("train", tmp_path) == "pip install -e '.[train]' in a checkout"


def test_without_ray_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install -e '/.*\[ray\]'"):
        run_job(Completions({"full": FULL}), JobConfig(), tmp_path)
