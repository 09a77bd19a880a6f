"""Rank 0's account of every rank's free memory, by the code that the ranks allocate with.

The ranks take the same decisions because rank 0 takes them all. It must know what a sequence will
take on each of them before it is opened, and what its end or its eviction gives back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from razor_dist.cache.caches import CacheConfig
from razor_dist.cache.pages import PagePool, PageTable
from razor_dist.parallel.sharding import cut_chunks, shard_lengths, shard_sizes
from razor_dist.parallel.zigzag import Chunk

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(eq=False)
class Allocation:
    """The pages and slots that one sequence holds."""

    tables: list[PageTable]  # by rank
    totals: list[int]  # by arena: the tokens that its slot has room for
    tails: list[int]  # by arena: the first token in its slot's tail
    chunks: list[Chunk] = field(default_factory=list)  # like `cache.sequence.Sequence`'s
    scratch: Ints | None = None  # pages of the scratch pool
    cached: bool = False


class CacheAccounts:
    """The free, cached and used parts of every rank's pools.

    Quantities are arrays with a row for each of: pages, places of each arena, pages of the scratch
    pool; and a column for each rank.
    """

    def __init__(self, cache: CacheConfig, world_size: int) -> None:
        self.cache, self.world_size = cache, world_size
        cpu = torch.device("cpu")
        self._pools = [  # without rows: page tables and nothing in the pages
            PagePool(0, cache.num_pages, cache.page_size, 0, dtype=torch.float32, device=cpu)
            for _ in range(world_size)
        ]
        self._free_places = [arena.places for arena in cache.arenas]
        self._cached_places = [0 for _ in cache.arenas]
        self._free_scratch = np.full(world_size, cache.scratch_pages)
        self.sizes = self.free
        # Bytes of a page and of a place, of each rank.
        places = cache.place_bytes or (1,) * len(cache.arenas)
        self.weights = np.array([cache.page_bytes, *places, 0], np.float64)

    def _table(self, pages: Seq[int] | Ints, places: Seq[int], scratch: Ints) -> Ints:
        rows = [np.asarray(pages), *(np.full(self.world_size, n) for n in places), scratch]
        return np.stack(rows)

    @property
    def free(self) -> Ints:
        pages = [pool.free_pages for pool in self._pools]
        return self._table(pages, self._free_places, self._free_scratch)

    def available(self, *sources: Allocation) -> Ints:
        """Return what is free if all is evicted that is cached, except for ``sources``."""
        pages = [pool.available_pages for pool in self._pools]
        pairs = zip(self._free_places, self._cached_places, strict=True)
        places = [free + cached for free, cached in pairs]
        held = [source for source in dict.fromkeys(sources) if source.cached]
        for rank, pool in enumerate(self._pools):
            pages[rank] -= pool.unused_pages(*(source.tables[rank] for source in held))
        for index, arena in enumerate(self.cache.arenas):
            places[index] -= sum(arena.width(source.totals[index]) for source in held)
        return self._table(pages, places, self._free_scratch)

    def pages_for(self, tokens: Seq[int] | Ints) -> Ints:
        return -(-np.asarray(tokens) // self.cache.page_size)

    def need(self, stored: Ints, begin: int, chunks_end: int, total: int) -> Ints:
        """Return what a sequence takes beside the full pages of ``stored`` tokens of another.

        It reads positions from ``begin`` to ``chunks_end`` in chunks, and ``total`` in all.
        """
        held, size = stored, self.world_size
        new = shard_sizes(begin, chunks_end, total, size)
        # Full pages are shared; a partly filled one is copied.
        pages = self.pages_for(held + new) - held // self.cache.page_size
        scratch = np.zeros(size, np.int64)
        if not begin and self.cache.scratch_pages:
            scratch = self.pages_for(shard_sizes(0, chunks_end, chunks_end, size))
        # Of an arena whatever is free can be taken, wherever it is (`StreamingCache`).
        return self._table(pages, [arena.width(total) for arena in self.cache.arenas], scratch)

    def open(
        self,
        source: Allocation | None,
        stored: Ints,
        begin: int,
        chunks_end: int,
        total: int,
    ) -> Allocation:
        """Take what `need` says, for a sequence that begins as the first tokens of ``source``.

        ``stored`` are these by rank; they may not be prefilled yet. The length of ``source`` is
        what `grown` has counted so far.
        """
        size, arenas = self.world_size, self.cache.arenas
        before = Allocation([PageTable() for _ in self._pools], [], [0 for _ in arenas])
        source = source or before
        new = shard_sizes(begin, chunks_end, total, size)
        need = self.need(stored, begin, chunks_end, total)
        tables = [
            pool.fork(table, held, held + more)
            for pool, table, held, more in zip(
                self._pools, source.tables, stored.tolist(), new, strict=True
            )
        ]
        for index, arena in enumerate(arenas):
            self._free_places[index] -= arena.width(total)
        self._free_scratch = self._free_scratch - need[-1]
        return Allocation(
            tables,
            [total for _ in arenas],
            [arena.tail_begin(begin, at) for arena, at in zip(arenas, source.tails, strict=True)],
            cut_chunks(source.chunks, begin),
            need[-1],
        )

    def places(self, allocation: Allocation) -> Ints:
        """Return the places of the arenas that a sequence has."""
        none = np.zeros(self.world_size, np.int64)
        pairs = zip(self.cache.arenas, allocation.totals, strict=True)
        return self._table(none, [arena.width(total) for arena, total in pairs], none)

    def places_of(self, total: int) -> Ints:
        """Return the slots' rows that a sequence of this length takes."""
        none = np.zeros(self.world_size, np.int64)
        return self._table(none, [arena.width(total) for arena in self.cache.arenas], none)

    def need_of(self, sizes: Seq[int], total: int) -> Ints:
        """Return what a sequence takes, from its tokens on each rank and their ``total``."""
        none = np.zeros(self.world_size, np.int64)
        return self._table(self.pages_for(sizes), [a.width(total) for a in self.cache.arenas], none)

    def place(self, chunks: list[Chunk], total: int, tails: Seq[int]) -> Allocation:
        """Take room for a sequence of these chunks that comes from elsewhere, whole."""
        sizes, arenas = shard_lengths(chunks, total, self.world_size), self.cache.arenas
        tables = [
            pool.fork(PageTable(), 0, tokens)
            for pool, tokens in zip(self._pools, sizes, strict=True)
        ]
        for index, arena in enumerate(arenas):
            self._free_places[index] -= arena.width(total)
        begins = [a.tail_begin(total, tail) for a, tail in zip(arenas, tails, strict=True)]
        return Allocation(tables, [total for _ in arenas], begins, chunks)

    def end_prompt(self, allocation: Allocation) -> None:
        """Take back the scratch pages, as the ranks do when a prompt ends."""
        if allocation.scratch is not None:
            self._free_scratch = self._free_scratch + allocation.scratch
            allocation.scratch = None

    def keep(self, allocation: Allocation, length: int) -> None:
        """Count a sequence of ``length`` tokens as cached (`Op.CACHE`)."""
        sizes = shard_lengths(allocation.chunks, length, self.world_size)
        for pool, table, tokens in zip(self._pools, allocation.tables, sizes, strict=True):
            table.tokens = tokens
            pool.cache(table)
        allocation.cached = True
        for index, arena in enumerate(self.cache.arenas):
            total = arena.kept_total(allocation.totals[index], length)
            self._free_places[index] += arena.width(allocation.totals[index]) - arena.width(total)
            self._cached_places[index] += arena.width(total)
            allocation.totals[index] = total
        self.grown(allocation, length)

    def close(self, allocation: Allocation) -> None:
        for pool, table in zip(self._pools, allocation.tables, strict=True):
            pool.release(table)
        for index, arena in enumerate(self.cache.arenas):
            width = arena.width(allocation.totals[index])
            self._free_places[index] += width
            self._cached_places[index] -= width * allocation.cached
        self.end_prompt(allocation)

    def grown(self, allocation: Allocation, length: int) -> int:
        """Note that a sequence has come to ``length`` tokens, with which its tails have moved.

        Return the least n that it can be cut to. What is copied of it (`open`) has no more.
        """
        cuts = [0]
        for index, arena in enumerate(self.cache.arenas):
            tail = arena.tail_begin(length, allocation.tails[index])
            allocation.tails[index] = tail
            cuts.append(arena.least_cut(length, tail))
        return max(cuts)

    def first_cut(self, end: int, begin: int) -> int:
        """The least n to which a prompt can be cut that is read to ``end`` from ``begin`` on."""
        new = Allocation([], [], [arena.tail_begin(begin) for arena in self.cache.arenas])
        return self.grown(new, end)

    def exclusive(self, allocation: Allocation) -> Ints:
        """Return what an eviction would free."""
        pairs = zip(self._pools, allocation.tables, strict=True)
        pages = [pool.exclusive_pages(table) for pool, table in pairs]
        pairs_of = zip(self.cache.arenas, allocation.totals, strict=True)
        places = [arena.width(total) for arena, total in pairs_of]
        return self._table(pages, places, np.zeros(self.world_size, np.int64))

    def together(self, allocations: Seq[Allocation]) -> Ints:
        """Return what sequences hold that share pages."""
        pages = [
            len({page for allocation in allocations for page in allocation.tables[rank].pages})
            for rank in range(self.world_size)
        ]
        places = [
            sum(arena.width(allocation.totals[index]) for allocation in allocations)
            for index, arena in enumerate(self.cache.arenas)
        ]
        return self._table(pages, places, np.zeros(self.world_size, np.int64))
