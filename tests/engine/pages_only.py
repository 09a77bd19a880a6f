"""A stand-in for the engine's runner: pages and slots of several ranks, without a model.

It does what the ranks do with pages and slots, for several ranks at once, so that the scheduler's
arithmetic is checked against real page pools.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from razor_dist.cache.caches import CacheConfig, new_caches
from razor_dist.cache.pages import PageTable
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.cache.sequence import ChunkedPrefill, Sequence
from razor_dist.cache.slots import Arena
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.core import EngineCore
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.sequences import Sequences
from razor_dist.parallel.sharding import shard_sizes
from razor_dist.parallel.zigzag import Chunk
from razor_dist.protocol.messages import CacheScope
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import BatchEntry, Cache, Close, Compute, Fork, Open, StepPlan

VOCABULARY, CHUNK, PAGE = 8, 6, 2
MAX_LEN = 40
POLICY = StreamingPolicy(window_min=4, window_ratio=2, window_max=None, sinks=1, block=1)
POLICIES = (POLICY.with_window(3, alibi=True), POLICY)
TAIL, CACHED = 4, 8
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
        if isinstance(plan, Fork):
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
        rows = sum(entry.samples for entry in plan.entries) if isinstance(plan, Compute) else 1
        return torch.zeros(rows, VOCABULARY)

    def _execute(self, plan: StepPlan, rank: int) -> None:
        sequences = self.ranks[rank]
        match plan:
            case Open():
                sequences.open(plan)
            case Fork():
                for arena, slot in zip(
                    self.config.arenas, sequences[plan.source].streaming, strict=True
                ):
                    assert arena.can_cut(slot, plan.begin)
                sequences.fork(plan)
            case Cache():
                sequences.cache(plan.sequence)
            case Close():
                sequences.close(plan.sequence)
            case Compute():
                for entry in plan.entries:
                    self._read(sequences[entry.sequence], entry, rank)

    def _read(self, sequence: Sequence, entry: BatchEntry, rank: int) -> None:
        begin, size = sequence.length, self.comm.size
        end = begin + len(entry.tokens)
        sequence.grow(shard_sizes(begin, end if entry.sharded else begin, end, size), rank)
        if entry.sharded:
            prefill = sequence.prefill = sequence.prefill or ChunkedPrefill()
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
    answer: int | None = 1,
    *,
    pin: bool = False,
    prefix: str | None = None,
    priority: int = 0,
    salt: str | None = None,
    text: int = 1,
    n: int = 1,
) -> None:
    """Queue a request; without ``answer`` it gets the tokens that there is room for."""
    fit = {"max_tokens": answer, "fit_max_tokens": answer is None}
    params = SamplingParams(temperature=0, priority=priority, n=n, **fit)
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
