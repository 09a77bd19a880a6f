"""The pool of engines, with engines that fail on purpose."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.config.errors import ClusterError, ConfigError, EngineError
from razor_dist.jobs.pool import EngineLostError, ItemUpdate, Outcome, run_items
from razor_dist.jobs.task import Item, ItemSize, PartResult, TokensDone, Updates

OK, FAIL, ENGINE, LOST = "ok", "fail", "engine", "lost"


class FakeEngine:
    """Does what an item's script says of its attempts: the last word is repeated."""

    def __init__(self, pool: FakeEngines, name: str) -> None:
        self._pool, self._name = pool, name
        self._room = threading.BoundedSemaphore(pool.at_once)
        self._lost = False
        self.closed = False

    def run(self, item: Item) -> Mapping[str, Any]:
        assert self._room.acquire(blocking=False), "no more items than were asked for"
        try:
            if self._pool.at_once > 1 and (self.closed or self._lost):
                raise RuntimeError("another of its items lost it")
            assert not self.closed and not self._lost and self._name == item.engine
            script = item.data.get("script", [OK])
            attempt = self._pool.attempts[item.id]
            self._pool.attempts[item.id] += 1
            self._pool.order.append(item.id)
            match script[min(attempt, len(script) - 1)]:
                case "fail":
                    raise KeyError("item")
                case "engine":
                    raise EngineError("a rank died")
                case "lost":
                    self._lost = True
                    raise EngineLostError("the node died")
            return {"of": item.id}
        finally:
            self._room.release()

    def close(self) -> None:
        self.closed = True


class FakeEngines:
    """Opens them; ``errors`` are raised first, one by each call."""

    def __init__(self, *errors: Exception, at_once: int = 1) -> None:
        self.at_once = at_once
        self.attempts: Counter[str] = Counter()
        self.order: list[str] = []
        self.opened: list[FakeEngine] = []
        self._errors = list(errors)

    def open(self, name: str, number: int, engines: int, over: threading.Event) -> FakeEngine:
        if self._errors:
            raise self._errors.pop(0)
        engine = FakeEngine(self, name)
        self.opened.append(engine)
        return engine

    def run(self, items: list[Item], engines: int = 1, attempts: int = 3) -> dict[str, Outcome]:
        events = run_items(items, self.open, engines, attempts, self.at_once)
        outcomes = [event for event in events if isinstance(event, Outcome)]
        assert all(engine.closed for engine in self.opened)
        found = {outcome.item.id: outcome for outcome in outcomes}
        assert len(found) == len(outcomes)
        return found


def items_of(scripts: list[list[str]]) -> list[Item]:
    return [Item(str(n), data={"script": script}) for n, script in enumerate(scripts)]


def scripts_of(attempts: int) -> st.SearchStrategy[list[list[str]]]:
    """Draw, for each of some items, how up to so many attempts at it end."""
    script = st.lists(st.sampled_from([OK, FAIL, ENGINE, LOST]), min_size=1, max_size=attempts)
    return st.lists(script, max_size=12)


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("engine-")]


@given(
    scripts=scripts_of(4),
    engines=st.integers(1, 4),
    attempts=st.integers(1, 3),
)
@settings(deadline=None, max_examples=150)
def test_every_item_has_one_outcome(scripts: list[list[str]], engines: int, attempts: int) -> None:
    pool = FakeEngines()
    found = pool.run(items_of(scripts), engines, attempts)
    assert len(found) == len(scripts)
    for id, outcome in found.items():
        script = scripts[int(id)]
        tries = [script[min(n, len(script) - 1)] for n in range(attempts)]
        ends = [n for n, word in enumerate(tries) if word in (OK, FAIL)]
        expected = ends[0] + 1 if ends else attempts
        assert outcome.attempts == pool.attempts[id] == expected
        kind = {OK: type(None), FAIL: KeyError, ENGINE: EngineError, LOST: EngineLostError}
        assert type(outcome.error) is kind[tries[expected - 1]]
        assert outcome.result == ({"of": id} if outcome.error is None else None)
    assert no_threads_left()


@given(
    scripts=scripts_of(3),
    engines=st.integers(1, 3),
    at_once=st.integers(2, 5),
)
@settings(deadline=None, max_examples=100)
def test_of_several_at_once_too(scripts: list[list[str]], engines: int, at_once: int) -> None:
    pool = FakeEngines(at_once=at_once)
    found = pool.run(items_of(scripts), engines)
    assert len(found) == len(scripts)
    for id, outcome in found.items():
        assert pool.attempts[id] <= outcome.attempts <= pool.attempts[id] + 1
        if outcome.error is None:
            assert outcome.result == {"of": id}
        if scripts[int(id)][0] in (OK, FAIL):  # whatever its neighbours did
            assert isinstance(outcome.error, KeyError) == (scripts[int(id)][0] == FAIL)
    assert no_threads_left()


def test_one_engine_takes_the_shortest_first_and_engine_names_in_turn() -> None:
    items = [
        Item(f"{e}{s}", size=s, engine=e) for e, s in zip("bababa", range(6, 0, -1), strict=True)
    ]
    pool = FakeEngines()
    pool.run(items)
    assert pool.order == ["b2", "b4", "b6", "a1", "a3", "a5"]
    assert len(pool.opened) == 2


def test_several_engines_take_the_longest_first() -> None:
    both = threading.Barrier(2)

    class Waits(FakeEngine):
        def run(self, item: Item) -> Mapping[str, Any]:
            result = super().run(item)
            if item.size >= 5:
                both.wait(30)
            return result

    pool = FakeEngines()
    items = [Item(str(size), size=size) for size in range(1, 7)]
    outcomes = run_items(items, lambda name, *_: Waits(pool, name), engines=2)
    assert len([o for o in outcomes if isinstance(o, Outcome)]) == 6
    assert set(pool.order[:2]) == {"5", "6"}


def test_an_engine_that_failed_is_kept_and_a_lost_one_is_not() -> None:
    pool = FakeEngines()
    pool.run(items_of([[ENGINE, OK], [OK]]))
    assert len(pool.opened) == 1
    pool = FakeEngines()
    pool.run(items_of([[LOST, LOST, OK], [OK]]))
    assert len(pool.opened) == 3


def test_engines_that_cannot_be_opened() -> None:
    items = items_of([[OK]] * 4)
    full = ClusterError("no room")
    lost = EngineLostError("lost at once")
    assert len(FakeEngines(full).run(items, engines=2)) == 4, "the other one does it all"
    assert len(FakeEngines(lost, lost).run(items)) == 4
    with pytest.raises(ClusterError, match="no room"):
        FakeEngines(full, full).run(items, engines=2)
    with pytest.raises(EngineLostError):
        FakeEngines(lost, lost, lost).run(items)
    with pytest.raises(ConfigError, match="wrong"):  # the user's mistake: nobody tries again
        FakeEngines(ConfigError("wrong")).run(items, engines=3)
    assert no_threads_left()


def test_a_lost_engines_item_does_not_wait_for_another_to_be_opened() -> None:
    """Nor does the job, when its last item is done elsewhere meanwhile."""
    pool = FakeEngines()
    both, began = threading.Barrier(2), set[int]()
    waits: list[bool] = []

    def open_engine(name: str, number: int, engines: int, over: threading.Event) -> FakeEngine:
        if number in began:
            waits.append(over.wait(30))
            raise ClusterError("there was never any room")
        began.add(number)
        both.wait(30)
        return pool.open(name, number, engines, over)

    items = [Item("lost", size=2, data={"script": [LOST, OK]}), Item("other")]
    found = {o.item.id: o for o in run_items(items, open_engine, engines=2)}
    assert found["lost"].attempts == 2 and found["other"].error is None
    assert waits in ([], [True]), "the item was taken before it was asked for, or while it was"
    assert no_threads_left()


def test_more_engines_than_items_are_not_opened() -> None:
    pool = FakeEngines()
    pool.run(items_of([[OK]]), engines=8)
    assert len(pool.opened) == 1
    assert FakeEngines().run([], engines=8) == {}


class Crowded:
    """An engine of several items at once; "lost" is lost when all of them are under way."""

    def __init__(self, pool: CrowdedEngines) -> None:
        self._pool = pool
        self.end = threading.Event()
        self._all = threading.Barrier(pool.at_once)
        self._under_way: list[str] = []

    def run(self, item: Item) -> Mapping[str, Any]:
        if self.end.is_set():
            raise RuntimeError("it is closed")
        self._under_way.append(item.id)
        self._pool.together.append(list(self._under_way))
        self._pool.attempts[item.id] += 1
        try:
            if self._pool.attempts[item.id] == 1:
                self._all.wait(30)
            match item.data["script"], self._pool.attempts[item.id]:
                case ("lost", _):
                    raise EngineLostError("the node died")
                case ("stays", 1):  # until the engine is closed under it
                    assert self.end.wait(30)
                    raise RuntimeError("the event loop is closed")
            return {"of": item.id}
        finally:
            self._under_way.remove(item.id)

    def close(self) -> None:
        self.end.set()


class CrowdedEngines:
    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.attempts: Counter[str] = Counter()
        self.together: list[list[str]] = []  # what was under way as an item began
        self.opened: list[Crowded] = []

    def run(self, items: list[Item], engines: int = 1) -> list[Outcome]:
        def open_engine(name: str, number: int, engines: int, over: threading.Event) -> Crowded:
            self.opened.append(Crowded(self))
            return self.opened[-1]

        events = run_items(items, open_engine, engines, at_once=self.at_once)
        return [event for event in events if isinstance(event, Outcome)]


def test_an_engine_has_several_items_at_once() -> None:
    pool = CrowdedEngines(3)
    items = [Item(str(n), data={"script": OK}) for n in range(6)]
    found = pool.run(items)  # each waits for two others
    assert sorted(o.item.id for o in found) == ["0", "1", "2", "3", "4", "5"]
    assert all(o.attempts == 1 and o.result == {"of": o.item.id} for o in found)
    assert max(map(len, pool.together)) == 3 and len(pool.opened) == 1
    assert no_threads_left()


def test_engines_share_the_items_though_one_could_take_them_all() -> None:
    both = threading.Barrier(2)

    class Waits(FakeEngine):
        def run(self, item: Item) -> Mapping[str, Any]:
            both.wait(30)
            return super().run(item)

    pool = FakeEngines()
    events = run_items(
        items_of([[OK]] * 2), lambda name, *_: Waits(pool, name), engines=2, at_once=64
    )
    assert {event.item.id for event in events} == {"0", "1"}


def test_what_was_under_way_on_a_lost_engine_goes_to_another_alone() -> None:
    pool = CrowdedEngines(3)
    scripts = {"guilty": LOST, "stays": "stays", "too": "stays"}
    found = {
        o.item.id: o for o in pool.run([Item(i, data={"script": s}) for i, s in scripts.items()])
    }
    assert found.keys() == scripts.keys() and len(pool.together) == 3 + 4
    for id in ("stays", "too"):
        assert (found[id].result, found[id].attempts) == ({"of": id}, 2)
    assert isinstance(found["guilty"].error, EngineLostError) and found["guilty"].attempts == 3
    assert all(len(there) == 1 for there in pool.together[3:]), "nobody suffers from it again"
    assert len(pool.opened) >= 3 and all(engine.end.is_set() for engine in pool.opened)
    assert no_threads_left()


class Stubborn:
    """An engine whose item ends only when it is closed."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def run(self, item: Item) -> Mapping[str, Any]:
        if item.size > 1:
            assert self.end.wait(30)
            raise EngineError("closed")
        return {}

    def close(self) -> None:
        self.end.set()


def test_a_job_that_is_broken_off_ends_its_engines() -> None:
    items = [Item("long", size=2), Item("short")]
    engines = [Stubborn(), Stubborn()]
    results = run_items(items, lambda *_: left.pop(), engines=2)
    left = list(engines)
    first = next(results)
    assert first.item.id == "short"
    results.close()
    assert all(engine.end.is_set() for engine in engines)
    assert no_threads_left()


class InParts:
    """An engine that is lost after the first part of an item that has three."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, item: Item) -> Updates:
        missing = [key for key in "abc" if key not in item.parts]
        yield ItemSize(10 * len(missing), 3, 3 - len(missing))
        for key in missing:
            self.ran.append(key)
            yield PartResult(key, {"of": key}, 10)
            if key == "a":
                raise EngineError("a rank died")
        return {"parts": dict(item.parts)}

    def close(self) -> None:
        pass


def test_parts_that_are_done_are_not_done_again() -> None:
    engine = InParts()
    *news, end = run_items([Item("x")], lambda *_: engine, engines=1)
    assert engine.ran == ["a", "b", "c"]
    updates = [event.update for event in news if isinstance(event, ItemUpdate)]
    assert updates[0] == ItemSize(30, 3) and updates[2] == ItemSize(20, 3, 1)
    assert isinstance(end, Outcome) and end.result == {"parts": {"a": {"of": "a"}}}
    assert end.attempts == 2


@pytest.mark.parametrize("ready_first", [0, 1])
def test_engines_go_on_with_what_they_were_reading(ready_first: int) -> None:
    """Each has the prompts that it read in a store of its own."""
    both, begun = threading.Barrier(2), threading.Event()
    ran: dict[str, int] = {}

    class Reads(InParts):
        def __init__(self, number: int) -> None:
            self._number = number

        def run(self, item: Item) -> Updates:
            ran.setdefault(item.id, self._number)
            begun.set()
            if len(ran) <= 2:
                both.wait(30)
            yield TokensDone(prefilled=1)
            yield TokensDone(prefilled=1)
            return {}

    def open_engine(name: str, number: int, engines: int, over: threading.Event) -> Reads:
        assert number == ready_first or begun.wait(30)
        return Reads(number)

    items = [Item("a", size=2), Item("b", size=1)]
    events = list(run_items(items, open_engine, engines=2))
    assert ran["a"] == ready_first, "the longest goes to the first"
    found = [e for e in events if isinstance(e, ItemUpdate) and isinstance(e.update, PartResult)]
    parts = {item.id: {update.key: update.result} for item, update in found}
    assert len(found) == 2

    before = dict(ran)
    ran.clear()
    begun.clear()
    items = [Item("new", size=3), *(replace(i, parts=parts[i.id]) for i in items)]
    events = list(run_items(items, open_engine, engines=2))
    assert {id: ran[id] for id in "ab"} == before and list(ran)[2:] == ["new"]
    new = [e for e in events if isinstance(e, ItemUpdate) and isinstance(e.update, PartResult)]
    assert [e.item.id for e in new] == ["new"]
