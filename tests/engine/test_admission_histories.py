"""Random requests, pinned prefixes and aborts: whatever is taken in ends, on real page pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from razor_dist.config.errors import RequestError
from razor_dist.engine.request import Request
from razor_dist.parallel.sharding import shard_sizes
from razor_dist.protocol.messages import answer_ids
from razor_dist.protocol.sampling_params import SamplingParams
from tests.engine.cores import evict_all
from tests.engine.pages_only import CHUNK, PAGE, TAIL, WIDEST, add, make_core, run, step


class Engine(RuleBasedStateMachine):
    """Random requests, pinned prefixes, continuations and aborts: nothing gets stuck or is lost.

    Prompts begin alike, so that with a prefix cache they begin from each other's caches.
    """

    @initialize(
        ranks=st.integers(1, 3),
        pages=st.integers(4, 24),
        slots=st.integers(1, 4),
        scratch=st.just(0) | st.integers(15, 24),  # for the longest prompt on one rank
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
        answer=st.none() | st.integers(1, 8),
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
        answer: int | None,
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
            waiting = self.core.scheduler.waiting
            if any(prefix.released for one in waiting for prefix in one.prefixes):
                return  # those count although they will end by themselves
            # Beside pinned prefixes an answer is not cut to fewer tokens than are worth giving.
            if error.code != "context_length_exceeded" and n == 1 and answer is not None:
                self.was_right_to_refuse(prompt, 0 if pin else answer, prefix)
            return
        self.asked += answer_ids(name, n)
        if pin:
            self.pinned.append(name)

    def was_right_to_refuse(self, prompt: int, answer: int, prefix: str | None) -> None:
        """Assert that there is no room even when all requests have ended that end by themselves."""
        run(self.core)
        runner = self.runner
        if self.core.scheduler.room.shares:
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

    @rule(prompt=st.integers(1, 30), question=st.integers(1, 3), text=st.integers(1, 2))
    def ask_behind_a_mark(self, prompt: int, question: int, text: int) -> None:
        """As a server does: the pinned prefix still waits, and the answer gets what is left."""
        pinned, alike = len(self.pinned), {"priority": 0, "salt": None, "text": text, "n": 1}
        self.add(prompt, 1, True, None, **alike)
        if len(self.pinned) > pinned:
            self.add(question, None, False, pinned, **alike)

    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        if self.asked:  # those that have ended are ignored
            name = self.asked[-1 - which % len(self.asked)]
            scheduler = self.core.scheduler
            instead = [one for one in scheduler.prefills.values() if one.instead]
            self.core.abort(name)
            if name in self.pinned:
                self.pinned.remove(name)
            for one in instead:  # what was cached before it is there
                request, cache = one.request, scheduler.room.prefix_cache
                if request.key not in scheduler.prefills:
                    found = cache.find(request.namespace, request.tokens, request.end)
                    assert found.tokens >= one.begin

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
        references = [int(pool.references.sum()) for pool in self.runner.pools]
        sequences = [len(self.runner.tables)] * len(free)
        want = [free, *places, scratch, references, sequences]
        assert scheduler.on_ranks.tolist() == want
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
