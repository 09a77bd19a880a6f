"""Room in the engine's core: what pinned prefixes make it refuse, and that what is taken in ends.

The model is left out: a stand-in for the runner does what the ranks do with pages and slots, for
several ranks at once, so that the scheduler's arithmetic is checked against real page pools.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from razor_dist.cache.caches import CacheConfig, new_caches
from razor_dist.cache.pages import PageTable
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.cache.sequence import ChunkedPrefill, Sequence
from razor_dist.cache.slots import Arena
from razor_dist.config.errors import RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.core import EngineCore
from razor_dist.engine.request import Request
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.sequences import Sequences
from razor_dist.parallel.sharding import shard_sizes
from razor_dist.parallel.zigzag import Chunk
from razor_dist.protocol.messages import CacheScope, Progress, Token, answer_ids
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import BatchEntry, Op, StepPlan
from tests.engine.test_core import evict_all

VOCABULARY, CHUNK, PAGE = 8, 6, 2
MAX_LEN = 40
POLICY = StreamingPolicy(window_min=4, window_ratio=2, window_max=None, sinks=1, block=1)
POLICIES = (POLICY.with_window(3, alibi=True), POLICY)
TAIL, CACHED = 4, 5
WIDEST = Arena.of(POLICY, MAX_LEN, 1, TAIL).places


class PagesOnly:
    """Executes step plans for all ranks, as far as pages and slots go: a runner without a model."""

    slowdown = 1.0
    most_decoded = 64
    beside = 1  # sequences beside those that run and those that stay: a copy that is being made
    device, graphs = torch.device("cpu"), None
    shape = SimpleNamespace(vocab_size=VOCABULARY, head_dim=1, alibi=False, dual_chunk=None)

    def __init__(
        self,
        ranks: int,
        pages: int,
        slots: int,
        scratch: int,
        places: int,
        tail: int,
        decode: str,
    ) -> None:
        # Streaming heads of two windows.
        arenas = tuple(Arena(policy, places, tail) for policy in POLICIES)
        sizes = (arenas, slots, MAX_LEN, pages, PAGE, scratch)
        self.config = CacheConfig(*sizes, torch.float32, torch.float32, max_cached=CACHED)
        layout = SimpleNamespace(retrieval_rows=1, streaming_rows=1, rows=(1, 1))
        self.decode, self.sources, self.likeliest = decode, {}, None
        host = SimpleNamespace(broadcast=lambda *_: None)
        self.comm = SimpleNamespace(size=ranks, host=host)
        self.prompt_logprobs: dict = {}
        self.caches = [
            new_caches(cast("Any", layout), cast("Any", self.shape), self.config, self.device)
            for _ in range(ranks)
        ]
        self.pools = [caches.pages for caches in self.caches]
        self.scratch = [caches.scratch for caches in self.caches if caches.scratch is not None]
        self.streaming = self.caches[0].streaming
        self.ranks = [
            Sequences(cast("Any", SimpleNamespace(rank=rank, size=ranks)), caches, lambda _: 0)
            for rank, caches in enumerate(self.caches)
        ]
        self.executed = 0

    @property
    def lengths(self) -> dict[int, int]:
        return {key: sequence.length for key, sequence in self.ranks[0].items()}

    @property
    def tables(self) -> dict[int, list[PageTable]]:
        return {key: [of_rank[key].table for of_rank in self.ranks] for key in self.ranks[0]}

    @property
    def cached(self) -> set[int]:
        return {key for key, sequence in self.ranks[0].items() if sequence.table.cached}

    def position_mark(self, max_read: int) -> int:
        return 0

    def synchronize(self) -> None: ...

    def execute(self, plan: StepPlan) -> torch.Tensor | None:
        self.executed += 1
        if plan.op is Op.FORK:
            assert 0 < plan.begin <= self.lengths[plan.source]
            assert not plan.instead or plan.source in self.cached
        for rank in range(self.comm.size):
            self._execute(plan, rank)
        requests = [key for key in self.lengths if key >= 0 and key not in self.cached]
        most = self.config.max_sequences
        assert len(requests) <= most + (self.config.max_cached and self.config.max_pinned)
        assert len(self.lengths) <= most + self.config.max_cached + self.beside
        for tables in self.tables.values():
            assert all(len(t.pages) * PAGE >= t.tokens for t in tables)
        rows = sum(entry.samples for entry in plan.entries) if plan.op is Op.STEP else 1
        return torch.zeros(rows, VOCABULARY)

    def _execute(self, plan: StepPlan, rank: int) -> None:
        sequences = self.ranks[rank]
        match plan.op:
            case Op.OPEN:
                sequences.open(plan)
            case Op.FORK:
                for arena, slot in zip(
                    self.config.arenas, sequences[plan.source].streaming, strict=True
                ):
                    assert arena.can_cut(slot, plan.begin)
                sequences.fork(plan)
            case Op.CACHE:
                sequences.cache(plan.sequence)
            case Op.CLOSE:
                sequences.close(plan.sequence)
            case Op.STEP:
                for entry in plan.entries:
                    self._read(sequences[entry.sequence], entry, rank)

    def _read(self, sequence: Sequence, entry: BatchEntry, rank: int) -> None:
        begin, size = sequence.length, self.comm.size
        end = begin + len(entry.tokens)
        sequence.grow(shard_sizes(begin, end if entry.sharded else begin, end, size), rank)
        if entry.sharded:
            prefill = sequence.prefill = sequence.prefill or ChunkedPrefill([])
            sequence.chunks.append(Chunk(begin, end, size))
            if prefill.scratch is not None:
                prefill.scratch.tokens += sequence.chunks[-1].tokens(rank)
                assert len(prefill.scratch.pages) * PAGE >= prefill.scratch.tokens
            if not entry.last:
                return
            if prefill.scratch is not None:
                self.scratch[rank].release(prefill.scratch)
            sequence.prefill = None
        assert sequence.prefill is None, "its window is not on every rank"
        for cache, slot in zip(self.caches[rank].streaming, sequence.streaming, strict=True):
            slot.length = end
            start = max(cache.policy.sinks, cache.policy.start(end))
            if start > slot.start:
                cache.drop(slot, start)


def make_core(
    *,
    ranks: int = 1,
    pages: int = 20,
    slots: int = 4,
    scratch: int = 0,
    places: int = 4 * WIDEST,
    by_priority: bool = False,
    share: bool = False,
    tail: int = 0,
    decode: str = "replicated",
) -> tuple[EngineCore, PagesOnly]:
    runner = PagesOnly(ranks, pages, slots, scratch, places, tail, decode)
    config = EngineConfig(
        prefix_cache=share,
        scheduling_policy="priority" if by_priority else "time",
        prefill="exact" if scratch else "local",
        max_step_ms=1e9,
    )
    if not config.caches_prefixes:
        runner.config = replace(runner.config, max_cached=0)
    core = EngineCore(
        cast("ModelRunner", runner),
        config,
        chunked_prefill_size=CHUNK,
        eos_token_ids=(),
        clock=itertools.count().__next__,  # repeatable: the order of prompts depends on times
    )
    return core, runner


def add(
    core: EngineCore,
    name: str,
    prompt: int,
    answer: int = 1,
    *,
    pin: bool = False,
    prefix: str | None = None,
    priority: int = 0,
    salt: str | None = None,
    text: int = 1,
    n: int = 1,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=answer, priority=priority, n=n)
    # Two texts that part after 11 tokens; what a stand-in generates is token 0.
    ids = ([1] * 11 + [text] * prompt)[:prompt]
    core.add(name, ids, params, pin=pin, prefix_id=prefix, scope=CacheScope(salt))


def step(core: EngineCore) -> list[dict[str, Any]]:
    """A step, which must do something."""
    runner = cast("PagesOnly", core.runner)
    before = runner.executed
    messages = core.step()
    assert runner.executed > before, "a step that does nothing, although there is work"
    return messages


def run(core: EngineCore) -> list[dict[str, Any]]:
    """Step to the end."""
    messages = []
    for _ in range(10_000):
        if not core.has_work:
            return messages
        messages += step(core)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("chained", [0, 10])
def test_a_pinned_prefix_leaves_room_for_a_token(chained: int) -> None:
    core, _ = make_core(pages=60)
    prefix = None
    if chained:
        add(core, "first", chained, pin=True)
        prefix = "first"
    with pytest.raises(RequestError, match=r"holds 40 tokens; the pinned prefix has 40") as error:
        add(core, "doc", MAX_LEN - chained, pin=True, prefix=prefix)
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    add(core, "doc", MAX_LEN - 1 - chained, pin=True, prefix=prefix)
    run(core)


def test_pinned_prefixes_in_every_slot_refuse_what_could_never_start() -> None:
    core, _ = make_core(slots=2)
    add(core, "one", 4, pin=True)
    add(core, "two", 4, pin=True)  # nothing has run yet: what waits counts as well
    for prefix in (None, "one"):
        with pytest.raises(
            RequestError, match=r"hold 2 of .* 2 seq.*max_num.*\(2 are pinned: one, two\)$"
        ) as error:
            add(core, "question", 3, prefix=prefix)
        assert error.value.code == "pinned_prefixes_hold_cache"
    with pytest.raises(RequestError, match="max_num_seqs"):
        add(core, "three", 4, pin=True)
    run(core)
    core.abort("one")
    add(core, "question", 3, prefix="two")
    assert [m.finish for m in run(core) if isinstance(m, Token)] == ["length"]


def test_pinned_prefixes_in_the_pages_refuse_what_could_never_start() -> None:
    core, runner = make_core(pages=10)
    add(core, "doc", 12, pin=True)
    with pytest.raises(
        RequestError, match=r"hold 12 of the 20 .* needs 10; .*kv_tok.*: doc\)$"
    ) as no:
        add(core, "other", 8, 2)
    assert no.value.code == "pinned_prefixes_hold_cache"
    add(core, "fits", 7, 1)
    add(core, "question", 7, 1, prefix="doc")  # shares the document's pages
    with pytest.raises(RequestError, match="needs 22 tokens") as too_large:
        add(core, "never", 9, 1, prefix="doc")
    assert too_large.value.code == "kv_capacity_exceeded"
    run(core)
    core.abort("doc")
    add(core, "other", 8, 2)
    run(core)
    assert runner.pools[0].free_pages == 10


def test_pinned_prefixes_in_the_streaming_caches_refuse_what_could_never_start() -> None:
    """A continuation shares the pages of its prefix, but has a window of its own."""
    core, runner = make_core(pages=60, places=WIDEST - TAIL + 8)
    add(core, "doc", 30, pin=True)
    with pytest.raises(RequestError, match=r"needs 37 tokens of the str.*has 30; .* window_max"):
        add(core, "question", 2, 4, prefix="doc")
    with pytest.raises(RequestError, match=r"hold 17 of the 30 .* needs 14; .*: doc\)$") as no:
        add(core, "other", 20, 4)
    assert no.value.code == "pinned_prefixes_hold_cache"
    add(core, "fits", 8, 2)
    run(core)
    core.abort("doc")
    add(core, "other", 20, 4)
    run(core)
    assert runner.streaming[0].free_places == runner.streaming[0].arena.places


@pytest.mark.parametrize("pin", [False, True])
def test_others_pass_a_request_whose_prefix_is_being_prefilled(pin: bool) -> None:
    """And a pinned prefix behind it, which waits until it is the first."""
    core, _ = make_core(pages=30)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "doc", 24, pin=True)
    add(core, "question", 2, 1, prefix="doc")
    if pin:
        add(core, "another doc", 3, pin=True)
    add(core, "other", 3, 1)
    ends = [m.id for m in run(core) if isinstance(m, Token) and m.finish]
    assert ends == ["other", "question"]


def test_others_pass_a_pinned_prefix_while_no_more_may_be_pinned() -> None:
    core, _ = make_core(pages=60, places=9 * WIDEST, share=True)
    for name in "abcd":
        add(core, name, 3, pin=True, salt=name)
    run(core)
    add(core, "long", 3, 20, prefix="d")
    step(core)
    core.abort("d")  # which goes with the answer that continues it
    add(core, "e", 3, pin=True, salt="e")
    add(core, "other", 3, 1)
    messages = run(core)
    ends = [m.id for m in messages if isinstance(m, Token) and m.finish]
    assert ends == ["other", "long"]
    assert {request.id for request in core.scheduler.pinned.values()} == set("abce")


def test_a_released_prompt_that_is_still_continued_holds_nothing_back() -> None:
    core, runner = make_core(pages=10, slots=2)
    add(core, "doc", 12, pin=True)
    add(core, "question", 2, 3, prefix="doc")
    core.abort("doc")
    add(core, "large", 16, 2)  # waits for the question, with which the document goes
    messages = run(core)
    ends = [m.id for m in messages if isinstance(m, Token) and m.finish]
    assert ends == ["question", "large"]
    assert not any(m.id == "doc" for m in messages)
    assert runner.pools[0].free_pages == 10


def test_a_released_prompt_that_a_pinned_one_continues_counts() -> None:
    core, _ = make_core(slots=2)
    add(core, "first", 4, pin=True)
    add(core, "second", 4, pin=True, prefix="first")
    core.abort("first")
    with pytest.raises(RequestError, match=r"hold 2 .*: second, first\)$") as error:
        add(core, "question", 1, prefix="second")
    assert error.value.code == "pinned_prefixes_hold_cache"
    core.abort("second")
    add(core, "any", 1)
    run(core)


def test_a_sequence_in_use_is_never_evicted() -> None:
    """Even if reading it again would cost less than what the cache keeps."""
    core, runner = make_core(pages=14, share=True)
    add(core, "kept", 12, salt="1")
    run(core)
    add(core, "used", 4, 6, salt="2")
    messages = []
    while not any(isinstance(m, Token) for m in messages):
        messages += step(core)
    [kept] = runner.cached
    [used] = core.scheduler.running
    add(core, "other", 10, salt="3")
    messages += step(core)
    assert kept not in runner.tables and used in runner.tables
    messages += run(core)
    assert [m.id for m in messages if isinstance(m, Token)].count("used") == 6


def test_what_a_prompt_begins_from_is_not_evicted_for_it() -> None:
    core, runner = make_core(pages=15, share=True)
    add(core, "begun", 12)
    run(core)
    [begun] = runner.cached
    add(core, "worth more", 16, salt="2")
    run(core)
    add(core, "longer", 20)
    messages = run(core)
    assert {m.cached for m in messages if isinstance(m, Progress)} == {12}
    assert begun in runner.cached and len(runner.cached) == 2


def test_exact_prefill_needs_scratch_pages_for_the_prompt_alone() -> None:
    with pytest.raises(RequestError, match=r"20 in all\), which has 8; .* larger kv_tokens"):
        add(make_core(pages=4, scratch=20)[0], "long", 19)
    core, runner = make_core(pages=20, scratch=4)
    add(core, "fits", 8, 4)
    add(core, "doc", 8, pin=True)
    add(core, "question", 9, prefix="doc")  # what continues a prompt is read with local prefill
    run(core)
    assert runner.scratch[0].free_pages == 4


class Engine(RuleBasedStateMachine):
    """Random requests, pinned prefixes, continuations and aborts: nothing gets stuck or is lost.

    Prompts begin alike, so that with a prefix cache they begin from each other's caches.
    """

    @initialize(
        ranks=st.integers(1, 3),
        pages=st.integers(4, 24),
        slots=st.integers(1, 4),
        scratch=st.just(0) | st.integers(10, 24),
        places=st.integers(WIDEST, 3 * WIDEST),
        by_priority=st.booleans(),
        share=st.booleans(),
        tail=st.sampled_from([0, TAIL]),
        decode=st.sampled_from(["replicated", "tensor"]),
    )
    def start(self, by_priority: bool, **sizes: Any) -> None:
        self.core, self.runner = make_core(**sizes, by_priority=by_priority)
        self.by_priority = by_priority
        self.names = 0
        self.pinned: list[str] = []
        self.asked: list[str] = []  # answers and pinned prefixes

    @rule(
        prompt=st.integers(1, 20),
        answer=st.integers(1, 8),
        pin=st.booleans(),
        which=st.none() | st.integers(0, 9),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "mine"]),
        text=st.integers(1, 2),
        n=st.sampled_from([1, 1, 2]),
    )
    def add(
        self,
        prompt: int,
        answer: int,
        pin: bool,
        which: int | None,
        priority: int,
        salt: str | None,
        text: int,
        n: int,
    ) -> None:
        priority *= self.by_priority
        n = 1 if pin else n
        prefix = None
        if which is not None and self.pinned:
            prefix = self.pinned[which % len(self.pinned)]
        name = f"r{self.names}"
        self.names += 1
        try:
            more: Any = {"prefix": prefix, "priority": priority, "salt": salt, "text": text, "n": n}
            add(self.core, name, prompt, answer, pin=pin, **more)
        except RequestError as error:
            if error.code != "context_length_exceeded" and n == 1:
                self.was_right_to_refuse(prompt, 0 if pin else answer, prefix)
            return
        self.asked += answer_ids(name, n)
        if pin:
            self.pinned.append(name)

    def was_right_to_refuse(self, prompt: int, answer: int, prefix: str | None) -> None:
        """Assert that there is no room even when all requests have ended that end by themselves."""
        run(self.core)
        runner = self.runner
        if self.core.scheduler.room.prefix_cache is not None:
            return  # pinned prefixes may share more than could be foreseen
        begin, held = 0, [0] * len(runner.pools)
        if prefix is not None:
            [key] = [r.key for r in self.core.scheduler.pinned.values() if r.id == prefix]
            begin, held = runner.lengths[key], [t.tokens for t in runner.tables[key]]
        end = begin + prompt
        request = SimpleNamespace(
            end=end,
            params=SamplingParams(),
            chunked_prefill_size=CHUNK,
        )
        short = self.core.scheduler.prefill_policy.is_short(cast("Request", request), begin)
        chunks_end = begin if short else end
        new = shard_sizes(begin, chunks_end, end + answer, runner.comm.size)
        fits = all(
            cache.arena.width(end + answer) <= cache.free_places for cache in runner.streaming
        ) and all(
            pool.pages_for(have + more) - have // PAGE <= pool.free_pages
            for pool, have, more in zip(runner.pools, held, new, strict=True)
        )
        if prefix is None:
            parts = shard_sizes(0, chunks_end, chunks_end, runner.comm.size)
            fits = fits and all(
                pool.pages_for(tokens) <= pool.free_pages
                for pool, tokens in zip(runner.scratch, parts, strict=False)
            )
        assert not fits or len(runner.tables) == runner.config.max_sequences

    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        if self.asked:  # those that have ended are ignored
            name = self.asked[-1 - which % len(self.asked)]
            self.core.abort(name)
            if name in self.pinned:
                self.pinned.remove(name)

    @precondition(lambda self: self.core.has_work)
    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.core.has_work:
                return
            step(self.core)

    @invariant()
    def the_scheduler_knows_what_is_free(self) -> None:
        if not hasattr(self, "core"):
            return
        scheduler = self.core.scheduler
        free = [pool.free_pages for pool in self.runner.pools]
        scratch = [pool.free_pages for pool in self.runner.scratch] or [0] * len(free)
        places = [[cache.free_places] * len(free) for cache in self.runner.streaming]
        assert scheduler.free_on_ranks.tolist() == [free, *places, scratch]
        used = {*scheduler.prefills, *scheduler.running, *scheduler.pinned}
        assert set(self.runner.tables) == used | self.runner.cached
        # Forks have their room before any rank knows of them.
        if not any(prefill.request.forks for prefill in scheduler.prefills.values()):
            available = [pool.available_pages for pool in self.runner.pools]
            assert scheduler.room.accounts.available()[0].tolist() == available

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        run(self.core)
        for name in self.pinned:
            self.core.abort(name)
        assert self.core.scheduler.idle and not self.core.scheduler.sequences
        assert set(self.runner.tables) == self.runner.cached
        assert all(pool.available_pages == pool.num_pages for pool in self.runner.pools)
        evict_all(self.core)
        assert all(
            pool.free_pages == pool.num_pages for pool in [*self.runner.pools, *self.runner.scratch]
        )
        assert all(c.free_places == c.arena.places for c in self.runner.streaming)


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_prompt_of_fewer_tokens_than_shards_is_not_read_beyond_its_end() -> None:
    core, runner = make_core(ranks=8)
    core.scheduler.prefill_policy.is_short = lambda *_: False
    add(core, "a", 13, 2)
    run(core)
    assert runner.lengths == {}


def test_priority_overtakes_no_request_that_alone_keeps_a_released_prefix() -> None:
    core, runner = make_core(pages=10, slots=3, by_priority=True)
    add(core, "doc", 8, pin=True)
    run(core)
    add(core, "r", 9, 2)
    step(core)
    add(core, "q", 8, 4, prefix="doc", priority=1)
    step(core)
    core.abort("doc")  # kept for q, which waits for r's pages
    add(core, "b", 16, 3, priority=-1)
    run(core)
    assert runner.lengths == {}


def test_a_request_that_waits_for_a_prefill_is_looked_up_once() -> None:
    """In a prefix of a million tokens, a look-up takes milliseconds for each waiting request."""
    core, _ = make_core(pages=120, slots=8, places=9 * WIDEST, share=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    looked: list[str] = []
    find = core.scheduler.admission._find
    core.scheduler.admission._find = lambda request: looked.append(request.id) or find(request)
    for name in "abcd":
        add(core, name, 30)
    for _ in range(4):
        step(core)
        assert looked == list("abcd") and len(core.scheduler.prefills) == 1
    run(core)
    assert looked == [*"abcd", *"bcd"]


def test_nothing_waits_for_a_prefill_of_a_later_priority() -> None:
    """Requests of an earlier priority may keep coming, so that the prefill would never go on."""
    core, _ = make_core(pages=120, share=True, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "later", 30, priority=1)
    step(core)
    step(core)
    add(core, "first", 30, salt="another")
    step(core)
    add(core, "same", 30)
    step(core)
    assert [one.request.id for one in core.scheduler.prefills.values()] == [
        "later",
        "first",
        "same",
    ]
    run(core)


def test_an_aborted_prompt_that_is_kept_ends_before_others_of_any_priority() -> None:
    """Requests of an earlier priority may keep coming, and it has all its caches until then."""
    core, _ = make_core(pages=200, slots=6, places=9 * WIDEST, share=True, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "later", 39, priority=5)
    while not any(p.position >= 32 for p in core.scheduler.prefills.values()):
        step(core)
    core.abort("later")
    for name in "ab":
        add(core, name, 38, priority=-1, salt=name)
    for _ in range(3):
        step(core)
    assert [one.request.id for one in core.scheduler.prefills.values()] == ["a", "b"]
    run(core)


def test_a_prefix_is_prefilled_with_the_priority_of_what_waits_for_it() -> None:
    core, _ = make_core(pages=120, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "doc", 30, pin=True)
    step(core)
    add(core, "first", 30, priority=-1)
    add(core, "question", 2, prefix="doc", priority=-2)
    ends = [m.id for m in run(core) if isinstance(m, Token) and m.finish]
    assert ends == ["question", "first"]


def test_a_prefix_has_the_priority_of_what_still_waits_for_it() -> None:
    core, _ = make_core(pages=120, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "doc", 30, pin=True, priority=1)
    step(core)
    add(core, "first", 30, priority=-1)
    add(core, "question", 2, prefix="doc")
    add(core, "urgent", 2, prefix="doc", priority=-2)
    doc = core.scheduler.prefills[min(core.scheduler.prefills)].request
    assert doc.priority == -2
    core.abort("urgent")
    assert doc.priority == 0
    ends = [m.id for m in run(core) if isinstance(m, Token) and m.finish]
    assert ends == ["first", "question"]


def test_a_request_waits_for_a_prefill_of_its_own_priority_while_others_go_first() -> None:
    core, _ = make_core(pages=120, share=True, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "later", 30, priority=1)
    step(core)
    add(core, "same", 30, priority=1)
    step(core)
    add(core, "first", 30, salt="another")
    step(core)
    step(core)
    assert [one.request.id for one in core.scheduler.prefills.values()] == ["later", "first"]
    run(core)


def test_what_waits_for_a_place_asks_nothing_of_the_answers_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every step would see how far each can be cut back, which takes milliseconds for 64."""
    core, _ = make_core(pages=60, slots=2, places=9 * WIDEST, share=True)
    core.scheduler.batch.drafter = None
    for name, answer in (("a", 12), ("b", 20)):
        add(core, name, 4, answer, salt=name)
    while len(core.scheduler.running) < 2:
        step(core)
    add(core, "c", 4)
    looked: list[int] = []
    monkeypatch.setattr(core.scheduler.room, "grown", lambda key, _: looked.append(key))
    for _ in range(3):
        step(core)
    assert not looked and len(core.scheduler.waiting) == 1
    [longer] = [key for key, of in core.scheduler.running.items() if of.id == "b"]
    run(core)
    assert looked == [longer]
