"""Histories of requests, aborts and restarts on real ranks, beside a fresh engine's answers."""

from __future__ import annotations

import itertools
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from razor_dist.config.errors import RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import build
from razor_dist.engine.build import RankEngine, make_engine
from razor_dist.engine.worker import follow
from razor_dist.heads.decision import HeadRoles
from razor_dist.kernels import chosen
from razor_dist.parallel.comm import Communicator
from razor_dist.prefix import transfer
from razor_dist.protocol.messages import CacheScope, Progress, PromptLogprobs, Token, answer_ids
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import Stop
from tests.cases import model_and_shape
from tests.engine.cores import evict_all
from tests.logits import split_of, windows_of
from tests.prefix.stores import TO_4_BITS, TO_8_BITS
from tests.same_answers import same_prompt, same_tokens

Tokens = tuple[int, ...]
END = 2  # ends a message and an answer
SOURCE_HEADS = [(1, 0)]  # the first of the head that `split_of` keeps of every model
# Of an engine on CPU that comes to an end. Steps say nothing: they also wait for a busy disk.
MOST_SECONDS = 100
REFUSED = {"pinned_prefixes_hold_cache", "kv_capacity_exceeded", "context_length_exceeded"}
REFUSED |= {"pinned_contexts_full"}


# What rank 0 says to the others: to follow the engine of a number, to make it anew, or to end.
_BEGINS, _ENDS = 10, 20


@dataclass(frozen=True)
class Ask:
    """A request; ``prefix`` chooses one of the pinned prefixes, if there are any."""

    prompt: Tokens
    params: SamplingParams
    salt: str | None = None
    prefix: int | None = None
    pin: bool = False
    quota: int | None = None  # bytes that pins may take, as of one key's contexts
    cut: int | None = None  # answers are aborted after so many tokens, as by a stop string
    cache_prompt: bool = True


@dataclass(frozen=True)
class Abort:
    which: int  # of the answers and pinned prefixes that there are


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Look:
    """Ask for counters, which compares rank 0's accounts with every rank's."""


@dataclass(frozen=True)
class Restart:
    """The engine ends, and another begins with its settings and its store."""


Action = Ask | Abort | Steps | Look | Restart


@dataclass(frozen=True)
class History:
    world: int
    family: str
    heads: bool | None  # all are retrieval heads, or none is; None mixes them
    windows: bool  # streaming heads have windows of two lengths, not the settings'
    common: dict[str, Any]  # settings that the answers depend on
    engines: tuple[dict[str, Any], ...]  # other settings of each
    actions: tuple[tuple[int, Action], ...]  # each with the engine that it happens to
    device: str = "cpu"  # of these engines; those that they are compared with are on CPU


@dataclass
class Answered:
    """An engine's output for one request: tokens by answer, log-probabilities of its prompt."""

    tokens: dict[str, list[Token]] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)


@dataclass
class Client:
    """One engine's requests, as a frontend knows them."""

    engine: RankEngine
    # Each with the prompts of the prefixes that it continues, the first one first.
    asked: dict[str, tuple[Ask, tuple[Tokens, ...]]] = field(default_factory=dict)
    answered: dict[str, Answered] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)  # answers and pinned prefixes
    pinned: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    happened: Counter[str] = field(default_factory=Counter)
    seconds: float = MOST_SECONDS  # of an engine that comes to an end

    def add(self, name: str, ask: Ask) -> None:
        pinned = [] if ask.prefix is None else self.pinned
        prefix = pinned[ask.prefix % len(pinned)] if pinned and ask.prefix is not None else None
        try:
            self.engine.core.add(
                name,
                ask.prompt,
                ask.params,
                prefix_id=prefix,
                pin=ask.pin,
                quota=None if ask.quota is None else ("key", ask.quota),
                scope=CacheScope(ask.salt, ask.cache_prompt),
            )
        except RequestError as error:
            assert error.code in REFUSED or error.param in ("n", "return_sources"), error
            self.happened["refused"] += 1
            return
        before: tuple[Tokens, ...] = ()
        if prefix is not None:
            continued, first = self.asked[prefix]
            before = (*first, continued.prompt)
        self.asked[name] = ask, before
        self.answered[name] = Answered()
        if ask.pin:
            self.pinned.append(name)
        self.open += [name] if ask.pin else answer_ids(name, ask.params.n)

    def abort(self, name: str) -> None:
        self.engine.core.abort(name)
        self.open.remove(name)
        self.aborted.add(name)
        if name in self.pinned:
            self.pinned.remove(name)

    def step(self) -> None:
        for message in self.engine.core.step():
            assert isinstance(message, Token | Progress | PromptLogprobs), message
            assert message.id in self.open, message
            found = self.answered[message.id.partition("/")[0]]
            if isinstance(message, Progress):
                found.progress.append(message)
            elif isinstance(message, PromptLogprobs):
                found.prompt_logprobs += message.logprobs
            else:
                found.tokens.setdefault(message.id, []).append(message)
                if message.finish is not None:
                    self.open.remove(message.id)
        for name in list(self.open):
            request = name.partition("/")[0]
            cut, tokens = self.asked[request][0].cut, self.answered[request].tokens
            if cut is not None and len(tokens.get(name, ())) >= cut:
                self.abort(name)

    def drain(self) -> None:
        end = time.monotonic() + self.seconds
        while self.engine.core.has_work:
            assert time.monotonic() < end, "the engine does not come to an end"
            self.step()

    def end(self) -> None:
        """All answers end, pinned prefixes are released, and everything is free again."""
        self.drain()
        core, room = self.engine.core, self.engine.core.scheduler.room
        assert self.open == self.pinned
        for name in reversed(list(self.pinned)):
            self.abort(name)
        self.drain()
        assert core.seconds_left() == {}
        stats = core.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert sum(stats.kv_bytes_per_rank) == 0
        found, lower = stats.prefix_cache, stats.prefix_cache.lower
        self.happened += Counter(
            {
                "hits": found.hits,
                "evictions": found.evictions,
                "from host memory": lower["host"].hits if "host" in lower else 0,
                "from disk": lower["disk"].hits if "disk" in lower else 0,
                "accepted": stats.spec_decode.num_accepted_tokens if stats.spec_decode else 0,
                "aborted": len(self.aborted),
                "pinned": sum(ask.pin for ask, _ in self.asked.values()),
                "answers": sum(len(answered.tokens) for answered in self.answered.values()),
            }
        )
        evict_all(core)
        assert (room.accounts.free == room.accounts.sizes).all()
        core.idle()  # every rank counts the same
        assert not self.engine.runner.sequences
        room.tiers.close()


def make(
    comm: Communicator, path: str, history: History, changed: dict[str, Any], device: str = "cpu"
) -> RankEngine:
    build.PART_BYTES = transfer.PART_BYTES = 1500  # several parts of each node
    config = EngineConfig(model=path, world_size=comm.size, **(history.common | changed))
    model, _ = model_and_shape(path, device)
    if device == "cuda" and comm.size > 1:
        comm = Communicator(comm.group, comm)
    split, heads = split_of(Path(path)), history.heads
    if heads is not None:
        split = tuple((heads,) * len(row) for row in split)
    windows = windows_of(split) if history.windows else None
    roles = HeadRoles(split, windows, sources=[] if heads is False else SOURCE_HEADS)
    return make_engine(model, config, roles, comm, eos_token_ids=(END,))


@contextmanager
def turn(comm: Communicator, number: int) -> Iterator[None]:
    """On rank 0: the other ranks follow one of the engines meanwhile."""
    comm.broadcast(torch.tensor([number]), "control")
    try:
        yield
    finally:
        Stop().send(comm)


def play(
    comm: Communicator, path: str, history: History, store: str
) -> tuple[str | None, Counter[str]]:
    """Play a history on every rank; on rank 0, return what is wrong with it, and what it had."""
    if history.device != "cpu":  # whose kernels take blocks of one size
        return _play(comm, path, history, store)
    # Blocks that short texts have many of.
    with mock.patch.multiple(chosen, BLOCK=8, RECENT=24):
        return _play(comm, path, history, store)


def _play(
    comm: Communicator, path: str, history: History, store: str
) -> tuple[str | None, Counter[str]]:

    def begin(number: int) -> RankEngine:
        own = history.engines[number]
        disk = {"prefix_store": store} if "prefix_store_gb" in own else {}
        return make(comm, path, history, own | disk, history.device)

    engines = [begin(number) for number in range(len(history.engines))]
    if comm.rank:
        told = torch.zeros(1, dtype=torch.int64)
        while comm.broadcast(told, "control") is None and (number := int(told)) < _ENDS:
            if number < _BEGINS:
                follow(engines[number])
            else:
                engines[number - _BEGINS] = begin(number - _BEGINS)
        return None, Counter()
    seconds = MOST_SECONDS if history.device == "cpu" else 10 * MOST_SECONDS
    clients = [Client(engine, seconds=seconds) for engine in engines]
    ended: list[Client] = []
    try:
        for index, (which, action) in enumerate(history.actions):
            number = which % len(clients)
            with turn(comm, number):
                act(clients[number], action, f"r{index}")
            if isinstance(action, Restart):
                comm.broadcast(torch.tensor([_BEGINS + number]), "control")
                ended.append(clients[number])
                clients[number] = Client(begin(number), seconds=seconds)
        for finish in (Client.drain, Client.end):
            for number, client in enumerate(clients):
                with turn(comm, number):
                    finish(client)
    except Exception:  # the ranks are still together: the next history can be played
        return traceback.format_exc(), Counter()
    finally:
        comm.broadcast(torch.tensor([_ENDS]), "control")
    try:
        for client in [*ended, *clients]:
            compare(client, path, history)
    except AssertionError:
        return traceback.format_exc(), Counter()
    return None, sum((client.happened for client in [*ended, *clients]), Counter())


def act(client: Client, action: Action, name: str) -> None:
    core = client.engine.core
    match action:
        case Ask():
            client.add(name, action)
        case Abort():
            if client.open:
                client.abort(client.open[action.which % len(client.open)])
        case Steps():
            for _ in range(action.count):
                if core.has_work:
                    client.step()
        case Restart():
            client.end()
        case Look():
            core.stats()
            assert all(seconds >= 0 for seconds in core.seconds_left().values())


def compare(client: Client, path: str, history: History) -> None:
    changed: dict[str, Any] = {"prefix_cache": False, "cuda_graphs": False, "max_step_ms": 1e6}
    if history.common.get("retrieval_share") == 1e-30:
        changed["retrieval_share"] = 0.0
    plain = make(Communicator(None), path, history, changed)
    bound = {"int8": TO_8_BITS, "int4": TO_4_BITS}.get(history.common["kv_dtype"], 2e-4)
    for name, (ask, before) in client.asked.items():
        found, prompt = client.answered[name], (*itertools.chain(*before), *ask.prompt)
        if ask.pin:
            if name not in client.aborted:
                assert found.progress[-1].processed == len(prompt)
            continue
        for index, answer in enumerate(answer_ids(name, ask.params.n)):
            got = found.tokens.get(answer, [])
            if not got:
                assert answer in client.aborted, answer
                continue
            params = replace(ask.params.for_answer(index), priority=0)
            # What continues a prefix of an exact prefill is not prefilled exactly.
            parts = (*before, ask.prompt) if history.common["prefill"] == "exact" else (prompt,)
            want = alone(plain, parts, params)
            whole = answer not in client.aborted
            same_tokens(got, want.tokens["alone"], bound, params, whole=whole)
            if ask.params.prompt_logprobs is not None and name not in client.aborted:
                new = want.prompt_logprobs[-len(ask.prompt) :]
                same_prompt(found.prompt_logprobs[1:], new[1:], bound)
                assert len(found.prompt_logprobs) == len(ask.prompt)


def alone(plain: RankEngine, parts: tuple[Tokens, ...], params: SamplingParams) -> Answered:
    """The answer to a prompt whose first parts are pinned, one after the other."""
    client = Client(plain)
    for index, part in enumerate(parts[:-1]):
        client.add(f"pinned {index}", Ask(part, SamplingParams(), prefix=-1, pin=True))
        client.drain()
    client.add("alone", Ask(parts[-1], params, prefix=-1))
    client.drain()
    for name in list(client.pinned):
        client.abort(name)
    return client.answered["alone"]
