"""A job's engines on a Ray cluster.

An engine is one placement group with a bundle for each rank. In it are

- `EngineActor`, on the node of the first bundle: the frontend. It holds the `LLM` and runs the
  task's items.
- the ranks, `razor_dist.jobs.ray_ranks.RankActor`, made and owned by it: they end when it does,
  and it ends with the job's driver, so that Ray leaves nothing behind if any process is killed.

A dead rank is the `LLM`'s to replace, in the same place; the item in work fails with `EngineError`.
If the frontend dies, or a node whose ranks Ray places on no other, the engine is lost: the driver
opens another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import remove_placement_group

from razor_dist.config.errors import EngineError, ModelError, RazorError
from razor_dist.config.logs import inherit_logging
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.jobs.cluster import Demand, Reservation, connected, reserve
from razor_dist.jobs.host_engine import HostEngine, OpenedEngine, numbered, settings_of
from razor_dist.jobs.pool import EngineLostError, EnginePool
from razor_dist.jobs.ray_ranks import MOVE_SECONDS, ActorRanks, brief, make_actor
from razor_dist.jobs.results import differences
from razor_dist.jobs.task import ExternalEngineConfig, Item, Task, Update, Updates, engine_settings
from razor_dist.llm.llm import LLM
from razor_dist.models.content import content_hash
from razor_dist.models.registry import HUB_ID, config_folder

log = logging.getLogger(__name__)

# Time for an idle engine to end its ranks and remove its files.
_CLOSE_SECONDS = 10.0
# Time between two checks whether the job is over, while an engine is loading or at work.
_POLL_SECONDS = 1.0


class RayLLM(LLM):
    """An `LLM` whose ranks are actors in a placement group, the first of them on this node."""

    def __init__(self, config: EngineConfig, reservation: Reservation) -> None:
        self.start_ranks = partial(ActorRanks.start, reservation)
        super().__init__(**settings_of(config))


def compared(config: EngineConfig) -> dict[str, Any]:
    """Return what is to be the same on an engine's node: settings, and files by their content.

    The model's content, or a hub id's revision, is left out if the driver's host has none: it needs
    no weights. Transformers has the models' code.
    """
    folder, versions = Path(config.model).expanduser(), {"transformers": version("transformers")}
    if HUB_ID.fullmatch(config.model) and not folder.is_dir():
        with contextlib.suppress(ModelError):
            versions["revision"] = config_folder(config.model).name
    has_weights = any(folder.glob("*.safetensors"))
    content = content_hash(config.model) if has_weights else None
    return engine_settings(config, content) | versions


class EngineActor:
    def open(
        self,
        task: Task,
        config: EngineConfig,
        reservation: Reservation,
        settings: Mapping[str, Any],
    ) -> list[int]:
        """Start the ranks, or open an external model; return the process ids once it is ready.

        `EngineError`, so that other nodes go on, if head map, model or transformers are missing or
        not those of the driver, which are `compared` by its ``settings``; `EngineLostError` if a
        node is lost while the ranks start.
        """
        inherit_logging()
        node = socket.gethostname()
        try:
            here = compared(config)
        except RazorError as error:
            raise EngineError(f"{node}: {error}") from None
        if found := differences(settings, {name: here.get(name) for name in settings}):
            raise EngineError(
                f"{node} has other files than the driver's host ({'; '.join(found)}): give a head "
                "map and a model that all nodes share, and install the same transformers"
            )
        if isinstance(config, ExternalEngineConfig):
            self._engine: HostEngine | OpenedEngine = OpenedEngine(task, config)
            return [os.getpid()]
        try:
            llm = RayLLM(config, reservation)
        except EngineError as error:
            if reservation.group.wait(_POLL_SECONDS):
                raise
            raise EngineLostError(str(error)) from None  # with one of its nodes
        self._engine = HostEngine(task, llm)
        return llm.pids

    def run(self, item: Item) -> Iterator[Update | Mapping[str, Any]]:
        """Yield the updates and, at last, the result: Ray's streams return nothing."""
        yield (yield from self._engine.run(item))

    def close(self) -> None:
        self._engine.close()


class RayEngine:
    """The driver's handle of an engine, ready when the constructor returns.

    The reservation ends when the engine is closed; ``over`` is set when the engine is no longer
    wanted. An actor that dies is an `EngineLostError`, ranks that cannot start an `EngineError`
    with theirs.
    """

    def __init__(
        self,
        task: Task,
        config: EngineConfig,
        reservation: Reservation,
        over: threading.Event,
    ) -> None:
        self._group, self._over = reservation.group, over
        self._lock = threading.Lock()
        self._closed, self._busy = False, 1  # calls that have not come back
        # The bundle's resources are the rank's, where there is one.
        own = reservation.bundle if isinstance(config, ExternalEngineConfig) else {"CPU": 0}
        at_once = getattr(task, "at_once", 1)
        self._actor = make_actor(EngineActor, self._group, 0, own, at_once)
        try:
            ready = self._actor.open.remote(task, config, reservation, compared(config))
            self.pids: list[int] = self._get(ready, placed=False)
        except BaseException:
            self.close()
            raise
        self._came_back()

    def run(self, item: Item) -> Updates:
        with self._lock:
            self._busy += 1
        stream = self._actor.run.options(num_returns="streaming").remote(item)
        while True:
            self._wait(stream)
            news = self._get(next(stream))
            if not isinstance(news, Update):
                self._came_back()
                result: Mapping[str, Any] = news
                return result
            yield news

    def _wait(self, ref: Any, *, placed: bool = True) -> None:
        while not ray.wait([ref], timeout=_POLL_SECONDS)[0]:
            if self._over.is_set():
                raise EngineError("the job is over")
            # If a node is lost before its actor runs, Ray never says so.
            if not (placed or self._group.wait(MOVE_SECONDS)):
                raise EngineLostError(
                    "a node of this engine was lost before it was ready, and no other has had room "
                    f"within {MOVE_SECONDS:g} s"
                )

    def _get(self, ref: Any, *, placed: bool = True) -> Any:
        self._wait(ref, placed=placed)
        try:
            return ray.get(ref)
        except RayTaskError as error:
            self._came_back()
            raise error.cause from None  # as it was raised there
        except RayError as error:
            raise EngineLostError(brief(error)) from None

    def _came_back(self) -> None:
        with self._lock:
            self._busy -= 1

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self._busy:
            with contextlib.suppress(RayError, GetTimeoutError):
                ray.get(self._actor.close.remote(), timeout=_CLOSE_SECONDS)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
            remove_placement_group(self._group)


@contextmanager
def ray_pool(task: Task, job: JobConfig) -> Iterator[EnginePool]:
    with connected(job.cluster) as grows:
        engines = task.engines.items()
        demands = {name: Demand.of(config, job, grows=grows) for name, config in engines}
        held = min(demand.engines_held() for demand in demands.values())
        # One at least: a cluster that scales to nothing grows only when it is asked.
        count = job.engines or max(1, held)
        log.info("%d engines of %s", count, ", ".join(sorted(set(map(str, demands.values())))))

        def open_engine(name: str, number: int, engines: int, over: threading.Event) -> RayEngine:
            demand, config = demands[name], numbered(task.engines[name], number)
            if config.threads is None:
                # As many as were reserved: other engines' ranks may be on the same node.
                threads = max(1, int(job.cpus_per_rank))
                config = config.model_copy(update={"threads": threads})
            what = f"engine {number}"
            group = reserve(demand, what, job.cluster_timeout, over, grows=grows)
            engine = RayEngine(task, config, Reservation(group, demand.bundle, engines), over)
            log.info("%s is ready; its ranks are processes %s", what, engine.pids)
            return engine

        yield EnginePool(open_engine, count)
