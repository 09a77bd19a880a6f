"""A job's engines as processes of this host, without Ray."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from razor_dist.config.errors import ConfigError, EngineError, RazorError
from razor_dist.config.logs import inherit_logging
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.guard import child_environment
from razor_dist.jobs.pool import EngineLostError, EnginePool, JobEngine
from razor_dist.jobs.process import Child
from razor_dist.jobs.task import ExternalEngineConfig, Item, Task, Update, Updates, work_of
from razor_dist.llm.llm import LLM
from razor_dist.llm.progress import ReadingLog

log = logging.getLogger(__name__)

# Time between two checks whether the job is over, while an engine is loading or at work.
_POLL_SECONDS = 0.5
# Time for an idle process to end its own children, such as a server, before it is killed.
_CLOSE_SECONDS = 10.0


class HostEngine:
    """A `JobEngine` on an `LLM` of this process, which restarts dead ranks by itself."""

    def __init__(self, task: Task, llm: LLM) -> None:
        self._task, self._llm = task, llm
        self.close = llm.close

    def run(self, item: Item) -> Updates:
        self._llm.use_tqdm = ReadingLog(item.id)
        try:
            # Wait while ranks that died under an earlier attempt, or item, are started again: calls
            # such as `stats` fail meanwhile, and would use up the attempts of all items.
            _ = self._llm.info
            return (yield from work_of(self._task.run(self._llm, item)))
        except EngineError as error:
            if self._llm.failed:
                raise EngineLostError(str(error)) from error
            raise


class OpenedEngine:
    """A `JobEngine` on the model that an `ExternalEngineConfig` opens in this process."""

    def __init__(self, task: Task, config: ExternalEngineConfig) -> None:
        self._task, self._model = task, config.open()

    def run(self, item: Item) -> Updates:
        return (yield from work_of(self._task.run(self._model, item)))

    def close(self) -> None:
        if hasattr(self._model, "close"):
            self._model.close()


class ExternalEngine:
    """A `JobEngine` on an `OpenedEngine` in a process of its own, which gets ``env`` besides.

    Other libraries replace functions of transformers, may need more memory than there is, and
    look at nothing while they compute: the process can be killed. `EngineError` once ``over`` is
    set while it loads or works. It works on one item at a time.
    """

    def __init__(
        self,
        task: Task,
        config: ExternalEngineConfig,
        env: dict[str, str],
        over: threading.Event,
    ) -> None:
        assert getattr(task, "at_once", 1) == 1, "results come in the order of the items"
        self._over, self._closing = over, threading.Lock()
        self._child = Child(_serve, task, config, env=child_environment() | env)
        self._busy = True
        try:
            self._received()
        except BaseException:
            self.close()
            raise

    def run(self, item: Item) -> Updates:
        self._busy = True
        with suppress(OSError):  # of a process that has ended, as `_received` says
            self._child.connection.send(item)
        while isinstance(news := self._received(), Update):
            yield news
        result: Mapping[str, Any] = news
        return result

    def close(self) -> None:
        with self._closing:
            if not self._busy:
                self._busy = True
                with suppress(OSError):
                    self._child.connection.send(None)
                    # Until it has ended. Not `Popen.wait`: once that has reaped it, its group, in
                    # which children may be left, cannot be killed by its id.
                    self._child.connection.poll(_CLOSE_SECONDS)
            self._child.end()

    def _received(self) -> Any:
        connection = self._child.connection
        try:
            while not connection.poll(_POLL_SECONDS):
                if self._over.is_set():
                    raise EngineError("the job is over")
            found = connection.recv()
        except (EOFError, OSError):
            code = self._child.wait()
            killed = code == -signal.SIGKILL
            advice = "; it may need more memory than there is" if killed else ""
            raise EngineLostError(f"the engine's process ended (code {code}){advice}") from None
        self._busy = isinstance(found, Update)
        if isinstance(found, Exception):
            raise found
        return found


def _serve(connection: Connection, task: Task, config: ExternalEngineConfig) -> None:
    """Open an engine and run the items that come, until None does.

    Sent are None once the engine is open; updates and the result of each item; or an exception.
    """
    inherit_logging()
    try:
        engine = OpenedEngine(task, config)
    except Exception as error:
        connection.send(_as_sent(error))
        return
    connection.send(None)
    while (item := connection.recv()) is not None:
        work = engine.run(item)
        try:
            while True:
                connection.send(next(work))
        except StopIteration as end:
            connection.send(end.value)
        except Exception as error:
            connection.send(_as_sent(error))
    engine.close()


def _as_sent(error: Exception) -> Exception:
    """Return an error that survives pickle: another library's may not, and goes as its text."""
    if not isinstance(error, RazorError):
        log.exception("an error of the engine")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


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


def share_of_host(config: EngineConfig, ranks: int, number: int, engines: int) -> dict[str, str]:
    """Return the environment that gives an engine's ranks their share of this host.

    An engine has room for ``ranks``, the largest world size in the job. Ranks divide memory and
    cores by ``LOCAL_WORLD_SIZE``. `ConfigError` if there are GPUs, but fewer than ranks.
    """
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
    """Open engines of this host."""
    ranks = max(config.world_size for config in task.engines.values())

    def open_engine(name: str, number: int, engines: int, over: threading.Event) -> JobEngine:
        config = task.engines[name]
        env = share_of_host(config, ranks, number, engines)
        if isinstance(config, ExternalEngineConfig):
            threads = config.threads_per_rank(engines * config.world_size)
            config = config.model_copy(update={"threads": threads})
            return ExternalEngine(task, config, env, over)
        return HostEngine(task, HostLLM(numbered(config, number), env, over))

    yield EnginePool(open_engine, engines)
