"""Random histories: whatever happens to a server, each answer is that of a fresh engine alone.

Requests of every kind come, are aborted and end, in engines that share ranks and a prefix store.
Nothing hangs, every step's accounts are the ranks', and in the end everything is free again.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from razor_dist.config.errors import RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import build
from razor_dist.engine.build import RankEngine, make_engine
from razor_dist.engine.worker import follow
from razor_dist.heads.decision import HeadRoles
from razor_dist.kernels import chosen
from razor_dist.parallel.comm import Communicator
from razor_dist.prefix import transfer
from razor_dist.protocol.messages import (
    CacheScope,
    Progress,
    PromptLogprobs,
    Token,
    answer_ids,
)
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import Op, StepPlan
from tests.cases import model_and_shape
from tests.engine.test_core import evict_all
from tests.logits import split_of
from tests.prefix.engines import ids
from tests.prefix.test_tiers import TO_8_BITS
from tests.ranks import Ranks
from tests.tiny_models import Tiny
from tests.tokenizer import copy_with_letters

Tokens = tuple[int, ...]

END = 2  # ends a message and an answer
SOURCE_HEADS = [(1, 0)]  # the first of the head that `split_of` keeps of every model
MOST_STEPS = 5000  # of an engine that comes to an end
# More by HISTORIES=1000, for a search of hours.
COUNT = int(os.environ.get("HISTORIES", "48"))
WORLDS, FAMILIES = (1, 2, 4), ("letters", "letters", "bloom", "qwen2")
if COUNT > 100:
    WORLDS, FAMILIES = (1, 2, 3, 4), (*FAMILIES, "phi3", "glm", "mistral", "mixtral", "qwen3")
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
    common: dict[str, Any]  # settings that the answers depend on
    engines: tuple[dict[str, Any], ...]  # other settings of each
    actions: tuple[tuple[int, Action], ...]  # each with the engine that it happens to


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
        for _ in range(MOST_STEPS):
            if not self.engine.core.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

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
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert sum(stats["kv_bytes_per_rank"]) == 0
        found = stats["prefix_cache"]
        self.happened += Counter(
            {
                "hits": found["hits"],
                "evictions": found["evictions"],
                "from host memory": found.get("host", {}).get("hits", 0),
                "from disk": found.get("disk", {}).get("hits", 0),
                "accepted": stats.get("spec_decode", {}).get("num_accepted_tokens", 0),
                "aborted": len(self.aborted),
                "pinned": sum(ask.pin for ask, _ in self.asked.values()),
                "answers": sum(len(answered.tokens) for answered in self.answered.values()),
            }
        )
        evict_all(core)
        assert (room.accounts.free == room.accounts.sizes).all()
        core.idle()  # every rank counts the same
        assert not self.engine.runner.sequences
        room.close()


def make(comm: Communicator, path: str, heads: bool | None, changed: dict[str, Any]) -> RankEngine:
    build.PART_BYTES = transfer.PART_BYTES = 1500  # several parts of each node
    config = EngineConfig(model=path, world_size=comm.size, **changed)
    model, _ = model_and_shape(path)
    split = split_of(Path(path))
    if heads is not None:
        split = tuple((heads,) * len(row) for row in split)
    roles = HeadRoles(split, sources=[] if heads is False else SOURCE_HEADS)
    return make_engine(model, config, roles, comm, eos_token_ids=(END,))


@contextmanager
def turn(comm: Communicator, number: int) -> Iterator[None]:
    """On rank 0: the other ranks follow one of the engines meanwhile."""
    comm.broadcast(torch.tensor([number]), "control")
    try:
        yield
    finally:
        StepPlan(Op.STOP).send(comm)


def play(
    comm: Communicator, path: str, history: History, store: str
) -> tuple[str | None, Counter[str]]:
    """Play a history on every rank; on rank 0, return what is wrong with it, and what it had."""
    # Blocks that short texts have many of.
    with mock.patch.multiple(chosen, BLOCK=8, RECENT=24):
        return _play(comm, path, history, store)


def _play(
    comm: Communicator, path: str, history: History, store: str
) -> tuple[str | None, Counter[str]]:

    def begin(number: int) -> RankEngine:
        own = history.engines[number]
        disk = {"prefix_store": store} if "prefix_store_gb" in own else {}
        return make(comm, path, history.heads, history.common | own | disk)

    engines = [begin(number) for number in range(len(history.engines))]
    if comm.rank:
        told = torch.zeros(1, dtype=torch.int64)
        while comm.broadcast(told, "control") is None and (number := int(told)) < _ENDS:
            if number < _BEGINS:
                follow(engines[number])
            else:
                engines[number - _BEGINS] = begin(number - _BEGINS)
        return None, Counter()
    clients = [Client(engine) for engine in engines]
    ended: list[Client] = []
    try:
        for index, (which, action) in enumerate(history.actions):
            number = which % len(clients)
            with turn(comm, number):
                act(clients[number], action, f"r{index}")
            if isinstance(action, Restart):
                comm.broadcast(torch.tensor([_BEGINS + number]), "control")
                ended.append(clients[number])
                clients[number] = Client(begin(number))
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
    plain = make(Communicator(None), path, history.heads, history.common | changed)
    bound = TO_8_BITS if history.common.get("kv_dtype") == "int8" else 2e-4
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


def same_tokens(
    got: list[Token], want: list[Token], bound: float, params: SamplingParams, *, whole: bool
) -> None:
    assert len(got) == len(want) or (len(got) < len(want) and not whole) or bound == TO_8_BITS
    for one, other in zip(got, want, strict=False):
        if one.token != other.token and bound == TO_8_BITS:
            # Of two tokens about as likely, either; a sampled one may be any.
            assert params.temperature > 0 or params.adjusts_logits or near(one, other, bound)
            return
        assert one.token == other.token, (got, want)
        assert (one.finish == other.finish) or (not whole and other.finish), (got, want)
        if params.logprobs is not None:
            assert near(one, other, bound), (got, want)
            same(dict(one.top), dict(other.top), bound)
        if params.return_sources:
            same(dict(one.sources or ()), dict(other.sources or ()), bound)


def near(one: Token, other: Token, bound: float) -> bool:
    if one.logprob is None or other.logprob is None:
        return one.logprob == other.logprob
    return abs(one.logprob - other.logprob) <= bound


def same(got: dict[int, float], want: dict[int, float], bound: float) -> None:
    """The same keys and values; of those that are least, and so nearly left out, one may differ."""
    least = max((min(each.values()) for each in (got, want) if each), default=0.0) + bound
    for key in got.keys() | want.keys():
        if key in got and key in want:
            assert got[key] == pytest.approx(want[key], abs=bound), (got, want)
        else:
            assert got.get(key, want.get(key, 0.0)) <= least, (got, want)


def same_prompt(got: list[Any], want: list[Any], bound: float) -> None:
    assert len(got) == len(want)
    for (logprob, _, top), (other, _, others) in zip(got, want, strict=True):
        assert logprob == pytest.approx(other, abs=bound)
        same(dict(top), dict(others), bound)


# ----------------------------------------------------------------------- what happens


@st.composite
def params_of(draw: st.DrawFn, *, letters: bool, by_priority: bool) -> SamplingParams:
    rarely = st.integers(0, 5).map(lambda n: n == 5)
    values: dict[str, Any] = {
        "max_tokens": draw(st.sampled_from([1, 2, 6, 30, 60])),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.8, 1.5])),
        "ignore_eos": draw(st.booleans()),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "seed": draw(st.integers(0, 3)),
        "logprobs": draw(st.sampled_from([0, 2])),
    }
    if draw(rarely):
        values["prompt_logprobs"] = draw(st.sampled_from([0, 1]))
    if draw(rarely):
        values |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    if draw(rarely):
        values |= {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {7: 3.0, 9: -5.0}}
    if draw(rarely):
        values["return_sources"] = 2
    if draw(rarely):
        values["repetition_detection"] = {"max_pattern_size": 3, "min_count": 2}
    if draw(rarely):
        values["stop_token_ids"] = list(range(4, 30))
    if letters and draw(rarely):
        values["structured_outputs"] = {"regex": "(ab|c[0-9]){3,9}!"}
    elif draw(rarely):
        values["min_tokens"] = min(4, values["max_tokens"])
    if by_priority:
        values["priority"] = draw(st.sampled_from([-1, 0, 1]))
    return SamplingParams(**values)


@st.composite
def texts(draw: st.DrawFn) -> Tokens:
    """Beginnings that others share, repeated parts, and ends of messages."""
    first = (draw(st.integers(0, 1)), draw(st.sampled_from([110, 70, 30, 5])))
    more = st.tuples(st.integers(2, 4), st.integers(1, 40))
    found = list(ids(first, *draw(st.lists(more, max_size=3))))
    if draw(st.booleans()):
        found += found[-draw(st.integers(1, 20)) :]
    if len(found) > 40 and draw(st.integers(0, 3)) == 0:
        found[draw(st.sampled_from([29, 34, 40]))] = END
    return tuple(found[:260])


@st.composite
def asks(draw: st.DrawFn, *, letters: bool, by_priority: bool) -> Ask:
    params = draw(params_of(letters=letters, by_priority=by_priority))
    pin = draw(st.integers(0, 6)) == 6
    if pin:
        params = SamplingParams()
    return Ask(
        draw(texts()),
        params,
        salt=draw(st.sampled_from([None, None, None, "s"])),
        prefix=draw(st.sampled_from([None, 0, 1])),
        pin=pin,
        quota=draw(st.sampled_from([None, 10**9, 40_000])) if pin else None,
        cut=draw(st.sampled_from([None, None, None, 1, 4])),
        cache_prompt=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def histories(draw: st.DrawFn) -> History:
    family = draw(st.sampled_from(FAMILIES))
    exact = draw(st.integers(0, 7)) == 7
    heads = draw(st.sampled_from([None, None, True, False]))
    common: dict[str, Any] = {
        "max_model_len": 400,
        "window_min": draw(st.sampled_from([12, 3, 40])),
        "window_ratio": draw(st.sampled_from([5, 3, None])),
        "block": draw(st.sampled_from([4, 1, 8])),
        "sink_tokens": draw(st.sampled_from([4, 0])),
        "compensation": draw(st.sampled_from([True, True, False])),
        "prefill": "exact" if exact else "local",
        "kv_dtype": draw(st.sampled_from(["auto", "auto", "int8"])),
    }
    if family != "bloom" and heads is not False:
        # Of the first all blocks are chosen, of the second none: no rounding decides.
        common["retrieval_share"] = draw(st.sampled_from([0.0, 0.0, 1e-30, 0.99]))
    engines = []
    by_priority = draw(st.booleans())
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        tier = "none" if exact else draw(st.sampled_from(["none", "none", "host", "disk", "both"]))
        given: dict[str, Any] = {
            "page_size": draw(st.sampled_from([4, 1, 16])),
            "chunked_prefill_size": draw(st.sampled_from([32, 8, 100])),
            "kv_tokens": draw(st.sampled_from([250, 600, 2000] if tier == "none" else [250])),
            "prefix_tail_tokens": draw(st.sampled_from([24, 0, 8])),
            "prefix_cache": not exact and (tier != "none" or draw(st.sampled_from([True, False]))),
            "max_num_seqs": draw(st.sampled_from([4, 3, 6])),
            "scheduling_policy": "priority" if by_priority else "time",
            "max_step_ms": draw(st.sampled_from([1e6, 1e-3, 5.0])),
            "cuda_graphs": draw(st.booleans()),
            "decode": draw(st.sampled_from(["replicated", "tensor"])),
            "prefix_host_gb": draw(st.sampled_from([1.0, 2e-4])) if tier in ("host", "both") else 0,
        }
        if tier in ("disk", "both"):
            given["prefix_store_gb"] = draw(st.sampled_from([1.0, 2e-4]))
        if draw(st.booleans()):
            given["speculative_config"] = {
                "method": draw(st.sampled_from(["lookup", "ngram"])),
                "prompt_lookup_min": draw(st.sampled_from([1, 2])),
            }
        engines.append(given)
    action = st.one_of(
        asks(letters=family == "letters", by_priority=by_priority),
        asks(letters=family == "letters", by_priority=by_priority),
        st.builds(Steps, st.sampled_from([1, 2, 5, 30])),
        st.builds(Steps, st.sampled_from([1, 2, 5, 30])),
        st.builds(Abort, st.integers(0, 9)),
        st.just(Restart()) if draw(st.booleans()) else st.builds(Steps, st.just(100)),
        st.just(Look()),
    )
    actions = draw(st.lists(st.tuples(st.integers(0, 1), action), min_size=8, max_size=30))
    return History(
        draw(st.sampled_from(WORLDS)),
        family,
        heads,
        common,
        tuple(engines),
        tuple(actions),
    )


@pytest.mark.parametrize("count", [COUNT, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_history_is_answered_as_by_fresh_engines(
    count: int,
    ranks: Ranks,
    tiny: Tiny,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = {
        "bloom": tiny("bloom"),
        "letters": copy_with_letters(tiny("llama"), tmp_path_factory.mktemp("letters") / "llama"),
    }

    happened: Counter[str] = Counter()

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(history=histories())
    def check(history: History) -> None:
        path = made.get(history.family) or tiny(history.family)
        store = tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp())
        try:
            played = ranks(history.world).run(play, str(path), history, store, timeout=150)
        finally:
            shutil.rmtree(store, ignore_errors=True)
        problem, found = played[0]
        assert problem is None, problem
        happened.update(found)

    check()
    print(dict(happened))
    rare = ("accepted", "refused", "evictions") if count > 100 else ()
    assert all(happened[what] for what in ("hits", "aborted", "pinned", *rare)), happened
