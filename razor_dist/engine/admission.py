"""Room in the caches: who gets it, whose caches a prompt begins from, what stays at its end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from razor_dist.cache.accounting import Allocation, Bools, CacheAccounts, Ints
from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.cache_need import CacheNeed
from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Request
from razor_dist.parallel.sharding import shard_lengths, shard_sizes
from razor_dist.prefix.device import Hit, PrefixCache
from razor_dist.prefix.radix import Tokens, common_tokens
from razor_dist.prefix.tiers import Candidate, Tiers, least_new
from razor_dist.protocol.step_plan import Op, StepPlan

# Pages of tokens that a prompt must have in common with another to wait for it, or for the caches
# to be kept where they part.
_WORTH_PAGES = 4
# Pages that an aborted prompt must have read to leave them.
_WORTH_ABORTED = 16
# Ends of a conversation's messages where caches are kept: the first, which is the system prompt's
# or a document's, and as many of the latest.
_LATEST_ENDS = 3
# Least seconds between two times that the caches of a prompt go to disk while it is read.
_CHECKPOINT_SECONDS = 5.0


class Admission:
    """The caches of all ranks, and the plans that open, keep and close sequences in them.

    Without ``share``, a sequence's caches end with it, and only pinned prefixes are continued.
    ``end_ids`` are the tokens that end an answer, and so each message of a conversation.
    """

    def __init__(
        self,
        cache: CacheConfig,
        world_size: int,
        prefill_policy: PrefillPolicy,
        *,
        share: bool,
        end_ids: Iterable[int] = (),
    ) -> None:
        self.cache, self.world_size, self._prefill_policy = cache, world_size, prefill_policy
        self._end_ids = sorted(end_ids)
        self.accounts = CacheAccounts(cache, world_size)
        self.demand = CacheNeed(cache, self.accounts, world_size)
        self.prefix_cache = PrefixCache(self.accounts, prefill_policy.cost) if share else None
        self.tiers: Tiers | None = None  # beyond the device, if there are any
        self._pending: list[StepPlan] = []
        self._copies = itertools.count(-1, -1)  # keys of sequences that no request has

    @property
    def prefix_stats(self) -> dict[str, Any]:
        """Counters of the prefix cache since the start, and its entries now."""
        cache, names = self.prefix_cache, ("queries", "hits", "query_tokens", "hit_tokens")
        counts = {} if cache is None else cache.counts
        found: dict[str, Any] = {name: counts.get(name, 0) for name in (*names, "evictions")}
        found["entries"] = 0 if cache is None else cache.evictable
        return found | ({} if self.tiers is None else self.tiers.stats)

    def open(self, request: Request, running: Iterable[Request]) -> list[StepPlan] | None:
        """Take room for a request, evicting what must go; None if it has to wait for room.

        No plans at all say that it waits for a prompt that is being read, and has much in common
        with it.
        """
        running = list(running)
        hit = self._find(request, running)
        if hit is not None and self._awaits(request, hit, running):
            return []
        if hit is not None and self._promotes(request, hit):
            return []
        short, request.cached = request.short, 0
        for source, allocation, instead in self._sources(request, hit):
            begin, end, total = request.begin, request.end, request.total
            stored, read = (
                self.demand.begun(allocation, begin),
                self.demand.read(request, allocation),
            )
            need = self.accounts.need(stored, begin, request.chunks_end, total)
            if instead and allocation is not None:
                need = need - self.accounts.places(allocation)
            each = self.accounts.need(read, end, end, total)  # fork when the prompt has been read
            evicting = self._make_room(need + len(request.siblings) * each, *_some(allocation))
            if evicting is not None:
                if not instead:
                    return [*evicting, self._open(request, hit, source, allocation)]
                evicting += self._forget(source)
                opened = replace(self._open(request, hit, source, allocation), instead=True)
                assert self.prefix_cache is not None and allocation is not None
                self.prefix_cache.remove(source)
                self.accounts.close(allocation)
                return [*evicting, opened]
            request.short, request.cached = short, 0
        return None

    def _open(
        self, request: Request, hit: Hit | None, source: int, allocation: Allocation | None
    ) -> StepPlan:
        begin, accounts = request.begin, self.accounts
        stored, read = self.demand.begun(allocation, begin), self.demand.read(request, allocation)
        request.prefilled_to = begin
        request.allocation = accounts.open(
            allocation, stored, begin, request.chunks_end, request.total
        )
        for one in request.siblings:
            one.allocation = accounts.open(
                request.allocation, read, one.begin, one.begin, one.total
            )
        if self.prefix_cache is not None:
            self._use(hit if request.cached else None, request)
            branch, ends = self._branch(request, hit), self._message_ends(request)
            request.stops, request.spare = sorted({*branch, *ends}), {*ends} - {*branch}
        return StepPlan(
            Op.OPEN if allocation is None else Op.FORK,
            request.key,
            begin=begin,
            end=request.chunks_end,
            total=request.total,
            source=source,
            # Another may continue a pinned one; an answer's last token is sampled and never read.
            max_read=(self.cache.max_tokens if request.pinned else request.total) - 1,
        )

    def fork(self, sibling: Request) -> StepPlan:
        """Begin another answer to a prompt that is read, in the room that it has got."""
        first, end = sibling.prefix, sibling.end
        assert first is not None and first.allocation is not None and sibling.allocation is not None
        sibling.prefilled_to = end
        sibling.allocation.chunks = list(first.allocation.chunks)
        return StepPlan(Op.FORK, sibling.key, end, end, sibling.total, source=first.key)

    def forgo(self, sibling: Request) -> None:
        """Take back the room of a sibling that has not begun."""
        assert sibling.allocation is not None
        self.accounts.close(sibling.allocation)

    def _find(self, request: Request, running: Seq[Request]) -> Hit | None:
        if self.prefix_cache is None or request.params.prompt_logprobs is not None:
            return None  # log-probabilities are of what is read
        for other in running:
            if other.prefilled:
                self.prefix_cache.grown(other.key, other.length)
        return self.prefix_cache.find(request.namespace, request.tokens, request.end - 1)

    def _sources(
        self, request: Request, hit: Hit | None
    ) -> Iterator[tuple[int, Allocation | None, bool]]:
        """Stream what a request may continue, the best first; it is set to begin there.

        True says that it takes its source's place: there may be no room beside it.
        """
        prefix = request.prefix
        least = max(self.cache.page_size, request.base + 1)  # less is read as soon as copied
        if hit is not None and hit.entry is not None and hit.tokens >= least:
            held = hit.entry.allocation
            for instead in (False, True):
                request.cached = hit.tokens
                request.short = self._prefill_policy.is_short(request)
                free = held.cached and held not in self._saved
                if (free or not instead) and (not request.pinned or self._is_even(request, held)):
                    yield hit.entry.key, held, instead
        request.cached = 0
        yield (0, None, False) if prefix is None else (prefix.key, prefix.allocation, False)

    def _is_even(self, request: Request, source: Allocation) -> bool:
        """Tell if a pinned prefix takes of all ranks what `check` has counted for it."""
        if request.prefix is not None:
            return False  # it is counted with the pages that it shares with that
        size = self.world_size
        fresh = shard_sizes(0, request.end, request.end, size)
        short = shard_sizes(0, 0, request.end, size)
        return self.demand.read(request, source).tolist() in (fresh, short)

    def _awaits(self, request: Request, hit: Hit, running: Seq[Request]) -> bool:
        """Tell if a prompt that is being read will soon have more of this one than is cached.

        Where they part it may leave no caches by itself: then it is to stop there.
        """
        worth = hit.tokens + _WORTH_PAGES * self.cache.page_size
        for other in running:
            if other.prefilled or other.key > request.key or other.namespace != request.namespace:
                continue
            if other.end < worth or other.tokens[0] != request.tokens[0]:
                continue
            common = min(common_tokens(other.tokens, request.tokens), request.end - 1)
            if common < worth:
                continue
            if common >= self.accounts.first_cut(other.end, other.begin):
                return True
            stop = self._stop(other, common)
            if other.prefilled_to < stop < other.end and stop >= worth and not other.short:
                other.stops = sorted({*other.stops, stop})
                other.spare.discard(stop)
                return True
        return False

    def _stop(self, request: Request, position: int) -> int:
        """Return where reading can stop: all chunks but a prompt's last have whole shards."""
        parts = 2 * self.world_size
        return request.begin + (position - request.begin) // parts * parts

    def _branch(self, request: Request, hit: Hit | None) -> list[int]:
        """Return where a prompt parts from a cached one, if no snapshot serves that place yet."""
        if hit is None or request.short or request.params.prompt_logprobs is not None:
            return []
        common = min(hit.common, request.end - 1)
        stop = self._stop(request, common)
        return [stop] if stop - request.begin >= _WORTH_PAGES * self.cache.page_size else []

    def _message_ends(self, request: Request) -> list[int]:
        """Return where other conversations may part from this one: at ends of its messages.

        Not near its own end, where its caches can be cut anywhere.
        """
        if request.short or request.params.prompt_logprobs is not None:
            return []
        worth = _WORTH_PAGES * self.cache.page_size
        ends, begin = [], request.begin
        tokens = request.tokens[begin : self.accounts.first_cut(request.end, begin)]
        for at in np.flatnonzero(np.isin(tokens, self._end_ids)).tolist():
            stop = self._stop(request, request.begin + at + 1)
            if stop - begin >= worth:
                ends.append(stop)
                begin = stop
        return [*ends[:1], *ends[1:][-_LATEST_ENDS:]]

    def checkpoint(self, request: Request, end: int) -> None:
        """Have a prompt's caches go to disk as of ``end``, where its next chunk ends, if due.

        A process that is killed then loses what was read since. The disk sets the pace: nothing
        else is being saved.
        """
        tiers = self.tiers
        if tiers is None or tiers.active or "disk" not in tiers.nodes.room or not request.began:
            return
        if request.params.prompt_logprobs is not None:
            return
        since = max((s for s in request.stops if s <= request.prefilled_to), default=request.begin)
        now = time.monotonic()
        due = max(request.began, request.saved_at) + _CHECKPOINT_SECONDS
        if now >= due and end - since >= least_new(end, self.cache.page_size):
            request.saved_at = now
            request.stops = sorted({*request.stops, end})
            request.spare.add(end)

    def _promotes(self, request: Request, hit: Hit) -> bool:
        """Tell if a request waits for what it begins with, which is in host memory or on disk."""
        tiers, accounts = self.tiers, self.accounts
        if tiers is None:
            return False
        if request.loading is not None:  # once: what could not be loaded is read
            return tiers.loading is not None and tiers.loading.key == request.loading
        found = tiers.find(request.namespace, request.tokens, request.end - 1)
        if found is None or found.tokens < hit.tokens + _WORTH_PAGES * self.cache.page_size:
            return False
        if tiers.loading is not None:
            return True
        node, end, size = found.node, found.node.manifest.end, self.world_size
        chunks = node.layout(size)
        stored = np.array(shard_lengths(chunks, found.tokens, size), np.int64)
        # Room for the request as well, which then takes what it begins with from there.
        need = accounts.need_of(shard_lengths(chunks, end, size), end)
        # It may take the place of what is loaded (`_sources`).
        beside = accounts.need(stored, found.tokens, request.end, request.total)
        need = np.maximum(need, need + beside - accounts.places_of(end))
        evicting = self._make_room(need)
        if evicting is None:
            return False
        request.loading = key = next(self._copies)
        namespace = request.namespace
        assert isinstance(namespace, tuple)
        allocation = accounts.place(chunks, end, node.manifest.tails)
        self._pending += [*evicting, tiers.load(node, key, namespace, allocation)]
        return True

    def pause(self) -> None:
        """Sleep a little: what is being saved waits for a disk."""
        assert self.tiers is not None
        self.tiers.pause()

    def close(self) -> None:
        """Let another process write to the store."""
        if self.tiers is not None:
            self.tiers.close()

    def take_pending(self) -> list[StepPlan]:
        """Return plans that come before those which `open` returns, once."""
        plans, self._pending = self._pending, []
        return plans

    def transferred(self, plan: StepPlan, answers: Tensor) -> list[StepPlan]:
        """Take in the answers to a plan that saves or loads; return the plans that follow."""
        tiers = self.tiers
        assert tiers is not None and self.prefix_cache is not None
        if plan.op is Op.SAVE:
            return tiers.saved(answers)
        loading = tiers.loading
        assert loading is not None
        whole = tiers.loaded(answers)
        if whole is None:
            return []
        if not whole:
            self.accounts.close(loading.allocation)
            return [StepPlan(Op.CLOSE, loading.key)]
        tokens, allocation = loading.tokens, loading.allocation
        self.accounts.keep(allocation, len(tokens))
        self.prefix_cache.add(loading.namespace, tokens, loading.key, allocation, loading.tier)
        return [StepPlan(Op.CACHE, loading.key), *self._within_bounds(allocation)]

    def _use(self, hit: Hit | None, request: Request) -> None:
        cache, tiers = self.prefix_cache, self.tiers
        assert cache is not None
        if hit is not None and hit.entry is not None and hit.entry.tier != "device":
            assert tiers is not None
            tiers.count_hit(hit.entry.tier, hit.tokens - request.base)
            hit.entry.tier = "device"
        cache.use(hit, len(request.prompt), request.base)

    def _offer(self, request: Request, tokens: Tokens, key: int, allocation: Allocation) -> None:
        if self.tiers is not None:
            assert isinstance(request.namespace, tuple)
            self.tiers.offer(Candidate(key, request.namespace, tokens, allocation))

    @property
    def _saved(self) -> list[Allocation]:
        """The entry whose sequence is being saved: it must stay."""
        saving = None if self.tiers is None else self.tiers.saving
        return [] if saving is None else [saving.of.allocation]

    def _make_room(self, need: Ints, *but: Allocation) -> list[StepPlan] | None:
        but = (*but, *self._saved)
        if (need > self.accounts.available(*but)).any():
            return None
        plans = []
        while (short := need > self.accounts.free).any():
            evicted = self._evict(short, *but)
            assert evicted, "what is available is cached"
            plans += evicted
        return plans

    def _evict(self, short: Bools, *but: Allocation) -> list[StepPlan]:
        assert self.prefix_cache is not None
        entry = self.prefix_cache.evict(short, *but, *self._saved)
        if entry is None:
            return []
        self.accounts.close(entry.allocation)
        return [*self._forget(entry.key), StepPlan(Op.CLOSE, entry.key)]

    def _forget(self, key: int) -> list[StepPlan]:
        return [] if self.tiers is None else self.tiers.forget(key)

    def prefilled(self, request: Request) -> None:
        """Note that a prompt has been read: others may continue it."""
        assert request.allocation is not None
        self.accounts.end_prompt(request.allocation)
        if self.prefix_cache is not None:
            tokens = request.tokens
            self.prefix_cache.add(request.namespace, tokens, request.key, request.allocation)
            self._offer(request, tokens, request.key, request.allocation)

    def copy(self, request: Request) -> list[StepPlan]:
        """Keep a copy of a sequence as it is now, if there is room for one."""
        assert request.allocation is not None and self.prefix_cache is not None
        length, allocation = request.length, request.allocation
        stored = self.demand.begun(allocation, length)
        need = self.accounts.need(stored, length, length, length)
        if length in request.spare and (
            (need > self.accounts.free).any()
            or self.prefix_cache.evictable >= self.cache.max_cached
        ):
            return []  # nothing that was asked for goes for what may never be
        plans = self._make_room(need, allocation)
        tokens = _tokens_read(request)
        if plans is None:
            return []
        key = next(self._copies)
        copied = self.accounts.open(allocation, stored, length, length, length)
        self.accounts.keep(copied, length)
        self.prefix_cache.add(request.namespace, tokens, key, copied)
        self._offer(request, tokens, key, copied)
        plans += [
            StepPlan(Op.FORK, key, length, length, length, source=request.key),
            StepPlan(Op.CACHE, key),
        ]
        return plans + self._within_bounds()

    def end(self, request: Request, *, keep: bool) -> list[StepPlan]:
        """Cache a finished sequence for prompts with the same beginning, or close it."""
        allocation, cache = request.allocation, self.prefix_cache
        assert allocation is not None
        if cache is None or not keep or request.length < self.cache.page_size:
            if cache is not None:
                cache.remove(request.key)
            self.accounts.close(allocation)
            return [*self._forget(request.key), StepPlan(Op.CLOSE, request.key)]
        self.accounts.keep(allocation, request.length)
        tokens = _tokens_read(request)
        cache.add(request.namespace, tokens, request.key, allocation)
        self._offer(request, tokens, request.key, allocation)
        return [StepPlan(Op.CACHE, request.key), *self._within_bounds()]

    def is_worth_keeping(self, request: Request) -> bool:
        """True if an aborted prefill has done enough of its prompt to be worth caching."""
        if self.prefix_cache is None or request.prefilled or not request.sound:
            return False
        if request.short or request.params.prompt_logprobs is not None:
            return False
        return request.prefilled_to - request.begin >= _WORTH_ABORTED * self.cache.page_size

    def _within_bounds(self, *but: Allocation) -> list[StepPlan]:
        assert self.prefix_cache is not None
        plans, everything = [], np.ones_like(self.accounts.sizes, bool)
        while self.prefix_cache.evictable > self.cache.max_cached:
            evicted = self._evict(everything, *but)
            if not evicted:
                break
            plans += evicted
        return plans


def _some(allocation: Allocation | None) -> list[Allocation]:
    return [] if allocation is None else [allocation]


def _tokens_read(request: Request) -> Tokens:
    """Return the tokens of a request that are in the caches."""
    generated = np.array(request.generated, np.int32)
    return np.concatenate([request.tokens, generated])[: request.length]
