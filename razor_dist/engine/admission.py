"""Admission: who gets room in the caches, and whose caches a prompt begins from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from enum import Enum, auto

import numpy as np

from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.cache_need import CacheNeed, PrefixSource
from razor_dist.engine.checkpoints import WORTH_PAGES, Checkpoints
from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Answer, Awaited, Phase, Prefill, Request
from razor_dist.engine.room import Hit, Room
from razor_dist.parallel.sharding import shard_lengths, shard_sizes
from razor_dist.prefix.index import common_tokens
from razor_dist.prefix.tiers import least_new
from razor_dist.protocol.step_plan import Close, Fork, Open, StepPlan

# Pages that an aborted prompt must have prefilled to leave them.
_WORTH_ABORTED = 16


class Wait(Enum):
    """Reasons why a request cannot be opened yet."""

    ROOM = auto()  # in the caches: requests behind it wait too
    PREFIX = auto()  # a prefix that is being prefilled or loaded: others may pass


class Admission:
    """The caches of all ranks, and the plans that open, keep and close sequences in them.

    Unless `Room.shares` them, only pinned prefixes are continued.
    ``end_ids`` are the tokens that end an answer, and so each message of a conversation.
    ``beside(request)`` gives the requests that wait and are not pinned, and the other pinned ones:
    each of the former must fit beside ``request`` and all of the latter.
    """

    def __init__(
        self,
        cache: CacheConfig,
        world_size: int,
        prefill_policy: PrefillPolicy,
        *,
        end_ids: Iterable[int],
        beside: Callable[[Request], tuple[list[Request], list[Request]]],
    ) -> None:
        self.cache, self._prefill_policy = cache, prefill_policy
        self.room = Room(cache, world_size, prefill_policy.cost.work)
        self.accounts = self.room.accounts
        self.need = CacheNeed(self.accounts)
        self.checkpoints = Checkpoints(self.accounts, prefill_policy, end_ids)
        self._beside = beside
        # Least seconds between two times that a prompt's caches go to disk while it is prefilled.
        self.checkpoint_seconds = 5.0

    # ------------------------------------------------------------------- sequences begin

    def open(
        self, request: Request, prefills: Seq[Prefill], plans: list[StepPlan]
    ) -> Prefill | Wait:
        """Take room for a request and its answers, evicting what must go, by ``plans`` to add.

        It waits for one of the ``prefills`` that go on, if that will cache its beginning.
        """
        # Looked for once, not at every step: among a million tokens that takes milliseconds.
        if request.awaits is not None and request.awaits(prefills):
            return Wait.PREFIX
        hit = self._find(request)
        if hit is not None:
            usable = [
                prefill
                for prefill in prefills
                if self._shares(request, prefill.key)
                or self._may_copy(request, prefill.key, self._common(request, prefill) - hit.tokens)
            ]
            request.awaits = self.checkpoints.awaited(request, hit.tokens, usable) or self._promote(
                request, hit, plans
            )
            if request.awaits is not None:
                return Wait.PREFIX
        accounts, end, total = self.accounts, request.end, request.total
        for source in self._sources(request, hit):
            begin, key = source.begin, source.key
            chunks_end = begin if source.short else end
            stored = accounts.stored(key, begin)
            need = accounts.need(stored, begin, chunks_end, total)
            if source.instead:
                need = need - accounts.in_slots(key=key)
            # The other answers fork when the prompt has been prefilled.
            prefilled = stored + shard_sizes(begin, chunks_end, end, accounts.world_size)
            each = accounts.need(prefilled, end, end, total)
            but = [] if key is None else [key]
            evicting = self.room.make(need + len(request.forks) * each, *but)
            if evicting is not None:
                plans += evicting
                return self._open(request, hit, source, plans)
        return Wait.ROOM

    def _open(
        self, request: Request, hit: Hit | None, source: PrefixSource, plans: list[StepPlan]
    ) -> Prefill:
        accounts, end, total = self.accounts, request.end, request.total
        prefill = Prefill(request, source.begin, source.short, instead=source.instead)
        if source.key is not None and request.quota is not None:
            request.nbytes += self.need.page_bytes(self._doubled(request, source.key))
        request.enter(Phase.PREFILL)
        accounts.open(request.key, source.key, prefill.begin, prefill.chunks_end, total)
        for answer in request.forks:
            accounts.open(answer.key, request.key, end, end, total)
        if self.room.shares:
            self.room.count(hit if source.begin > request.base else None, request)
            self.checkpoints.plan(prefill, 0 if hit is None else hit.common)
        if source.instead:
            assert source.key is not None
            plans += self.room.tiers.forget(source.key)
            self.room.prefix_cache.remove(source.key)
            accounts.close(source.key)
        key, begin, chunks_end = request.key, prefill.begin, prefill.chunks_end
        if source.key is None:
            # Another may continue a pinned one; an answer's last token is never read.
            most = self.cache.max_tokens if request.pinned else total
            plans.append(Open(key, chunks_end, total, max_read=most - 1))
        else:
            plans.append(Fork(key, begin, chunks_end, total, source.key, source.instead))
        return prefill

    def fork(self, answer: Answer) -> StepPlan:
        """Begin another answer to a prompt that is prefilled, in the room that it has got."""
        request = answer.request
        self.accounts[answer.key].chunks = list(self.accounts[request.key].chunks)
        end, total = request.end, request.total
        return Fork(answer.key, end, end, total, source=request.key)

    def _find(self, request: Request) -> Hit | None:
        if not self.room.shares or not request.uses_prefix_cache:
            return None
        text = request.namespace, request.tokens, request.end - 1
        hit = self.room.prefix_cache.find(*text)
        if hit.entry is None or self._shares(request, hit.entry.key):
            return hit
        shared = self.room.prefix_cache.find(*text, lambda entry: self._shares(request, entry.key))
        may_copy = self._may_copy(request, hit.entry.key, hit.tokens - shared.tokens)
        return hit if may_copy else shared

    @staticmethod
    def _common(request: Request, prefill: Prefill) -> int:
        return common_tokens(prefill.request.tokens[: prefill.end], request.tokens)

    def _shares(self, request: Request, key: int) -> bool:
        return not self._doubled(request, key)

    def _doubled(self, request: Request, key: int | None) -> int:
        """Pages of all ranks that are held twice if a request begins from a sequence.

        A pinned request stays beside its prefix, which may have other pages for the same tokens.
        What is loaded from host memory or disk has no key yet, and shares no pages.
        """
        prefix = request.prefix if request.pinned else None
        return 0 if prefix is None else self.accounts.lacking(key, prefix.key, prefix.end)

    def _may_copy(self, request: Request, key: int | None, gained: int) -> bool:
        """True if a pinned request may double pages of its prefix by beginning from a sequence.

        At least as many tokens must be ``gained``, which are not read, and the quota must allow it.
        """
        pages = self._doubled(request, key)
        if gained < pages * self.cache.page_size:
            return False
        return self.need.may_copy(request, pages, self._beside(request)[1])

    def _sources(self, request: Request, hit: Hit | None) -> Iterator[PrefixSource]:
        """Stream what a request may continue, the best first."""
        base = request.base
        least = max(self.cache.page_size, base + 1)  # less is prefilled as soon as copied
        if hit is not None and hit.entry is not None and hit.tokens >= least:
            key, begin = hit.entry.key, hit.tokens
            short = self._prefill_policy.is_short(request, begin)
            source = PrefixSource(key, begin, short)
            if not request.pinned or self.need.fits(*self._beside(request), request, source):
                yield source
                if self.accounts[key].cached and key not in self.room.saved:
                    yield PrefixSource(key, begin, short, instead=True)
        yield PrefixSource(
            None if request.prefix is None else request.prefix.key, base, request.short
        )

    def all_fit_beside(self, request: Request) -> bool:
        """True if all others that wait fit beside a waiting pinned request, which stays."""
        waiting, pinned = self._beside(request)
        return self.need.fit_beside(waiting, [request, *pinned])

    def checkpoint(self, prefill: Prefill, end: int) -> None:
        """Have a prompt's caches go to disk as of ``end``, where its next chunk ends, if due.

        A process that is killed then loses what was prefilled since. The disk sets the pace:
        nothing else is being saved. What is left of the prompt must be enough to be saved at its
        end: a server that starts again would read it anew each time.
        """
        tiers = self.room.tiers
        if tiers.active or "disk" not in tiers.nodes.room or prefill.began is None:
            return
        if not prefill.request.uses_prefix_cache:
            return
        past = (stop for stop in prefill.checkpoints if stop <= prefill.position)
        since = max(past, default=prefill.begin)
        now = time.monotonic()
        due = max(prefill.began, prefill.saved_at) + self.checkpoint_seconds
        size = self.cache.page_size
        is_new = end - since >= least_new(end, size)
        if now < due or not is_new or prefill.end - end < least_new(prefill.end, size):
            return
        prefill.saved_at = now
        if tiers.writing.is_possible and self.room.can_copy(prefill.key, end):
            if end not in prefill.checkpoints:  # else prompts may part there, and the copy stays
                prefill.to_disk = end
            prefill.stop_at(end)

    # ------------------------------------------------------------------- host memory and disk

    def _promote(self, request: Request, hit: Hit, plans: list[StepPlan]) -> Awaited | None:
        """Load what a request begins with from host memory or disk; return what it waits for."""
        tiers, accounts = self.room.tiers, self.accounts
        if not tiers.nodes.room:
            return None
        found = tiers.find(request.namespace, request.tokens, request.end - 1)
        if found.entry is None or found.tokens < hit.tokens + WORTH_PAGES * self.cache.page_size:
            return None
        gained = found.tokens - hit.tokens
        if self._doubled(request, None) and not self._may_copy(request, None, gained):
            return None
        if request.loaded.count(found.entry) > 1:  # twice: what was loaded may have been evicted
            return None
        loading = tiers.loading
        if loading is not None and loading.takes_longer(found):
            # Only one is loaded at a time.
            if self._prefill_policy.is_quick(gained, hit.tokens):
                return None
        elif loading is None:
            node, size = found.entry, accounts.world_size
            # Windows are those at its end; without any, its other tokens are of no use.
            end = node.end if self.cache.arenas else found.tokens
            chunks = node.layout(size, end)
            stored = np.array(shard_lengths(chunks, found.tokens, size), np.int64)
            # Room for the request as well, which then takes what it begins with from there.
            need = accounts.restored(chunks, end)
            # It may take the place of what is loaded (`_sources`).
            beside = accounts.need(stored, found.tokens, request.end, request.total)
            need = np.maximum(need, need + beside - accounts.in_slots(total=end))
            evicting = self.room.make(need)
            if evicting is None:
                return None
            key = next(self.room.copies)
            accounts.restore(key, chunks, end, node.manifest.tails)
            plans += [*evicting, tiers.load(node, end, key, request.namespace)]
            request.loaded.append(node)
        loading = tiers.loading
        if loading is not None and loading.node is found.entry:
            loading.wanted_by.add(request)
        return lambda _: tiers.loading is loading

    def end_load(self) -> list[StepPlan]:
        """Return the plans that end a load for which no request waits any more."""
        loading = self.room.tiers.loading
        if loading is None or loading.wanted:
            return []
        self.room.tiers.loading = None
        self.accounts.close(loading.key)
        return [Close(loading.key)]

    def is_worth_keeping(self, prefill: Prefill) -> bool:
        """True if an aborted prefill has done enough of its prompt to be worth caching.

        Where it has taken the place of what was cached, any of it is.
        """
        if not self.room.shares or prefill.short or not prefill.request.uses_prefix_cache:
            return False
        worth = 1 if prefill.instead else _WORTH_ABORTED * self.cache.page_size
        return prefill.position - prefill.begin >= worth
