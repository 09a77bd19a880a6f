"""The choice of backend, which all ranks must make alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.parallel import process_group
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.process_group import (
    backend_of,
    check_alike,
    init_distributed,
    shared_settings,
    store_of_this_start,
)
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["cpu", "cpu"], "gloo"),
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-a"], "gloo"),
        (["GPU-a", "GPU-b", "GPU-a", "GPU-b"], "gloo"),
        # Another node's ranks have GPUs of their own; nobody may try NCCL for all that.
        (["GPU-a", "GPU-b", "GPU-c", "GPU-c"], "gloo"),
    ],
)
def test_nccl_wants_a_gpu_for_each_rank(devices: list[str], backend: str) -> None:
    assert backend_of(devices) == backend


def test_ranks_without_a_gpu_among_others_are_named() -> None:
    with pytest.raises(ConfigError, match=r"ranks \[1, 3\] see no GPU .* set device: cpu"):
        backend_of(["GPU-a", "cpu", "GPU-b", "cpu"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"page_size": 32}, "page_size: 32 and not 64"),
        (
            {"prefix_store": "/there", "retrieval_share": 0.1},
            "share: 0.1 and not 0.0; prefix_store",
        ),
        ({"model": "/there", "head_map": "/map", "threads": 3, "device": "cpu"}, None),
    ],
)
def test_ranks_of_other_settings_are_named(given: dict[str, Any], told: str | None) -> None:
    """But each host has its own folders and cores."""
    settings = [shared_settings(EngineConfig(**of)) for of in ({}, {}, given)]
    if told is None:
        check_alike(settings)
        return
    with pytest.raises(ConfigError, match=f"rank 2 differs from rank 0 .*{re.escape(told)}"):
        check_alike(settings)


def join(comm: Communicator, folder: str, each: list[dict[str, Any]]) -> str:
    """Meet as ranks of these settings do; return the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(comm.rank))
        patch.setenv("WORLD_SIZE", str(comm.size))
        patch.setenv("RAZOR_RENDEZVOUS", f"file://{folder}/store")
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)  # there is one
        with pytest.raises(ConfigError) as error:
            init_distributed(EngineConfig(**each[comm.rank]), torch.device("cpu"))
        return str(error.value)


def test_no_rank_goes_on_beside_one_of_other_settings(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    first, second = ranks(2).run(join, str(tmp_path), [{}, {"window_min": 5}])
    assert first == second and "(window_min: 5 and not 4000)" in first


def compiling(comm: Communicator, folder: str, gpus: list[str]) -> bool:
    """Meet as ranks on these GPUs do; return whether their links compile operations for the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(comm.rank))
        patch.setenv("WORLD_SIZE", str(comm.size))
        patch.setenv("RAZOR_RENDEZVOUS", f"file://{folder}/{gpus[1]}")
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)  # there is one
        about = SimpleNamespace(uuid=gpus[comm.rank])
        patch.setattr(torch.cuda, "get_device_properties", lambda _: about)
        patch.setattr(dist, "ProcessGroupNCCL", mock.Mock(), raising=False)
        patch.setattr(dist, "new_group", lambda **_: dist.group.WORLD)
        connect = mock.Mock(return_value=None)
        patch.setattr(process_group.shared_memory, "connect", connect)
        init_distributed(EngineConfig(), torch.device("cuda", comm.rank))
        found: bool = connect.call_args.kwargs["compiles"]
        return found


def test_ranks_with_a_gpu_each_compile_nothing_for_the_cpu(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """Ranks that share a GPU send through the host's memory, and compile for it."""
    for gpus, compiles in ((["GPU-a", "GPU-b"], False), (["GPU-a", "GPU-a"], True)):
        assert ranks(2).run(compiling, str(tmp_path), gpus) == [compiles, compiles]


def test_ranks_of_a_restart_do_not_see_what_the_dead_ones_wrote() -> None:
    """torchrun's agent hands every start the same store."""
    agents = dist.HashStore()

    def meet(rank: int) -> dist.Store:
        return store_of_this_start(agents, rank, 3, timedelta(seconds=20))

    with ThreadPoolExecutor(3) as threads:
        for start in range(3):
            stores = list(threads.map(meet, range(3)))
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", str(start))
            assert [store.get("address") for store in stores] == [str(start).encode()] * 3


def test_transfers_of_nccl_have_a_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a ring's transfers wait behind the attention blocks that are queued."""
    made: dict[str, Any] = {}
    options = mock.Mock(Options=lambda **given: SimpleNamespace(**given))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda **given: made.update(given))
    process_group._nccl_group(timedelta(seconds=7))
    assert made["backend"] == "nccl" and made["timeout"] == timedelta(seconds=7)
    # torch warns where the options have another time-out than the group.
    wanted = SimpleNamespace(is_high_priority_stream=True, _timeout=timedelta(seconds=7))
    assert made["pg_options"] == wanted
