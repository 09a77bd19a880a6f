"""The ranks' process groups: how ranks find each other, and which backend carries tensors."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.parallel import shared_memory
from razor_dist.parallel.comm import Communicator, HostLinks

log = logging.getLogger(__name__)

# Settings that may differ between hosts: paths, devices and threads. The files are compared later.
_OF_A_HOST = {"model", "head_map", "prefix_store", "device", "threads"}


def init_distributed(config: EngineConfig, device: torch.device) -> Communicator:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, ...).

    ``RAZOR_RENDEZVOUS`` names a file store for ranks of one host; without it torchrun's
    ``MASTER_ADDR`` and ``MASTER_PORT`` are used. Through a gloo group the ranks agree on the group
    that carries tensors. `ConfigError` is raised on every rank if some have GPUs and others none,
    or if their settings differ.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return Communicator(None)
    # gloo's default of 30 minutes would hide a stopped rank for as long.
    timeout = timedelta(seconds=config.collective_timeout)
    where = os.environ.get("RAZOR_RENDEZVOUS", "env://")
    store, rank, size = next(dist.rendezvous(where, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    if where == "env://":
        store = store_of_this_start(store, rank, size, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    name = "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    ranks = [(name, shared_settings(config))] * size
    dist.all_gather_object(ranks, ranks[0])
    check_alike([settings for _, settings in ranks])
    backend = backend_of([device for device, _ in ranks])
    links = Communicator(dist.group.WORLD)
    if config.shared_memory:
        assert links.group is not None
        # Over NCCL, only plans go through the host's memory.
        compiles = backend == "gloo"
        links = shared_memory.connect(links.group, timeout, compiles=compiles) or links
    if device.type == "cpu":
        return links
    if backend == "nccl":
        return Communicator(_nccl_group(timeout), links)
    if config.ring == "ring_flash_attn":
        raise ConfigError(
            "ring is ring_flash_attn, which needs a GPU for each rank; here ranks share one: "
            "use ring: own"
        )
    if config.weights != "replicated":
        raise ConfigError(
            f"weights is {config.weights}, for which DeepSpeed needs a GPU for each rank; here "
            "ranks share one: use weights: replicated, or fewer ranks"
        )
    if rank == 0:
        log.warning("ranks share a GPU, so what they send goes through the host's memory, slowly")
    return HostLinks(links)


def _nccl_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """An NCCL group of all ranks, whose transfers do not wait behind queued attention blocks."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # new_group sets it too, and warns of another one here
    return dist.new_group(backend="nccl", timeout=timeout, pg_options=options)


def store_of_this_start(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.PrefixStore:
    """Return a view of the store without the entries of earlier starts.

    torchrun's agent keeps one store for all its restarts, with the addresses of ranks that have
    died: a new rank would try to connect to them. ``TORCHELASTIC_RESTART_COUNT`` does not tell the
    starts apart, since each node's agent counts its own restarts. So every rank writes a random
    name, and the names that it has read, until all ranks have read the same names: a rank of an
    earlier start has never seen the new ones. `TimeoutError` after ``timeout``.
    """
    names = [f"razor/name/{r}" for r in range(size)]
    views = [f"razor/view/{r}" for r in range(size)]
    store.set(names[rank], uuid.uuid4().hex)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        view = hashlib.sha256(b"".join(store.multi_get(names))).hexdigest()
        store.set(views[rank], view)
        if set(store.multi_get(views)) == {view.encode()}:
            return dist.PrefixStore(f"razor/{view}", store)
        time.sleep(0.02)
    raise TimeoutError(f"the ranks did not meet within {timeout}")


def backend_of(devices: Sequence[str]) -> Literal["gloo", "nccl"]:
    """The backend for tensors on these devices.

    ``devices`` are, by rank, "cpu" or the UUID of the rank's GPU; all ranks pass the same, and so
    decide alike. `ConfigError` if some ranks compute on a GPU and others do not.
    """
    kinds = {name == "cpu" for name in devices}
    if kinds == {True, False}:
        without = [rank for rank, name in enumerate(devices) if name == "cpu"]
        raise ConfigError(
            f"ranks {without} see no GPU and the others do; set device: cpu, or give each a GPU"
        )
    # NCCL refuses two ranks on one device.
    return "nccl" if kinds == {False} and len(set(devices)) == len(devices) else "gloo"


def shared_settings(config: EngineConfig) -> dict[str, object]:
    """Return the settings that all ranks must have in common, by name."""
    given = json.loads(config.engine_json())
    shared = {name: value for name, value in given.items() if name not in _OF_A_HOST}
    stores = config.prefix_store is not None
    # Not imported above: the package's root stands on this module.
    version = importlib.import_module("razor_dist").__version__
    return {"razor_dist": version, **shared, "prefix_store is given": stores}


def check_alike(ranks: Sequence[Mapping[str, object]]) -> None:
    """Raise `ConfigError` if a rank's values differ from rank 0's, with the first such rank.

    ``ranks`` are, by rank, values by name; all ranks pass the same, and so raise the same error.
    """
    for rank, own in enumerate(ranks):
        differ = [name for name in ranks[0] if own.get(name) != ranks[0][name]]
        if differ:
            what = (f"{name}: {own.get(name)} and not {ranks[0][name]}" for name in differ)
            raise ConfigError(
                f"rank {rank} differs from rank 0 ({'; '.join(what)}): start the ranks of all "
                "hosts with the same settings, head map, weights and razor_dist"
            )
