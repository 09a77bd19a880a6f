"""An engine's ranks as Ray actors, in the place of `razor_dist.frontend.ranks.RankGroup`."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from razor_dist.config.cores import set_library_defaults
from razor_dist.config.errors import ClusterError, RazorError
from razor_dist.config.logs import inherit_logging
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.ranks import RankExit, Ranks
from razor_dist.jobs.cluster import Reservation, ranks_held
from razor_dist.protocol.messages import EXIT_USER_ERROR, FrontendUnreachableError

# Time for killed actors to end. More is of no use: their successors wait for the room anyway.
_KILL_SECONDS = 10.0
# Time between two checks whether all bundles are placed.
_POLL_SECONDS = 1.0
# Time for Ray to place a lost node's bundles on another node.
MOVE_SECONDS = 10.0


class RankPlace(NamedTuple):
    node: str
    address: str
    pid: int


class RankActor:
    def place(self) -> RankPlace:
        context = ray.get_runtime_context()
        return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    def run(self, config_json: str, env: Mapping[str, str], socket_path: str | None) -> int:
        """Be a rank until the frontend says shutdown; return a rank's exit code."""
        inherit_logging()
        os.environ.pop("RAZOR_API_KEY", None)  # code that the model brings runs here
        os.environ.update(env)
        set_library_defaults(os.environ)
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface_of(ray.util.get_node_ip_address())
        # Only now: gloo and OpenMP read the environment when they are loaded.
        from razor_dist.engine.worker import run_rank

        try:
            run_rank(EngineConfig.from_json(config_json), socket_path)
        except FrontendUnreachableError as error:
            logging.getLogger(__name__).error("rank 0 ends: %s", error)
            return 1
        except RazorError:
            return EXIT_USER_ERROR  # the frontend tells the user
        return 0


def make_actor(
    kind: type, group: PlacementGroup, index: int, resources: Mapping[str, float], threads: int = 1
) -> Any:
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    cpus, gpus = resources["CPU"], resources.get("GPU", 0)
    make: Any = ray.remote(kind)
    needs = {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": threads}
    return make.options(**needs, scheduling_strategy=place).remote()


class ActorRanks(Ranks):
    """One generation of ranks, each an actor in a bundle of its own. Build it with `start`."""

    def __init__(
        self,
        actors: list[Any],
        pids: list[int],
        ends: Iterable[Coroutine[Any, Any, RankExit]],
        store: Any = None,
    ) -> None:
        super().__init__(ends)
        self._actors, self._pids = actors, pids
        self._store = store  # lives as long as the ranks may look into it

    @property
    def pids(self) -> list[int]:
        return self._pids

    @classmethod
    async def start(
        cls, reservation: Reservation, config: EngineConfig, folder: Path, socket_path: Path
    ) -> ActorRanks:
        """Start ranks as `RankGroup.start` does, rank 0 in the first bundle, on this node.

        `ClusterError` if another bundle has lost its node, and Ray finds none with room.
        """
        group, bundle, engines = reservation
        actors = [make_actor(RankActor, group, rank, bundle) for rank in range(config.world_size)]
        try:
            refs = [actor.place.remote() for actor in actors]
            found = await _places(refs, group)
            if dead := [one for one in found if isinstance(one, RankExit)]:
                # Return: the supervisor reports which actor died.
                return cls(actors, [], [asyncio.sleep(0, dead[0])])
            places = [one for one in found if isinstance(one, RankPlace)]
            environments, store = rendezvous(places, folder, engines, ranks_held(bundle))
            refs = [
                actor.run.remote(config.engine_json(), env, str(socket_path) if rank == 0 else None)
                for rank, (actor, env) in enumerate(zip(actors, environments, strict=True))
            ]
        except BaseException:  # cancelled: leave none behind
            for actor in actors:
                ray.kill(actor)
            raise
        ends = [_end(rank, ref) for rank, ref in enumerate(refs)]
        return cls(actors, [place.pid for place in places], ends, store)

    async def stop(self, patience: float = 2.0) -> None:
        # Ray knows no milder way that a rank in a collective would obey.
        self.kill()
        await self.wait(_KILL_SECONDS)

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


async def _places(refs: list[Any], group: PlacementGroup) -> list[RankPlace | RankExit]:
    """Return each rank's place, or how its actor ended.

    `ClusterError` if a bundle has lost its node and gets no other; Ray would wait for ever.
    """
    calls = [asyncio.create_task(_place(rank, ref)) for rank, ref in enumerate(refs)]
    try:
        while (await asyncio.wait(calls, timeout=_POLL_SECONDS))[1]:
            if not await asyncio.to_thread(group.wait, MOVE_SECONDS):
                raise ClusterError(
                    "a node of this engine is gone, and no other has had room for its ranks within "
                    f"{MOVE_SECONDS:g} s"
                )
        return [call.result() for call in calls]
    finally:
        for call in calls:
            call.cancel()


async def _place(rank: int, ref: Any) -> RankPlace | RankExit:
    try:
        place: RankPlace = await ref
    except RayError as error:
        return RankExit(rank, 1, brief(error))
    return place


async def _end(rank: int, ref: Any) -> RankExit:
    try:
        return RankExit(rank, await ref)
    except RayTaskError as error:
        return RankExit(rank, 1, f"{type(error.cause).__name__}: {error.cause}")
    except RayError as error:
        return RankExit(rank, 1, brief(error))


def brief(error: RayError) -> str:
    """Return a Ray error's message without ids and general advice."""
    lines = (line.strip() for line in str(error).splitlines())
    reasons = [line for line in lines if line and not re.match(r"[a-z_]+:", line)]
    return " ".join(reasons).partition(" Some common causes include")[0] or repr(error)


def rendezvous(
    places: list[RankPlace], folder: Path, engines: int, held: Mapping[str, int]
) -> tuple[list[dict[str, str]], Any]:
    """Return each rank's environment, and the store at which ranks of several nodes meet.

    ``LOCAL_WORLD_SIZE``, by which ranks divide a node's memory and cores, counts the ranks that all
    ``engines`` may have on the node, up to the ``held`` number that fits there.

    On one node ranks meet at a file and talk over loopback, as in `RankGroup`. Otherwise they meet
    at a store that already listens, as torchrun's agent does, so that no port is raced for.
    """
    nodes = [place.node for place in places]
    shared, store = {"WORLD_SIZE": str(len(places))}, None
    if len(set(nodes)) == 1:
        shared["RAZOR_RENDEZVOUS"] = f"file://{folder / 'rendezvous'}"
        shared["GLOO_SOCKET_IFNAME"] = shared["NCCL_SOCKET_IFNAME"] = "lo"
    else:
        from torch.distributed import TCPStore

        store = TCPStore(places[0].address, 0, is_master=True, wait_for_workers=False)
        shared["MASTER_ADDR"], shared["MASTER_PORT"] = places[0].address, str(store.port)
        shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def ranks_of(node: str) -> int:
        own = nodes.count(node)
        return max(own, min((engines - 1) * len(nodes) + own, held.get(node, own)))

    environments = [
        {
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(ranks_of(node)),
        }
        for rank, node in enumerate(nodes)
    ]
    return environments, store


def interface_of(address: str) -> str:
    """Return the network interface with an address: gloo would take that of the host's name."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == address for a in addresses):
            return name
    raise RuntimeError(
        f"no network interface of this node has its address {address}; name one by the variable "
        "GLOO_SOCKET_IFNAME"
    )
