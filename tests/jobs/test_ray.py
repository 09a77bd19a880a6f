"""Jobs on a Ray cluster of two small nodes: the same answers, whoever is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from razor_dist.config.errors import ClusterError, EngineError
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.jobs.host_engine import host_pool
from razor_dist.jobs.job import JobSummary, run_job, run_task
from razor_dist.jobs.pool import EngineLostError
from razor_dist.jobs.results import RESULTS, read_job
from tests.jobs.tasks import Completions
from tests.jobs.test_job import without_times

pytest.importorskip("ray")
from ray.cluster_utils import Cluster
from ray.util import placement_group

from razor_dist.jobs.cluster import Reservation, connected
from razor_dist.jobs.ray_engine import RayEngine

ROOT = Path(__file__).parents[2]


NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
# Engines of three processes each, which take what importing transformers takes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of one CPU; each holds an engine of two ranks of half a CPU."""
    # Ray's workers are as nice as can be, and would starve beside whatever else a machine does.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path]) -> EngineConfig:
    return EngineConfig(model=str(tiny("llama")), attention="full", world_size=2, max_model_len=256)


@pytest.fixture(scope="module")
def undisturbed(engine: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of `LLM` on processes."""
    task, folder = Completions({"full": engine}), tmp_path_factory.mktemp("undisturbed")
    assert run_task(task, folder, host_pool(task)).done == 6
    return folder


def job(cluster: Cluster, **settings: Any) -> JobConfig:
    given: dict[str, Any] = {"cpus_per_rank": 0.5, "engines": 2, "cluster_timeout": 60.0}
    return JobConfig(**given | settings, ray_address=cluster.address)


def attempts(folder: Path) -> dict[str, int]:
    return {record["id"]: record["run"]["attempts"] for record in read_job(folder).records}


def no_actors_left() -> bool:
    """Return True once all processes of engines are gone, False after a while."""
    for _ in range(100):
        names = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
        if not [name for name in names if name.startswith(("ray::RankActor", "ray::EngineActor"))]:
            return True
        time.sleep(0.1)
    return False


def test_a_killed_rank_and_a_killed_frontend(
    cluster: Cluster, engine: EngineConfig, undisturbed: Path, tmp_path: Path
) -> None:
    harm = {"full-2": f"rank:{tmp_path / 'rank'}", "full-4": f"frontend:{tmp_path / 'frontend'}"}
    task = Completions({"full": engine}, harm=harm | {"full-5": "error"})
    folder = tmp_path / "out"
    assert run_job(task, job(cluster), folder) == JobSummary(folder, 5, 1, 0)
    tried = attempts(folder)
    assert (tried["full-2"], tried["full-4"], tried["full-5"]) == (2, 2, 1)
    failed = {record["id"]: record["error"] for record in read_job(folder).records}["full-5"]
    assert failed == {"type": "KeyError", "message": "'no such thing'"}
    assert no_actors_left()
    healthy = Completions({"full": engine})
    again = job(cluster, retry_failed=True, engines=1)
    assert run_job(healthy, again, folder) == JobSummary(folder, 6, 0, 5)
    assert without_times(folder) == without_times(undisturbed)


def test_several_items_of_an_engine_at_once(
    cluster: Cluster, engine: EngineConfig, undisturbed: Path, tmp_path: Path
) -> None:
    meeting, folder = tmp_path / "meeting", tmp_path / "out"
    meeting.mkdir()
    harm = {"full-1": f"rank:{tmp_path / 'rank'}", "full-3": f"frontend:{tmp_path / 'frontend'}"}
    task = Completions({"full": engine}, harm=harm, at_once=3, meeting=str(meeting))
    assert run_job(task, job(cluster, engines=1), folder) == JobSummary(folder, 6, 0, 0)
    assert attempts(folder)["full-1"] >= 2
    assert without_times(folder) == without_times(undisturbed)
    assert no_actors_left()


def test_what_the_cluster_cannot_hold_is_told(
    cluster: Cluster,
    engine: EngineConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = Completions({"full": engine})
    caplog.set_level("INFO", "razor_dist")
    with pytest.raises(ClusterError) as error:
        run_job(task, job(cluster, cpus_per_rank=3, cluster_timeout=3), tmp_path)
    assert "asks for 2 x (3 CPU) on one node" in str(error.value)
    assert "the cluster of 2 nodes [1 CPU; 1 CPU]" in str(error.value)
    assert "within 3 s" in str(error.value)
    assert any("engine 0 is pending" in message for message in caplog.messages)
    on_gpus = Completions({"full": EngineConfig(attention="full", device="cuda")})
    with pytest.raises(ClusterError, match=r"1 x \(1 GPU \+ 0.5 CPU\)"):
        run_job(on_gpus, job(cluster, cluster_timeout=3), tmp_path / "gpu")


def test_what_the_ranks_refuse_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    task = Completions({"e": EngineConfig(attention="full", max_model_len=10**6, world_size=2)})
    with pytest.raises(EngineError, match="max_model_len is 1000000"):
        run_job(task, job(cluster), tmp_path)
    assert no_actors_left()


def test_ranks_on_several_nodes(
    cluster: Cluster, engine: EngineConfig, undisturbed: Path, tmp_path: Path
) -> None:
    task = Completions({"full": engine})
    spread = job(cluster, cpus_per_rank=0.75, placement="PACK", engines=None)
    assert run_job(task, spread, tmp_path).done == 6
    assert without_times(tmp_path) == without_times(undisturbed)
    assert {record["run"]["engine"] for record in read_job(tmp_path).records} == {0}


def test_a_killed_driver(
    cluster: Cluster, engine: EngineConfig, undisturbed: Path, tmp_path: Path
) -> None:
    arguments = [f"ray_address={cluster.address}", "engines=2", "slow=2"]
    process = subprocess.Popen(
        [sys.executable, "tests/jobs/driver.py", str(tmp_path), engine.model, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    results = tmp_path / RESULTS
    while not results.exists() or not results.read_bytes():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert no_actors_left()
    task = Completions({"full": engine})
    summary = run_job(task, job(cluster), tmp_path)
    assert summary.done == 6 and 0 < summary.earlier < 6
    assert without_times(tmp_path) == without_times(undisturbed)


@contextmanager
def killed_nodes(cluster: Cluster, folder: Path, spared: str = "nothing") -> Iterator[None]:
    """Kill all nodes but the head and the ``spared`` process's once two items are done."""
    others = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    raylets = [node.all_processes["raylet"][0].process for node in others]
    alive = [psutil.Process(raylet.pid) for raylet in raylets if raylet.poll() is None]
    killed: list[psutil.Process] = []
    over = threading.Event()

    def command(process: psutil.Process) -> str:
        with contextlib.suppress(psutil.NoSuchProcess):
            return " ".join(process.cmdline())
        return ""

    def kill() -> None:
        while len(attempts(folder)) < 2 if (folder / RESULTS).exists() else True:
            if over.wait(0.05):
                return
        for raylet in alive:
            workers = raylet.children(recursive=True)
            if not any(spared in command(worker) for worker in workers):
                killed.append(raylet)
                # Workers go on for seconds before they notice: a machine that dies has no such.
                for process in (raylet, *workers):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()
    assert killed


def test_a_killed_node(
    cluster: Cluster, engine: EngineConfig, undisturbed: Path, tmp_path: Path
) -> None:
    """Takes the second node away."""
    task = Completions({"full": engine}, slow=2)
    with killed_nodes(cluster, tmp_path):
        assert run_job(task, job(cluster), tmp_path).done == 6
    assert without_times(tmp_path) == without_times(undisturbed)
    assert sum(attempts(tmp_path).values()) > 6, "an item was in work on that node"


def test_a_node_that_is_lost_before_the_engine_starts(
    cluster: Cluster, engine: EngineConfig
) -> None:
    """No actor has run that could end, and no other node has what the bundle asks for."""
    node = cluster.add_node(**NODE, resources={"rare": 1})
    with connected(cluster.address):
        bundle = {"CPU": 0.5, "rare": 0.5}
        group = placement_group([bundle])
        assert group.wait(60)
        cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(EngineLostError, match="lost before it was ready"):
            RayEngine(Completions({}), engine, Reservation(group, bundle, 1), threading.Event())


def test_a_killed_node_of_an_engine_on_two(
    cluster: Cluster, engine: EngineConfig, tmp_path: Path
) -> None:
    """The frontend's node is left, and has no room for the engine."""
    for _ in range(2):
        cluster.add_node(**NODE | {"num_cpus": 2})
    task = Completions({"full": engine}, slow=2)
    spread = job(cluster, cpus_per_rank=2, placement="PACK", engines=1, cluster_timeout=5)
    spared = killed_nodes(cluster, tmp_path, "ray::EngineActor")
    with spared, pytest.raises(ClusterError, match="no room within 5 s"):
        run_job(task, spread, tmp_path)
    assert no_actors_left()
