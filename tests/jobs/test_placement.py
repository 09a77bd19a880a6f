"""Placing ranks on a cluster so that they find each other, without a cluster."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore

from razor_dist.config.errors import ClusterError, ConfigError, EngineError
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.heads.head_map import shipped_head_map
from razor_dist.jobs.job import run_job
from razor_dist.jobs.pool import EngineLostError
from tests.jobs.tasks import Completions
from tests.tiny_models import Tiny

pytest.importorskip("ray")
from ray.exceptions import RayError

from razor_dist.jobs import cluster, ray_engine, ray_ranks
from razor_dist.jobs.cluster import Demand, Reservation
from razor_dist.jobs.ray_engine import RayEngine
from razor_dist.jobs.ray_ranks import ActorRanks, RankActor, RankPlace, interface_of, rendezvous


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Two with 8 CPUs and 4 GPUs, and one with CPUs alone."""
    has = [{"CPU": 8.0, "GPU": 4.0}] * 2 + [{"CPU": 6.0}]
    total = {"CPU": 22.0, "GPU": 8.0}
    there = [{"Alive": True, "NodeID": str(n), "Resources": own} for n, own in enumerate(has)]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: there)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: total)
    monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"CPU": 3.0})
    return has


@pytest.mark.parametrize(
    ("ranks", "device", "cpus", "placement", "held"),
    [
        (2, "auto", 1, "STRICT_PACK", 4),
        (3, "auto", 1, "STRICT_PACK", 2),
        (3, "auto", 1, "PACK", 2),
        (8, "auto", 1, "STRICT_PACK", 0),
        (8, "auto", 1, "PACK", 1),
        (2, "cuda", 4, "STRICT_PACK", 2),  # of CPUs there are fewer than of GPUs
        (2, "cpu", 1, "STRICT_PACK", 11),
        (2, "cpu", 0.1, "STRICT_PACK", 110),
        (4, "cpu", 2, "PACK", 2),
    ],
)
def test_how_many_engines_the_nodes_hold(
    nodes: list[dict[str, float]],
    ranks: int,
    device: Any,
    cpus: float,
    placement: Any,
    held: int,
) -> None:
    engine = EngineConfig(world_size=ranks, device=device)
    demand = Demand.of(engine, JobConfig(cpus_per_rank=cpus, placement=placement))
    assert demand.bundle == {"CPU": cpus} | ({} if device == "cpu" else {"GPU": 1})
    assert demand.engines_held() == held


def test_what_cannot_grow_is_not_waited_for(nodes: list[dict[str, float]]) -> None:
    demand = Demand(8, {"CPU": 1, "GPU": 1}, "STRICT_PACK")
    with pytest.raises(ClusterError) as error:
        cluster.reserve(demand, "engine 0", 600, threading.Event(), grows=False)
    assert str(error.value) == (
        "engine 0 asks for 8 x (1 GPU + 1 CPU) on one node, which the cluster of 3 nodes "
        "[4 GPU + 8 CPU; 4 GPU + 8 CPU; 6 CPU] with 3 CPU free cannot hold; lower cpus_per_rank "
        "(--cpus-per-rank 0.25) or world_size, or use processes of this host (--no-ray)"
    )


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "refused"), ("127.0.0.1:x", "invalid literal")]
)
def test_a_cluster_that_is_not_there(tmp_path: Path, address: str, why: str) -> None:
    task = Completions({"full": EngineConfig(attention="full")})
    with pytest.raises(ClusterError, match=f"cannot join the Ray cluster '{address}'.*{why}"):
        run_job(task, JobConfig(ray_address=address), tmp_path)


def test_ray_clients_address_is_refused(tmp_path: Path) -> None:
    task = Completions({"full": EngineConfig(attention="full")})
    with pytest.raises(ConfigError, match=r"ray://127\.0.*`ray job submit`, or HOST:6379"):
        run_job(task, JobConfig(ray_address="ray://127.0.0.1:1"), tmp_path)


def test_ranks_of_one_node_meet_at_a_file(tmp_path: Path) -> None:
    environments, store = rendezvous(
        [RankPlace("a", "10.0.0.1", 1), RankPlace("a", "10.0.0.1", 2)], tmp_path, 1, {"a": 8}
    )
    assert store is None
    assert [env["RANK"] for env in environments] == ["0", "1"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1"]
    for env in environments:
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
        assert env["RAZOR_RENDEZVOUS"] == f"file://{tmp_path}/rendezvous"
        assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "lo"


def test_ranks_of_several_nodes_meet_at_a_store_that_listens(tmp_path: Path) -> None:
    places = [RankPlace(node, "127.0.0.1", 1) for node in "aba"]
    environments, store = rendezvous(places, tmp_path, 1, {})
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "0", "1"]
    assert [env["LOCAL_WORLD_SIZE"] for env in environments] == ["2", "1", "2"]
    env = environments[1]
    assert "RAZOR_RENDEZVOUS" not in env and "GLOO_SOCKET_IFNAME" not in env
    client = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    store.set("key", "value")
    assert client.get("key") == b"value"


@pytest.mark.parametrize(
    ("engines", "held", "ranks"),
    [(1, 8, [2, 1, 2]), (2, 4, [4, 4, 4]), (3, 8, [8, 7, 8]), (9, 4, [4, 4, 4])],
)
def test_ranks_are_told_of_all_that_a_node_may_hold(
    engines: int, held: int, ranks: list[int], tmp_path: Path
) -> None:
    places = [RankPlace(node, "127.0.0.1", 1) for node in "aba"]
    environments, _ = rendezvous(places, tmp_path, engines, {"a": held, "b": held})
    assert [int(env["LOCAL_WORLD_SIZE"]) for env in environments] == ranks


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(
        RuntimeError, match=r"no network interface .* 192\.0\.2\.255; name .* GLOO_SOCKET_IFNAME"
    ):
        interface_of("192.0.2.255")


def test_gpus_that_nobody_has_are_waited_for_where_the_cluster_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 4.0})
    config = EngineConfig(device="cuda")
    with pytest.raises(ConfigError, match="no node of the cluster has a GPU"):
        Demand.of(config, JobConfig(), grows=False)
    assert Demand.of(config, JobConfig(), grows=True).bundle == {"CPU": 1, "GPU": 1}
    assert Demand.of(EngineConfig(), JobConfig(), grows=True).bundle == {"CPU": 1}


def reserved(is_placed: bool) -> Reservation:
    """Bundles that all have their nodes, or have lost one for good."""
    group: Any = SimpleNamespace(wait=lambda seconds: is_placed)
    return Reservation(group, {"CPU": 1}, 1)


def starting(
    monkeypatch: pytest.MonkeyPatch, is_placed: bool, *places: Coroutine[Any, Any, RankPlace]
) -> Coroutine[Any, Any, ActorRanks]:
    """Start ranks whose actors answer where they are with ``places``."""

    def make_actor(kind: type, group: Any, rank: int, bundle: Any) -> Any:
        return SimpleNamespace(place=SimpleNamespace(remote=lambda: places[rank]))

    monkeypatch.setattr(ray_ranks, "make_actor", make_actor)
    monkeypatch.setattr(ray_ranks, "_POLL_SECONDS", 0.01)
    config = EngineConfig(world_size=len(places))
    start = ActorRanks.start(reserved(is_placed), config, Path("unused"), Path("unused"))
    return asyncio.wait_for(start, 5)


HERE = RankPlace("a", "127.0.0.1", 1)


def test_ranks_without_a_node_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(ray_ranks.ray, "kill", killed.append)
    places = asyncio.sleep(0, HERE), asyncio.sleep(60, HERE)
    with pytest.raises(ClusterError, match="a node of this engine is gone, and no other"):
        asyncio.run(starting(monkeypatch, False, *places))
    assert len(killed) == 2


def test_an_actor_that_dies_before_it_is_a_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies() -> RankPlace:
        raise RayError("its node has died")

    async def first_exit() -> str:
        ranks = await starting(monkeypatch, True, asyncio.sleep(0, HERE), dies())
        return str(await ranks.first_exit())

    assert asyncio.run(first_exit()) == "rank 1 ended: its node has died"


@pytest.mark.parametrize(("is_placed", "kind"), [(True, EngineError), (False, EngineLostError)])
def test_an_engine_that_loses_a_node_while_it_loads_is_lost(
    is_placed: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise EngineError("rank 1 ended")

    monkeypatch.setattr(ray_engine, "RayLLM", fail)
    monkeypatch.setattr(ray_engine, "inherit_logging", lambda: None)
    with pytest.raises(EngineError, match="rank 1 ended") as error:
        ray_engine.EngineActor().open(Completions({}), EngineConfig(), reserved(is_placed), {})
    assert type(error.value) is kind


def test_a_node_with_another_head_map_model_or_transformers_is_refused(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "inherit_logging", lambda: None)
    monkeypatch.setattr(ray_engine, "RayLLM", Mock(side_effect=EngineError("it is started")))
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    head_map = shutil.copy(shipped_head_map("smollm2"), tmp_path / "map.json")
    config = EngineConfig(model=str(model), head_map=str(head_map))

    def open_here(settings: dict[str, Any]) -> None:
        ray_engine.EngineActor().open(Completions({}), config, reserved(True), settings)

    settings = ray_engine.compared(config)
    with pytest.raises(EngineError, match="it is started"):
        open_here(settings)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(EngineError, match=r"other files than the driver's .*\(model_content is"):
        open_here(settings)
    for weights in model.glob("*.safetensors"):  # as on a driver's host without any
        weights.rename(weights.with_suffix(".elsewhere"))
    settings = ray_engine.compared(config)
    assert "model_content" not in settings
    shutil.copy(shipped_head_map("smollm2-duo"), head_map)
    with pytest.raises(EngineError, match=r"other files than the driver's .*\(head_map is"):
        open_here(settings)
    Path(head_map).unlink()
    with pytest.raises(EngineError, match=": cannot read the head map"):
        open_here(settings)
    config = EngineConfig(model="org/name", attention="full")
    for revision, transformers, error in (
        ("a", "5.1", "it is started"),
        ("b", "5.1", r"\(revision is \"a\" there and \"b\" here\)"),
        ("a", "5.2", r"\(transformers is \"5.1\" there and \"5.2\" here\): .* same transformers"),
    ):
        monkeypatch.setattr(ray_engine, "config_folder", Mock(return_value=Path(revision)))
        monkeypatch.setattr(ray_engine, "version", Mock(return_value=transformers))
        settings = ray_engine.compared(config) if error == "it is started" else settings
        with pytest.raises(EngineError, match=error):
            open_here(settings)


def test_a_node_that_is_lost_before_the_engines_actor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray never says that the actor cannot start."""
    waiting = SimpleNamespace(open=SimpleNamespace(remote=lambda *_: "never ready"))
    killed: list[Any] = []
    monkeypatch.setattr(ray_engine, "make_actor", lambda *_: waiting)
    monkeypatch.setattr(ray_engine.ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr(ray_engine.ray, "kill", killed.append)
    monkeypatch.setattr(ray_engine, "remove_placement_group", killed.append)
    with pytest.raises(EngineLostError, match="lost before it was ready"):
        RayEngine(Completions({}), EngineConfig(), place := reserved(False), threading.Event())
    assert killed == [waiting, place.group]


def test_ranks_know_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RAZOR_API_KEY": "secret", "GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setattr("razor_dist.engine.worker.run_rank", lambda *_: None)
    monkeypatch.setattr(ray_ranks, "inherit_logging", lambda: None)
    monkeypatch.setattr(os, "environ", environment)
    assert RankActor().run(EngineConfig().engine_json(), {"RANK": "1"}, None) == 0
    assert "RAZOR_API_KEY" not in environment and environment["RANK"] == "1"
