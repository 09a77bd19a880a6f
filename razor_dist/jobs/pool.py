"""Hands items to free engines, and reports each item's progress and outcome.

Each engine has one thread for every item that it works on at once.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from razor_dist.config.errors import ClusterError, EngineError, RazorError
from razor_dist.jobs.task import Item, PartResult, TokensDone, Update, Updates, work_of

log = logging.getLogger(__name__)


class EngineLostError(EngineError):
    """The engine is gone and will not come back by itself; another must be opened."""


class JobEngine(Protocol):
    def run(self, item: Item) -> Mapping[str, Any] | Updates:
        """Work on an item: return its result, or a stream of updates that returns it.

        Several threads may call it at the same time. Raises `EngineLostError` if another engine
        must be opened, `EngineError` if the item may be tried again on this one, and anything else
        if the item is at fault.
        """

    def close(self) -> None:
        """Free the engine's resources; may be called during `run`, and more than once."""


# (name of the task's engine, its number, number of engines, event) -> an engine that is ready. It
# may take long; the event is set when the engine is no longer wanted.
OpenEngine = Callable[[str, int, int, threading.Event], JobEngine]


class EnginePool(NamedTuple):
    open_engine: OpenEngine
    engines: int


@dataclass(frozen=True)
class Outcome:
    """The end of an item: its ``result``, or the ``error`` of its last attempt."""

    item: Item
    result: Mapping[str, Any] | None
    error: Exception | None
    attempts: int
    seconds: float  # of the last attempt, like the engine's number
    engine: int


class ItemUpdate(NamedTuple):
    item: Item
    update: Update


class _ThreadEnd(NamedTuple):
    engine: int  # that cannot be opened
    error: Exception


def run_items(
    items: Iterable[Item],
    open_engine: OpenEngine,
    engines: int,
    attempts: int = 3,
    at_once: int = 1,
) -> Generator[Outcome | ItemUpdate, None, None]:
    """Run items on at most ``engines`` engines; yield their updates and outcomes as they come.

    An engine gets up to ``at_once`` items at a time, fewer if another engine would get none.

    Items run by engine name, in the order in which the names first occur. Within a name a single
    engine takes the smallest `Item.size` first, since short items gain nothing by waiting for long
    ones; several engines take the largest first, so that none works alone at the end.

    If its engine fails, an item is tried up to ``attempts`` times, from the second time on while it
    has the engine to itself: an item that makes engines fail then costs no others. Opening a lost
    engine is tried as often.

    Raises the `RazorError` of the last engine tried if items are left and no engine can be opened;
    a mistake of the user's (`ConfigError`, ...) ends all work at once.
    """
    items = list(items)
    left = len(items)
    engines = min(engines, left)
    at_once = min(at_once, math.ceil(left / max(1, engines)))
    order = {name: place for place, name in enumerate(dict.fromkeys(i.engine for i in items))}
    sign = 1 if engines == 1 else -1
    items.sort(key=lambda item: (order[item.engine], sign * item.size))
    pool = _Pool(items, open_engine, engines, attempts, at_once)
    threads = [_thread(number, pool.work, number) for number in range(engines)]
    for thread in threads:
        thread.start()
    working = len(threads)
    try:
        while left:
            event = pool.events.get()
            if not isinstance(event, _ThreadEnd):
                left -= isinstance(event, Outcome)
                yield event
                continue
            working -= 1
            if not working or not isinstance(event.error, EngineError | ClusterError):
                raise event.error
            log.warning("engine %d is given up: %s; the job goes on with %d", *event, working)
    finally:
        if left:
            log.info("the job ends; its engines are being closed")
        pool.stop()
        for thread in threads:
            thread.join()


def _thread(engine: int, target: Callable[..., None], *arguments: object) -> threading.Thread:
    name = f"engine-{engine}"
    return threading.Thread(target=target, args=arguments, name=name, daemon=True)


def _read_by(engine: int) -> str:
    """Return the key of the part that marks an item which an engine has begun to read."""
    return f"engine {engine}"


class _Pool:
    def __init__(
        self,
        items: Iterable[Item],
        open_engine: OpenEngine,
        engines: int,
        attempts: int,
        at_once: int,
    ) -> None:
        self.events: queue.Queue[Outcome | ItemUpdate | _ThreadEnd] = queue.Queue()
        self.waiting = list(items)
        self._open, self._count = open_engine, engines
        self._attempts, self._at_once = attempts, at_once
        self._begun = engines > 1 and any(item.parts for item in self.waiting)
        self._running = 0  # items that a thread has taken and not yet given back or done
        self._tried: dict[str, int] = {}
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._engines: dict[int, JobEngine] = {}
        self._taken: Counter[int] = Counter()  # places taken of each engine's ``at_once``

    def stop(self) -> None:
        """End all threads; running items are abandoned."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()
            abandoned = list(self._engines.values())
        for engine in abandoned:
            engine.close()

    def work(self, number: int) -> None:
        """Open the engine that the next item needs and run items on it, until none is left.

        The item is taken only once the engine is open, so that a free engine may take it before.
        """
        try:
            while (name := self._wanted()) is not None:
                engine = self._open_patiently(name, number)
                crew = range(self._at_once - 1)
                others = [_thread(number, self._serve, name, number, engine) for _ in crew]
                for thread in others:
                    thread.start()
                self._serve(name, number, engine)
                for thread in others:
                    thread.join()
                self._close(number)
        except Exception as error:
            if not self._over.is_set():
                if not isinstance(error, RazorError):
                    log.exception("engine %d cannot be opened", number)
                self.events.put(_ThreadEnd(number, error))
        finally:
            self._close(number)

    def _serve(self, name: str, number: int, engine: JobEngine) -> None:
        """Run items on an engine, one by one, until it is lost or the next needs another engine."""
        while (item := self._take(name, number, engine)) is not None:
            self._run(item, number, engine)

    def _run(self, item: Item, number: int, engine: JobEngine) -> None:
        places = self._places(item)
        attempt = self._tried[item.id] = self._tried.get(item.id, 0) + 1
        result: Mapping[str, Any] | None = None
        failure: Exception | None = None
        parts, mark = dict(item.parts), _read_by(number)
        begin = time.monotonic()
        try:
            work = work_of(engine.run(item))
            while not self._over.is_set():
                update = next(work)
                news = [update]
                if self._count > 1 and isinstance(update, TokensDone) and mark not in parts:
                    news.append(PartResult(mark, {}, 0, whole=False))
                for one in news:
                    if isinstance(one, PartResult):
                        parts[one.key] = one.result
                    self.events.put(ItemUpdate(item, one))
            work.close()
        except StopIteration as end:
            result = end.value
        except Exception as error:
            failure = error
        seconds = time.monotonic() - begin
        if self._over.is_set():
            return  # a failure here follows from ending the engine
        with self._changed:
            gone = self._engines.get(number) is not engine
            lost = isinstance(failure, EngineLostError) and not gone
            if lost:
                del self._engines[number]
            elif gone and failure is not None and not isinstance(failure, EngineError):
                # Closed under it, since another item lost it.
                failure = EngineLostError(f"the engine was lost: {failure!r}")
            again = isinstance(failure, EngineError) and attempt < self._attempts
            if again:
                self.waiting.insert(0, replace(item, parts=parts))
            else:
                self.events.put(Outcome(item, result, failure, attempt, seconds, number))
            self._running -= 1
            self._taken[number] -= places
            self._changed.notify_all()
        if again:
            log.warning("%s, attempt %d of %d: %s", item.id, attempt, self._attempts, failure)
        if lost:
            engine.close()

    def _open_patiently(self, name: str, number: int) -> JobEngine:
        log.info("engine %d is being opened", number)
        for attempt in range(1, self._attempts + 1):
            try:
                engine = self._open(name, number, self._count, self._over)
                break
            except EngineLostError as error:
                if attempt == self._attempts or self._over.is_set():
                    raise
                log.warning("engine %d was lost while it was opened: %s", number, error)
        with self._changed:
            self._engines[number] = engine
        if self._over.is_set():  # `stop` may not have seen it
            raise EngineError("the job is over")
        return engine

    def _close(self, number: int) -> None:
        with self._changed:
            engine = self._engines.pop(number, None)
        if engine is not None:
            engine.close()

    def _wanted(self) -> str | None:
        """Return the next item's engine name, None if no item is left.

        Waits while items are in work, since they may be tried again.
        """
        with self._changed:
            while not self.waiting and self._running and not self._over.is_set():
                self._changed.wait()
            return None if self._over.is_set() or not self.waiting else self.waiting[0].engine

    def _take(self, name: str, number: int, engine: JobEngine) -> Item | None:
        """Take the next item once its engine has room.

        Waits as `_wanted` does. None if the next item is for another engine name, the engine is
        lost, or no item is left.
        """
        with self._changed:
            while (
                not self._over.is_set()
                and self._engines.get(number) is engine
                and (self.waiting or self._running)
            ):
                if self.waiting:
                    item = self._next(number)
                    places = self._places(item)
                    if item.engine != name:
                        break
                    if self._taken[number] + places <= self._at_once:
                        self._running += 1
                        self._taken[number] += places
                        self.waiting.remove(item)
                        return item
                self._changed.wait()
            return None

    def _next(self, number: int) -> Item:
        """Return the waiting item that an engine takes.

        An engine may have a prefix store with items that the engine of this number was reading in
        an earlier run: it takes these items first, and items begun by other engines last.
        """
        first = self.waiting[0]
        if first.id in self._tried or not self._begun:
            return first
        same = (item for item in self.waiting if item.engine == first.engine)
        return min(same, key=lambda item: bool(item.parts) - 2 * (_read_by(number) in item.parts))

    def _places(self, item: Item) -> int:
        """Return how many of an engine's places an item takes: one, or all once it has failed."""
        return self._at_once if item.id in self._tried else 1
