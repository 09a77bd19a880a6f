"""A job's engines as processes of this host, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from razor_dist.config.errors import EngineError
from razor_dist.config.schema import EngineConfig
from razor_dist.jobs.pool import EngineLostError, EnginePool
from razor_dist.jobs.task import ExternalEngineConfig, Item, Task, Work, work_of
from razor_dist.llm.llm import LLM
from razor_dist.llm.progress import ReadingLog


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


Config = TypeVar("Config", bound=EngineConfig)


def numbered(config: Config, number: int) -> Config:
    """Put an engine's number for ``{engine}`` in ``prefix_store``, which one process may write."""
    store = config.prefix_store and config.prefix_store.replace("{engine}", str(number))
    return config.model_copy(update={"prefix_store": store})


@contextmanager
def host_pool(task: Task, engines: int = 1) -> Iterator[EnginePool]:
    def open_engine(name: str, number: int, over: threading.Event) -> HostEngine:
        config = task.engines[name]
        if isinstance(config, ExternalEngineConfig):
            return HostEngine(task, config.open())
        return HostEngine(task, LLM(**settings_of(numbered(config, number))))

    yield EnginePool(open_engine, engines)
