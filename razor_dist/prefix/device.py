"""The sequences on the device that prompts may begin from, and which of them is evicted first.

Most are finished sequences. Pinned prefixes and running sequences can be continued as well, and are
never evicted. Their pages and slots on every rank are in `CacheAccounts`, by the same keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from razor_dist.cache.accounting import Bools, CacheAccounts
from razor_dist.prefix.index import Entry, Match, Namespace, PrefixIndex, Tier
from razor_dist.prefix.manifest import Tokens
from razor_dist.prefix.tiers import Loading
from razor_dist.protocol.counters import PrefixCounters

log = logging.getLogger(__name__)

# True if evicting the entry frees nothing that is short; its worth; its key. The least goes first.
Worth = tuple[bool, float, int]


@dataclass(eq=False)
class CachedSequence(Entry):
    """A sequence in the caches; its key is the ranks' name for it."""

    tier: Tier = "device"  # from which it was loaded, until it is used


class PrefixCache:
    """Sequences, found by the longest common prefix, evicted by their worth in `PrefixIndex`.

    Tokens that other sequences have as well count neither as seconds nor as bytes.
    """

    def __init__(self, accounts: CacheAccounts, index: PrefixIndex) -> None:
        self._accounts, self.index = accounts, index
        self._entries: dict[int, CachedSequence] = {}
        self.loaded: Loading | None = None  # the sequence that was loaded last
        self.counts = PrefixCounters()

    def add(self, namespace: Namespace, tokens: Tokens, key: int, tier: Tier = "device") -> None:
        """Add a sequence, or replace it if it has become longer."""
        self.remove(key)
        least, used_at = self._accounts.grown(key, len(tokens)), dict(self.index.clock)
        entry = CachedSequence(key, len(tokens), least, used_at, {"device"}, tier)
        self.index.add(namespace, tokens, entry)
        self._entries[key] = entry

    def remove(self, key: int) -> None:
        """Forget a sequence; unknown keys are ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.index.remove(entry)

    @property
    def wanted(self) -> list[int]:
        """The key of the sequence loaded last, if a request still waits for it."""
        loaded = self.loaded
        return [loaded.key] if loaded and loaded.wanted and loaded.key in self else []

    def grown(self, key: int, length: int) -> None:
        """Note that an entry in use has become longer, so that its least cut has moved."""
        if key in self._entries:
            self._entries[key].least_cut = self._accounts.grown(key, length)

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def find(
        self,
        namespace: Namespace,
        tokens: Tokens,
        most: int,
        among: Callable[[CachedSequence], bool] = lambda _: True,
    ) -> Match[CachedSequence]:
        return self.index.match(CachedSequence, namespace, tokens, most, among)

    def use(self, hit: Match[CachedSequence] | None, prompt_tokens: int, base: int) -> None:
        """Count a prompt that is about to be prefilled behind ``hit``.

        Its ``prompt_tokens`` begin at ``base``, behind a pinned prefix whose tokens are not
        counted: they are in the caches in any case.
        """
        self.counts.queries += 1
        self.counts.query_tokens += prompt_tokens
        if hit is not None and hit.entry is not None:
            hit.entry.used_at["device"] = self.index.clock["device"]
            self.counts.hits += 1
            cached = hit.tokens - base
            self.counts.hit_tokens += cached
            if cached > 1024:
                log.info("%d of %d prompt tokens are cached", cached, prompt_tokens)

    def worths(self, short: Bools, *but: int) -> list[Worth]:
        """Return the heap for `evict`: the entries that may be evicted, ``but`` some keys."""
        keys = [key for key in self._entries if self._accounts[key].cached and key not in but]
        found = [self._worth(key, short) for key in keys]
        heapify(found)
        return found

    def _worth(self, key: int, short: Bools) -> Worth:
        entry, frees = self._entries[key], self._accounts.exclusive(key)
        nbytes = float(np.sum(self._accounts.weights @ frees))
        worth = self.index.worth(entry, "device", self.index.covered(entry), nbytes)
        return not (short & (frees > 0)).any(), worth, key

    def evict(self, worths: list[Worth], short: Bools) -> int | None:
        """Forget the entry that is worth least and holds pages or slots that are ``short``.

        Return its key. Its worth is computed anew before it goes. Entries that share pages with it
        are looked at next: they may now hold these alone and be worth less per byte. To value all
        after each eviction would take seconds for hundreds of entries.
        """
        while worths:
            key = heappop(worths)[-1]
            if key not in self._entries:  # evicted already: the heap had it twice
                continue
            found = self._worth(key, short)
            if worths and found > worths[0]:
                heappush(worths, found)
                continue
            _, worth, key = found
            for other in {other for *_, other in worths if other in self._entries}:
                if self._accounts.share_pages(other, key):
                    heappush(worths, (False, -math.inf, other))
            self.index.went("device", worth)
            self.remove(key)
            self.counts.evictions += 1
            return key
        return None

    @property
    def evictable(self) -> int:
        """The number of entries that may be evicted."""
        return sum(self._accounts[key].cached for key in self._entries)
