"""The sequences whose caches a prompt may begin from, and which of them goes when room is needed.

The index is in rank 0's memory alone: a sequence's tokens in a radix tree, and its allocation on
every rank in `CacheAccounts`. Most entries are finished sequences; pinned prefixes and running
sequences can be continued as well, and are never evicted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from razor_dist.cache.accounting import Bools, CacheAccounts, Ints
from razor_dist.prefix.radix import RadixIndex, Tokens

log = logging.getLogger(__name__)


class PrefillCost(Protocol):
    """Estimates the seconds that prefilling again would take."""

    def work(self, tokens: float, context: int) -> float:
        """Return the seconds of prefilling ``tokens`` after ``context`` others."""
        ...


@dataclass(eq=False)
class Entry:
    key: int  # the ranks' name for its sequence
    length: int  # its tokens
    used_at: float  # the clock of evictions when it was used last
    tier: str = "device"  # from which it came, until it is used


@dataclass(frozen=True)
class Hit:
    """The longest beginning of a prompt that can be had without reading it."""

    entry: Entry | None
    tokens: int
    common: int  # tokens that the prompt has in common with some entry


class PrefixCache:
    """Entries, found by the longest common prefix, evicted by what it costs to read them again.

    The entry goes that is worth least: seconds to read again per byte, plus the worth of the one
    that went last when this one was used (GreedyDual-Size). So what is not used loses to what is,
    and a costly one slower than a cheap one. An entry costs only what the others do not cover.
    """

    def __init__(self, accounts: CacheAccounts, cost: PrefillCost) -> None:
        self._accounts, self._cost = accounts, cost
        self._index = RadixIndex()
        self._entries: dict[int, Entry] = {}
        self._clock = 0.0
        # queries, hits, their tokens in all and those that were found; evictions.
        self.counts: Counter[str] = Counter()

    def add(self, namespace: Hashable, tokens: Tokens, key: int, tier: str = "device") -> None:
        """Enter a sequence of ``tokens``, or enter it anew, now that it is longer."""
        self.remove(key)
        self._index.add(namespace, tokens, key, self._accounts.grown(key, len(tokens)))
        self._entries[key] = Entry(key, len(tokens), self._clock, tier)

    def remove(self, key: int) -> None:
        """Forget a sequence, if it is here."""
        if self._entries.pop(key, None) is not None:
            self._index.remove(key)

    def grown(self, key: int, length: int) -> None:
        """Note that an entry in use has become longer, so that it cannot be cut where it could."""
        if key in self._entries:
            self._index.set_least_cut(key, self._accounts.grown(key, length))

    def find(self, namespace: Hashable, tokens: Tokens, most: int) -> Hit:
        match = self._index.match(namespace, tokens, most)
        entry = None if match.key is None else self._entries[match.key]
        return Hit(entry, match.tokens, match.common)

    def use(self, hit: Hit | None, prompt_tokens: int, base: int) -> None:
        """Count a prompt that is about to be read, from what was found for it on.

        Its own ``prompt_tokens`` begin at ``base``. Those of a pinned prefix come before them and
        are not counted: they are in the caches in any case.
        """
        self.counts["queries"] += 1
        self.counts["query_tokens"] += prompt_tokens
        if hit is not None and hit.entry is not None:
            hit.entry.used_at = self._clock
            self.counts["hits"] += 1
            cached = hit.tokens - base
            self.counts["hit_tokens"] += cached
            if cached > 1024:
                log.info("%d of %d prompt tokens are cached", cached, prompt_tokens)

    def evict(self, short: Bools, *but: int) -> Entry | None:
        """Forget the entry that is worth least and holds any of what is ``short``; not ``but``."""
        worths = []
        for entry in self._entries.values():
            if self._accounts[entry.key].cached and entry.key not in but:
                frees = self._accounts.exclusive(entry.key)
                helps = bool((short & (frees > 0)).any())
                worths.append((not helps, self._worth(entry, frees), entry.key))
        if not worths:
            return None
        _, self._clock, key = min(worths)
        entry = self._entries[key]
        self.remove(key)
        self.counts["evictions"] += 1
        return entry

    @property
    def evictable(self) -> int:
        """The number of entries that may be evicted."""
        return sum(self._accounts[key].cached for key in self._entries)

    def _worth(self, entry: Entry, frees: Ints) -> float:
        covered = self._index.covered(entry.key)
        seconds = self._cost.work(entry.length - covered, covered)
        return entry.used_at + seconds / max(1.0, float(np.sum(self._accounts.weights @ frees)))
