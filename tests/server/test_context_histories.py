"""Random histories of contexts: requests, keys, deaths and servers on one store, all at once.

Each answer is that of a fresh engine to the whole text, no key finds another's contexts or has more
pinned than it may, and in the end everything is free again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from razor_dist.api.contexts import KeptContext
from razor_dist.config.errors import EngineError, RequestError
from razor_dist.engine.build import RankEngine
from razor_dist.engine.worker import _handle
from razor_dist.frontend.answers import LiveChoices
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.kept import KeptText
from razor_dist.frontend.prompts import Checked
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Add, CacheScope, Ready, ToEngine, ToFrontend
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server.context import Context
from razor_dist.server.contexts import Contexts
from tests.engine.cores import evict_all, run, tokens
from tests.prefix.engines import engine_of, ids
from tests.server.used_contexts import contexts_of

COUNT = int(os.environ.get("HISTORIES", "25"))
MOST = 60_000  # bytes that a key may have pinned: two texts or three
REFUSED = {"pinned_contexts_full", "pinned_prefixes_hold_cache", "kv_capacity_exceeded"}
TTL = 3600


@dataclass(frozen=True)
class Ask:
    """A request for ``n`` answers; ``marks`` are places of its text that are kept."""

    key: str
    text: tuple[int, ...]
    marks: tuple[int, ...]
    handle: int | None  # chooses one of the ids that this key was given
    salt: str | None
    n: int


@dataclass(frozen=True)
class Do:
    """An event for a server, or for one of its requests or contexts."""

    what: str  # "step", "hang up", "end", "expire", "die" or "restart"
    number: int  # of steps; or it chooses the request or context


Action = Ask | Do


def kept(text: tuple[int, ...]) -> KeptContext:
    """A context of tokens, whose text nobody reads."""
    raw = np.array(text, np.int32).tobytes()
    own = KeptText(len(text), hashlib.sha256(raw).digest(), len(text), "", raw, raw)
    one = KeptContext(own, TTL, [{"role": "user", "content": str(text)}])
    return msgspec.structs.replace(one, digest=one.computed_digest)


class Rank0:
    """The frontend's connection to an engine in this process."""

    def __init__(self, engine: RankEngine) -> None:
        self.engine, self.answers = engine, list[ToFrontend]()

    def send(self, message: ToEngine) -> None:
        assert isinstance(message, Add) or type(message).__name__ == "Abort"
        self.answers += _handle(self.engine, message)  # type: ignore[arg-type]

    def drop(self) -> None:
        pass


@dataclass
class Server:
    """A frontend with its contexts, and its engine."""

    start: Callable[[], RankEngine]
    client: EngineClient = field(init=False)
    contexts: Contexts = field(init=False)
    rank0: Rank0 = field(init=False)
    asked: list[tuple[LiveChoices, tuple[int, ...]]] = field(default_factory=list)
    used: list[Context] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = EngineClient(Path("unused"))
        self.contexts = contexts_of(self.client, MOST)
        self.begin()

    def begin(self) -> None:
        self.rank0 = Rank0(self.start())
        self.client.rank0 = self.rank0  # type: ignore[assignment]
        self.client.receive(Ready(self.rank0.engine.info))

    @property
    def core(self) -> Any:
        return self.rank0.engine.core

    def end(self) -> None:
        self.core.stop()
        self.client.lost("it was killed")
        for choices, _ in self.asked:
            choices.close()

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            messages, self.rank0.answers = self.rank0.answers, []
            if self.core.has_work:
                messages += self.core.step()
            for message in messages:
                self.client.receive(message)
            for _ in range(4):
                await asyncio.sleep(0)
            for key in "ab":
                pinned = self.core.scheduler.pinned.values()
                own = (r.nbytes for r in pinned if r.quota and r.quota[0] == key)
                assert sum(own) <= self.contexts.most

    async def drain(self) -> None:
        for _ in range(3000):
            await self.step()
            if not (self.core.has_work or self.rank0.answers):
                return
        raise AssertionError("the engine does not come to an end")


class History:
    """Plays actions on two servers of one store."""

    def __init__(self, start: Callable[[], RankEngine], plain: RankEngine, store: Path) -> None:
        self.store = store
        self.servers = [Server(start), Server(start)]
        self.plain, self.known = plain, dict[tuple[int, ...], list[int]]()
        self.given: list[tuple[str, str, tuple[int, ...]]] = []  # key, id, and its text
        self.happened: Counter[str] = Counter()

    async def play(self, actions: list[tuple[int, Action]]) -> None:
        for number, action in actions:
            server = self.servers[number]
            if isinstance(action, Ask):
                await self.ask(server, action)
            else:
                await self.do(number, action)
            await asyncio.sleep(0)
        for server in self.servers:
            await server.drain()
            await self.check(server)
            await server.contexts.written()
        for server in self.servers:
            for key, id_, _ in self.given:
                try:
                    await server.contexts.end(id_, key)
                except RequestError as error:
                    assert error.code == "context_not_found"
            for key in "ab":
                assert await server.contexts.listed(key, None) == []
            await server.drain()
        for server in self.servers:
            assert not server.client._streams and not server.core.seconds_left()
            stats = server.core.stats()
            assert sum(stats.kv_bytes_per_rank) == stats.running == 0
            evict_all(server.core)
            accounts = server.core.scheduler.room.accounts
            assert (accounts.free == accounts.sizes).all()
            server.end()

    async def ask(self, server: Server, ask: Ask) -> None:
        text, base, salt = ask.text, None, ask.salt
        own = [(id_, begin) for key, id_, begin in self.given if key == ask.key]
        try:
            if ask.handle is not None and own:
                id_, begin = own[ask.handle % len(own)]
                base, salt, text = await server.contexts.find(id_, ask.key), None, (*begin, *text)
                assert tuple(base.kept.text.tokens.tolist()) == begin
            places = [len(text) - len(ask.text) + at for at in ask.marks]
            marks = [kept(text[:at]) for at in places if 0 < at < len(text)]
            found = await server.contexts.use(base, marks, ask.key, salt)
        except RequestError as error:
            assert error.code == "context_not_found"
            self.happened["not found"] += 1
            return
        pinned, used = (None, []) if found is None else found
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=ask.n)
        prompt = Checked(np.array(text, np.int32), params)
        choices = LiveChoices(server.client, None, [prompt], pinned=pinned, scope=CacheScope(salt))
        server.asked.append((choices, text))
        server.used += [context for context in used if context not in server.used]
        self.happened["by handle"] += base is not None
        for context in used:
            begin = tuple(context.kept.text.tokens.tolist())
            if (ask.key, context.id, begin) not in self.given:
                self.given.append((ask.key, context.id, begin))

    async def do(self, number: int, do: Do) -> None:
        server = self.servers[number]
        self.happened[do.what] += 1
        if do.what == "step":
            await server.step(do.number)
        elif do.what == "hang up" and server.asked:
            server.asked.pop(do.number % len(server.asked))[0].close()
        elif do.what == "end" and self.given:
            key, id_, _ = self.given[do.number % len(self.given)]
            try:
                await server.contexts.find(id_, "b" if key == "a" else "a")
                raise AssertionError("a key finds another's context")
            except RequestError:
                pass
            try:
                await server.contexts.end(id_, key)
            except RequestError as error:
                assert error.code == "context_not_found"
        elif do.what == "expire" and server.used:
            context = server.used[do.number % len(server.used)]
            context.used = past = time.time() - 2 * TTL
            for path in self.store.rglob(f"{context.id}*"):
                os.utime(path, (past, past))
        elif do.what in ("die", "restart"):
            await self.check(server)
            await server.contexts.written()
            server.end()
            await asyncio.sleep(0)
            if do.what == "restart":
                self.servers[number] = Server(server.start)
            else:
                server.asked = []
                server.begin()

    async def check(self, server: Server) -> None:
        """Compare all answers that have ended, and take them from the list."""
        going = []
        for choices, text in server.asked:
            if choices._unfinished:
                going.append((choices, text))
                continue
            try:
                async for _ in choices.events():
                    pass
            except (RequestError, EngineError) as error:
                code = getattr(error, "code", None)
                lost = isinstance(error, EngineError) or "prefix" in str(error)
                assert code in REFUSED or lost, error
                self.happened["refused"] += 1
            else:
                for choice in choices.choices:
                    assert [piece.token for piece in choice.pieces] == self.alone(text)
                self.happened["answered"] += 1
            choices.close()
        server.asked = going

    def alone(self, text: tuple[int, ...]) -> list[int]:
        if text not in self.known:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            self.plain.core.add("alone", list(text), params)
            self.known[text] = tokens(run(self.plain.core)["alone"])
        return self.known[text]


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    text = ids((draw(st.integers(1, 2)), draw(st.sampled_from([20, 60, 90]))))
    text += ids((draw(st.integers(3, 4)), draw(st.integers(1, 25))))
    marks = draw(st.lists(st.sampled_from([16, 20, 60, 70, 90]), max_size=2, unique=True))
    return Ask(
        draw(st.sampled_from("ab")),
        text,
        tuple(sorted(marks)),
        draw(st.none() | st.integers(0, 5)),
        draw(st.sampled_from([None, None, "s"])),
        draw(st.sampled_from([1, 1, 2])),
    )


def actions() -> Iterator[st.SearchStrategy[Action]]:
    yield from (asks(), asks(), st.builds(Do, st.just("step"), st.sampled_from([1, 3, 30, 100])))
    yield st.builds(Do, st.just("step"), st.just(100))
    for what in ("hang up", "end", "expire", "die", "restart"):
        yield st.builds(Do, st.just(what), st.integers(0, 5))


@pytest.mark.long
def test_any_history_of_contexts_is_answered_as_if_nothing_were_kept(
    tiny: Callable[[str], Path], tmp_path_factory: Any
) -> None:
    path, happened = str(tiny("llama")), Counter[str]()
    given_ = {"max_model_len": 400, "kv_tokens": 600, "max_num_seqs": 3, "max_step_ms": 1e6}
    plain = engine_of(Communicator(None), path, {"max_model_len": 400, "prefix_cache": False})

    @settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.integers(0, 1), st.one_of(*actions())), min_size=6, max_size=30))
    def check(history: list[tuple[int, Action]]) -> None:
        store = tmp_path_factory.mktemp("store")
        own = given_ | {"prefix_store": str(store)}

        async def play() -> None:
            one = History(lambda: engine_of(Communicator(None), path, own), plain, store)
            await one.play(history)
            happened.update(one.happened)

        asyncio.run(play())

    # What few random histories may have: a context asked by its handle, too many, and an end.
    def ask(first: int, *marks: int, handle: int | None = None) -> Ask:
        return Ask("a", ids((first, 90), (3, 5)), marks, handle, None, 1)

    known = [ask(1, 60), Do("step", 100), ask(2, handle=0), Do("step", 100)]
    known += [ask(first, 90) for first in (3, 4, 5)] + [Do("step", 100), Do("die", 0)]
    known += [Do("expire", 0), ask(2, handle=0)]
    check = example([(0, action) for action in known])(check)
    check()
    print(dict(happened))
    assert all(happened[what] for what in ("answered", "by handle", "die", "expire"))


@pytest.mark.parametrize(("most", "sequences"), [(10**6, 5), (MOST, 5), (10**6, 1)])
def test_a_mark_on_the_last_block_of_every_turn_is_never_refused(
    tiny: Callable[[str], Path], most: int, sequences: int
) -> None:
    """There is room to pin a conversation, or its beginning, or nothing beside a request."""
    path, cached, pinned = str(tiny("llama")), list[int](), list[int]()
    sizes = {"max_model_len": 400, "kv_tokens": 2000, "window_max": 16, "max_step_ms": 1e6}
    sizes["max_num_seqs"] = sequences

    async def play() -> None:
        server = Server(lambda: engine_of(Communicator(None), path, sizes))
        server.contexts.most = most
        for turn in range(12):
            text = ids((1, 40), (2, 20 * turn + 25))
            marks = [kept(text[:at]) for at in (40, len(text) - 5)]
            found = await server.contexts.use(None, marks, "a", None)
            assert found is not None
            prompt = Checked(np.array(text, np.int32), SamplingParams(max_tokens=2))
            choices = LiveChoices(server.client, None, [prompt], pinned=found[0])
            await server.drain()
            async for _ in choices.events():
                pass
            choices.close()
            cached.append(choices.choices[0].cached_tokens)
            assert len(server.core.scheduler.pinned) <= 4
        held = [one["bytes"]["device"] for one in await server.contexts.listed("a", None)]
        assert sum(held) <= most and len(held) <= 3
        pinned.append(sum(held))
        server.end()

    asyncio.run(play())
    assert bool(pinned[0]) == (sequences > 1)
    assert all(now >= 40 + 20 * (turn - 1) for turn, now in enumerate(cached) if turn), cached
