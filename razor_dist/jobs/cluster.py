"""The Ray cluster: joining or starting one, and room in it for an engine."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from razor_dist.config.errors import ClusterError, ConfigError
from razor_dist.config.schema import EngineConfig, JobConfig

log = logging.getLogger(__name__)

# Results and items are small; Ray's default of 30 % of memory would be taken from the caches. The
# least that Ray accepts is 75 MiB.
_OBJECT_STORE_BYTES = 80 * 2**20
# Time between two polls of a pending placement group, and between two log lines about it.
_POLL_SECONDS = 1.0
_LOG_SECONDS = 30.0
# Time for a cluster that is joined to answer.
_JOIN_SECONDS = 20.0


@contextmanager
def connected(address: str | None) -> Iterator[bool]:
    """Join a Ray cluster, or start one on this host, until the ``with`` block ends.

    Without an address a cluster is started. Yields True if the cluster may grow, which a started
    one cannot. Raises `ConfigError` for the address of Ray Client, and `ClusterError` if the
    cluster cannot be joined.
    """
    if (address or "").startswith("ray://"):
        raise ConfigError(
            f"{address} is the address of Ray Client, which cannot stream results: use "
            "`ray job submit`, or HOST:6379 (--ray-address, RAY_ADDRESS) on a node of the cluster"
        )
    how: dict[str, Any] = {"address": address or "local"}
    if address is not None:
        _check_listens(address)
    else:
        how |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        ray.init(**how, logging_level=logging.WARNING, log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(f"cannot join the Ray cluster {address!r}: {error}") from error
    try:
        yield address is not None
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raise `ClusterError` unless something listens there: `ray.init` tries for many minutes."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not host:
        return  # "auto", which looks for a cluster of this host
    try:
        socket.create_connection((host.strip("[]"), int(port)), _JOIN_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ClusterError(f"cannot join the Ray cluster {address!r}: {error}") from None


@dataclass(frozen=True)
class Demand:
    ranks: int
    bundle: Mapping[str, float]  # for each rank, by Ray's names of resources
    strategy: Literal["STRICT_PACK", "PACK"]

    @classmethod
    def of(cls, engine: EngineConfig, job: JobConfig, *, grows: bool = True) -> Demand:
        """Return an engine's demand; with ``device: auto`` it is for GPUs if there are any now.

        `ConfigError` for ``device: cuda`` without GPUs in a cluster that never ``grows``.
        """
        bundle = {"CPU": job.cpus_per_rank}
        gpus = ray.cluster_resources().get("GPU", 0)
        if engine.device == "cuda" and not gpus and not grows:
            raise ConfigError("device is cuda, but no node of the cluster has a GPU")
        if engine.device == "cuda" or (engine.device == "auto" and gpus):
            bundle["GPU"] = 1
        return cls(engine.world_size, bundle, job.placement)

    def engines_held(self) -> int:
        """Return the number of engines of this demand that the empty cluster could hold."""
        ranks = ranks_held(self.bundle).values()
        if self.strategy == "PACK":
            return sum(ranks) // self.ranks
        return sum(there // self.ranks for there in ranks)

    def __str__(self) -> str:
        where = "on any nodes" if self.strategy == "PACK" else "on one node"
        return f"{self.ranks} x ({_resources(self.bundle)}) {where}"


class Reservation(NamedTuple):
    """An engine's place on the cluster.

    ``group`` has a ``bundle`` for each rank. Up to ``engines`` engines of such bundles share the
    cluster's nodes.
    """

    group: PlacementGroup
    bundle: Mapping[str, float]
    engines: int


def reserve(
    demand: Demand, what: str, timeout: float, over: threading.Event, *, grows: bool = True
) -> PlacementGroup:
    """Reserve room for an engine; if the cluster is full, wait up to ``timeout`` seconds.

    ``over`` is set when the engine is no longer wanted. In a cluster that never ``grows``, a
    demand that its nodes cannot hold is refused at once. The `ClusterError` names the demand and
    the cluster's resources.
    """
    if not grows and not demand.engines_held():
        raise ClusterError(
            f"{what} asks for {demand}, which {_cluster()} cannot hold; lower cpus_per_rank "
            "(--cpus-per-rank 0.25) or world_size, or use processes of this host (--no-ray)"
        )
    group = placement_group([dict(demand.bundle)] * demand.ranks, strategy=demand.strategy)
    begin, logged_at = time.monotonic(), -_LOG_SECONDS
    try:
        while not group.wait(_POLL_SECONDS):
            waited = time.monotonic() - begin
            if over.is_set():
                raise ClusterError(f"{what} is not needed any more")
            if waited >= timeout:
                raise ClusterError(
                    f"{what} asks for {demand}, for which {_cluster()} had no room within "
                    f"{timeout:g} s"
                )
            if waited - logged_at >= _LOG_SECONDS:
                logged_at, asks = waited, f"it asks for {demand}; {_cluster()}"
                log.info("%s is pending: %s (%.0f of %g s)", what, asks, waited, timeout)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def ranks_held(bundle: Mapping[str, float]) -> dict[str, int]:
    """Return the number of bundles that each node could hold if it were empty, by node id."""
    return {
        node: min(int(has.get(name, 0) / amount + 1e-6) for name, amount in bundle.items())
        for node, has in _nodes().items()
    }


def _nodes() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _cluster() -> str:
    nodes = list(_nodes().values())
    free = ray.available_resources()
    each = "; ".join(map(_resources, nodes[:8]))
    more = f"; {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return (
        f"the cluster of {len(nodes)} node{'s' * (len(nodes) != 1)} [{each}{more}] "
        f"with {_resources({'CPU': 0.0, **free})} free"
    )


def _resources(amounts: Mapping[str, float]) -> str:
    """Format GPUs and CPUs only; Ray also lists memory and node markers as resources."""
    named = [f"{amounts[name]:g} {name}" for name in ("GPU", "CPU") if name in amounts]
    return " + ".join(named) or "nothing"
