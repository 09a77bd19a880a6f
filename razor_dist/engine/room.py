"""Room in the caches of all ranks: what fits, what is evicted, and what stays.

`Room` alone says whether something fits: its accounts count pages and slots, and its tiers host
memory and disk. It returns plans, which the ranks carry out in their order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from razor_dist.cache.accounting import Bools, CacheAccounts, Ints
from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.request import Prefill, Request
from razor_dist.parallel.zigzag import Chunk
from razor_dist.prefix.device import CachedSequence, PrefixCache, Worth
from razor_dist.prefix.index import Match, PrefillCost, PrefixIndex
from razor_dist.prefix.manifest import Tokens
from razor_dist.prefix.tiers import Candidate, Tiers
from razor_dist.protocol.counters import PrefixCounters
from razor_dist.protocol.step_plan import BatchEntry, Cache, Close, Fork, Load, Save, StepPlan

Hit = Match[CachedSequence]


class Room:
    """The caches of all ranks; unless it ``shares`` them, a sequence's caches end with it."""

    def __init__(self, cache: CacheConfig, world_size: int, cost: PrefillCost) -> None:
        self.cache, self.accounts = cache, CacheAccounts(cache, world_size)
        self.shares = cache.max_cached > 0
        index = PrefixIndex(cost)
        self.prefix_cache = PrefixCache(self.accounts, index)  # empty unless it shares
        # Beyond the device; these have no room, so that nothing moves.
        self.tiers = Tiers(self.accounts, index, "", None, {}, lambda _: [])
        self.pinned: dict[int, Request] = {}  # prefilled, by the keys of their sequences
        self.copies = itertools.count(-1, -1)  # keys of sequences that no request has

    @property
    def stats(self) -> PrefixCounters:
        """Counters of the prefix cache since the start, and its entries now."""
        cache = self.prefix_cache
        return replace(cache.counts, entries=cache.evictable, **self.tiers.stats)

    @property
    def pinned_elsewhere(self) -> dict[str, dict[str, int]]:
        """The bytes that pinned prefixes have in host memory and on disk, by their requests."""
        pinned, held = self.pinned.values() if self.tiers.nodes.room else (), self.tiers.held
        return {one.id: held(one.namespace, one.tokens) for one in pinned}

    def count(self, hit: Hit | None, request: Request) -> None:
        if hit is not None and hit.entry is not None and hit.entry.tier != "device":
            self.tiers.count_hit(hit.entry.tier, hit.tokens - request.base)
            hit.entry.tier = "device"
        self.prefix_cache.use(hit, len(request.prompt), request.base)

    @property
    def max_cached(self) -> int:
        """Sequences that may stay beside pinned ones, for the prefix cache."""
        return max(0, self.cache.max_cached - len(self.pinned))

    @property
    def saved(self) -> list[int]:
        """The sequence that is being saved: it must stay."""
        saving = self.tiers.saving
        return [] if saving is None else [saving.of.key]

    def make(self, need: Ints, *but: int) -> list[StepPlan] | None:
        but = (*but, *self.saved)
        if (need > self.accounts.available(*but)).any():
            return None
        plans = self._evict(lambda: need > self.accounts.free, *but)
        assert (need <= self.accounts.free).all(), "what is available is cached"
        return plans

    def shrink_to(self, sequences: int) -> list[StepPlan]:
        """Evict cached sequences until this many are left, if the others may go."""
        cache = self.prefix_cache
        return self._evict(lambda: np.array(cache.evictable > sequences), *cache.wanted)

    def _evict(self, short: Callable[[], Bools], *but: int) -> list[StepPlan]:
        """Evict what is worth least until nothing is ``short``, or nothing is left that may go."""
        plans: list[StepPlan] = []
        worths: list[Worth] | None = None
        while (wanted := short()).any():
            if worths is None:
                worths = self.prefix_cache.worths(wanted, *but, *self.saved)
            key = self.prefix_cache.evict(worths, wanted)
            if key is None:
                break
            self.accounts.close(key)
            plans += [*self.tiers.forget(key), Close(key)]
        return plans

    # ------------------------------------------------------------------- sequences end, or stay

    def pin(self, request: Request) -> list[StepPlan]:
        """Keep a prefilled prompt until it is taken from `pinned`."""
        self.pinned[request.key] = request
        return self.shrink_to(self.max_cached)

    def advance(self, prefill: Prefill, entry: BatchEntry) -> None:
        """Count the tokens that a step has prefilled of a prompt; once done, others may use it."""
        accounts, begin = self.accounts, prefill.position
        prefill.advance(len(entry.tokens))
        prefill.whole_window = entry.last or not entry.sharded
        if entry.sharded:
            chunk = Chunk(begin, prefill.position, accounts.world_size)
            accounts[prefill.key].chunks.append(chunk)
        if prefill.done:
            accounts.end_prompt(prefill.key)
            if self._keeps(prefill.request):
                self._enter(prefill.request, prefill.tokens, prefill.key)

    def grown(self, key: int, length: int) -> None:
        """Note that a sequence in the prefix cache has become longer."""
        self.prefix_cache.grown(key, length)

    def copy(
        self, request: Request, key: int, tokens: Tokens, *, optional: bool = False
    ) -> list[StepPlan]:
        """Keep a copy of one of a request's sequences as of now, if there is room for it.

        It never evicts what was loaded for a waiting request. An ``optional`` copy, which may
        never be used, takes free room and evicts nothing.
        """
        if not self._keeps(request):
            return []
        accounts, length = self.accounts, len(tokens)
        need = self._copy_need(key, length)
        full = self.prefix_cache.evictable >= self.max_cached
        if optional and (full or (need > accounts.free).any()):
            return []
        plans = self.make(need, key, *self.prefix_cache.wanted)
        if plans is None:
            return []
        copied = next(self.copies)
        accounts.open(copied, key, length, length, length)
        accounts.keep(copied, length)
        self._enter(request, tokens, copied)
        plans += [
            Fork(copied, length, length, length, source=key),
            Cache(copied),
        ]
        return plans + self.shrink_to(self.max_cached)

    def _copy_need(self, key: int, length: int) -> Ints:
        stored = self.accounts.stored(key, length)
        return self.accounts.need(stored, length, length, length)

    def can_copy(self, key: int, length: int) -> bool:
        """True if there is room for a copy of a sequence's ``length`` tokens, with evictions."""
        available = self.accounts.available(*self.saved, *self.prefix_cache.wanted)
        return bool((self._copy_need(key, length) <= available).all())

    def checkpoint(self, prefill: Prefill) -> list[StepPlan]:
        """Keep a copy of a prompt in work, if `copy` finds room.

        A copy for the disk takes the place of the prompt's earlier copy for the disk.
        """
        request, at, plans = prefill.request, prefill.position, list[StepPlan]()
        copied = prefill.copied
        if at == prefill.to_disk and copied is not None and copied in self.prefix_cache:
            plans += self.end(request, copied, prefill.tokens, keep=False)
        optional = at in prefill.optional
        plans += self.copy(request, prefill.key, prefill.tokens, optional=optional)
        if at == prefill.to_disk:
            forks = (plan.sequence for plan in plans if isinstance(plan, Fork))
            prefill.copied = next(forks, None)
        return plans

    def end(self, request: Request, key: int, tokens: Tokens, *, keep: bool) -> list[StepPlan]:
        """Cache a finished sequence for prompts with the same beginning, or close it."""
        if keep and self._keeps(request) and len(tokens) >= self.cache.page_size:
            self.accounts.keep(key, len(tokens))
            self._enter(request, tokens, key)
            return [Cache(key), *self.shrink_to(self.max_cached)]
        self.prefix_cache.remove(key)
        self.accounts.close(key)
        return [*self.tiers.forget(key), Close(key)]

    def _keeps(self, request: Request) -> bool:
        """True if other prompts may begin from a request's sequences."""
        return self.shares and request.cache_prompt

    def _enter(self, request: Request, tokens: Tokens, key: int) -> None:
        """Enter a sequence into the prefix cache, and offer it to host memory and disk."""
        self.prefix_cache.add(request.namespace, tokens, key)
        self.tiers.offer(Candidate(key, request.namespace, tokens))

    # ------------------------------------------------------------------- host memory and disk

    def move(
        self,
        run: Callable[[StepPlan], Tensor | None],
        clock: Callable[[], float],
        seconds: dict[type[StepPlan], float],
    ) -> bool:
        """Move the next parts to or from host memory and disk; True if any was moved.

        The ranks ``run`` plans, until a part ends after as many ``seconds`` as its kind may take.
        """
        if not self.tiers.active:
            return False
        began, moved = clock(), False
        pinned = [(request.namespace, request.tokens) for request in self.pinned.values()]
        while (plan := self.tiers.next(pinned)) is not None:
            answers = run(plan)
            moved = True
            assert answers is not None
            for after in self._transferred(plan, answers):
                run(after)
            if clock() - began > seconds[type(plan)]:
                break
        return moved

    def drain(self, move: Callable[[], bool], seconds: float) -> None:
        """Close the tiers once ``move`` has saved what is being saved, or after ``seconds``."""
        end = time.monotonic() + seconds
        while self.tiers.active and time.monotonic() < end:
            if not move():
                self.tiers.pause()
        self.tiers.close()

    def _transferred(self, plan: Save | Load, answers: Tensor) -> list[StepPlan]:
        """Take in the answers to a plan that saves or loads; return the plans that follow."""
        tiers = self.tiers
        if isinstance(plan, Save):
            return tiers.saved(answers)
        loading = tiers.loading
        assert loading is not None
        whole = tiers.loaded(answers)
        if whole is None:
            return []
        key, tokens = loading.key, loading.tokens
        if not whole:
            self.accounts.close(key)
            return [Close(key)]
        self.accounts.keep(key, len(tokens))
        self.prefix_cache.add(loading.namespace, tokens, key, loading.tier)
        self.prefix_cache.loaded = loading
        return [Cache(key), *self.shrink_to(self.max_cached)]
