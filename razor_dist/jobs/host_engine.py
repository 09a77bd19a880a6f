"""A job's engines as processes of this host, without Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from razor_dist.config.errors import ConfigError, EngineError
from razor_dist.config.schema import EngineConfig
from razor_dist.jobs.pool import EngineLostError, EnginePool
from razor_dist.jobs.task import ExternalEngineConfig, Item, Task, Work, work_of
from razor_dist.llm.llm import LLM
from razor_dist.llm.progress import ReadingLog

# Between two looks at whether the job is over, while an engine is loading.
_POLL_SECONDS = 0.5


class HostEngine:
    """A `JobEngine` on an `LLM` of this process, which restarts dead ranks by itself.

    ``llm`` may also be what an `ExternalEngineConfig` opens; it is closed with this engine.
    """

    def __init__(self, task: Task, llm: LLM) -> None:
        self._task, self._llm = task, llm
        self.close = llm.close

    def run(self, item: Item) -> Work:
        if hasattr(self._llm, "use_tqdm"):  # what an `ExternalEngineConfig` opens has none
            self._llm.use_tqdm = ReadingLog(item.id)
        try:
            return (yield from work_of(self._task.run(self._llm, item)))
        except EngineError as error:
            if self._llm.failed:
                raise EngineLostError(str(error)) from error
            raise


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Return an engine's settings as keyword arguments of `LLM`, one for each field."""
    return {name: getattr(config, name) for name in EngineConfig.model_fields}


class HostLLM(LLM):
    """An `LLM` whose ranks get ``env`` besides; an `EngineError` once ``over`` is set meanwhile."""

    def __init__(self, config: EngineConfig, env: Mapping[str, str], over: threading.Event) -> None:
        start: Any = self.start_ranks
        self.start_ranks = partial(start, env=env)
        self._over = over
        super().__init__(**settings_of(config))

    def _wait_until_ready(self) -> None:
        ready = self.loop.submit(self.client.ready())
        while not wait([ready], _POLL_SECONDS).done:
            if self._over.is_set():
                raise EngineError("the job is over")
        ready.result()


def share_of_host(config: EngineConfig, number: int, engines: int) -> dict[str, str]:
    """Return what tells an engine's ranks their part of a host that it shares with others.

    They take their part of memory and cores by ``LOCAL_WORLD_SIZE``. `ConfigError` if there are
    GPUs, but fewer than ranks.
    """
    ranks = config.world_size
    if engines == 1:
        return {}
    share = {"LOCAL_WORLD_SIZE": str(engines * ranks)}
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if gpus:
        if engines * ranks > gpus:
            raise ConfigError(
                f"engines is {engines} and world_size {ranks}, which makes {engines * ranks} "
                f"ranks, and this host has {gpus} GPUs; lower one of them"
            )
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = given.split(",") if given else list(map(str, range(gpus)))
        share["CUDA_VISIBLE_DEVICES"] = ",".join(names[number * ranks : (number + 1) * ranks])
    return share


Config = TypeVar("Config", bound=EngineConfig)


def numbered(config: Config, number: int) -> Config:
    """Put an engine's number for ``{engine}`` in ``prefix_store``, which one process may write."""
    store = config.prefix_store and config.prefix_store.replace("{engine}", str(number))
    return config.model_copy(update={"prefix_store": store})


@contextmanager
def host_pool(task: Task, engines: int = 1) -> Iterator[EnginePool]:
    """Open engines of this host; `ConfigError` for several external ones where there are GPUs."""
    for name, config in task.engines.items():
        external = isinstance(config, ExternalEngineConfig)
        if external and "CUDA_VISIBLE_DEVICES" in share_of_host(config, 0, engines):
            raise ConfigError(
                f"engines is {engines}, but each engine {name!r} would take the host's first GPU; "
                "use one engine, or Ray, which gives each a GPU of its own"
            )

    def open_engine(name: str, number: int, engines: int, over: threading.Event) -> HostEngine:
        config = task.engines[name]
        if isinstance(config, ExternalEngineConfig):
            return HostEngine(task, config.open())
        env = share_of_host(config, number, engines)
        return HostEngine(task, HostLLM(numbered(config, number), env, over))

    yield EnginePool(open_engine, engines)
