"""Rank 0's account of every rank's free memory, by the code that the ranks allocate with.

The ranks take the same decisions because rank 0 takes them all. It must know what a sequence will
take on each of them before it is opened, and what its end or its eviction gives back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from razor_dist.cache.caches import CacheConfig
from razor_dist.cache.pages import PagePool, PageTable, held_by
from razor_dist.cache.slots import Arena
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
    chunks: list[Chunk]  # so far, as in `Sequence.chunks`
    # Its own tokens are those from ``begin`` on. Up to ``chunks_end`` they are, or will be,
    # prefilled in chunks.
    begin: int
    chunks_end: int
    scratch: Ints | None = None  # pages of the scratch pool
    cached: bool = False


class CacheAccounts:
    """The free, cached and used parts of every rank's pools, and who holds them.

    Sequences have the keys, and are opened, forked, cached and closed in the order, that they have
    on the ranks. Quantities are arrays with a row for each of: pages, places of each arena, pages
    of the scratch pool; and a column for each rank.
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
        self._held: dict[int, Allocation] = {}
        self.sizes = self.free
        # Bytes of a page and of a place, of each rank.
        places = cache.place_bytes or (1,) * len(cache.arenas)
        self.weights = np.array([cache.page_bytes, *places, 0], np.float64)

    def __getitem__(self, key: int) -> Allocation:
        return self._held[key]

    def _table(
        self, pages: Seq[int] | Ints, places: Seq[int] = (), scratch: Ints | int = 0
    ) -> Ints:
        places = places or [0] * len(self.cache.arenas)
        rows = np.empty((len(places) + 2, self.world_size), np.int64)
        rows[0], rows[1:-1], rows[-1] = pages, np.array(places, np.int64)[:, None], scratch
        return rows

    def _widths(self, totals: Seq[int]) -> list[int]:
        return [arena.width(n) for arena, n in zip(self.cache.arenas, totals, strict=True)]

    # ------------------------------------------------------------------- free and cached

    @property
    def free(self) -> Ints:
        pages = [pool.free_pages for pool in self._pools]
        return self._table(pages, self._free_places, self._free_scratch)

    def held(self, *but: int) -> list[Allocation]:
        return [one for key, one in self._held.items() if key not in but]

    def available(self, *but: int) -> Ints:
        """Return what is free if every cached sequence is evicted, except for some."""
        held = [self._held[key] for key in dict.fromkeys(but) if self._held[key].cached]
        pages = [
            pool.available_pages - pool.unused_pages(*(one.tables[rank] for one in held))
            for rank, pool in enumerate(self._pools)
        ]
        widths = [self._widths(one.totals) for one in held]
        kept = [sum(of_arena) for of_arena in zip(*widths, strict=True)]
        places = np.array(self._free_places) + self._cached_places - (kept or 0)
        return self._table(pages, places.tolist(), self._free_scratch)

    # ------------------------------------------------------------------- needs

    def pages_for(self, tokens: Seq[int] | Ints) -> Ints:
        return -(-np.asarray(tokens) // self.cache.page_size)

    def need(self, stored: Ints, begin: int, chunks_end: int, total: int) -> Ints:
        """Return what a sequence takes beside the full pages of ``stored`` tokens of another.

        It reads positions from ``begin`` to ``chunks_end`` in chunks, and ``total`` in all.
        """
        size = self.world_size
        new = shard_sizes(begin, chunks_end, total, size)
        # Full pages are shared; a partly filled one is copied.
        pages = self.pages_for(stored + new) - stored // self.cache.page_size
        scratch: Ints | int = 0
        if not begin and self.cache.scratch_pages:
            scratch = self.pages_for(shard_sizes(0, chunks_end, chunks_end, size))
        # Of an arena whatever is free can be taken, wherever it is (`StreamingCache`).
        return self._table(pages, self.slots(total), scratch)

    def slots(self, total: int) -> list[int]:
        """Return the places, by arena, that the slots of a sequence of this length take."""
        return self._widths([total] * len(self.cache.arenas))

    def restored(self, chunks: list[Chunk], total: int) -> Ints:
        """Return what a sequence takes that comes from host memory or disk."""
        pages = self.pages_for(shard_lengths(chunks, total, self.world_size))
        return self._table(pages, self.slots(total))

    def in_slots(self, *, key: int | None = None, total: int = 0) -> Ints:
        """Return the places that a sequence has, or one of ``total`` tokens would have."""
        return self._table(
            [0] * self.world_size,
            self.slots(total) if key is None else self._widths(self._held[key].totals),
        )

    def exclusive(self, key: int) -> Ints:
        """Return what an eviction would free."""
        held = self._held[key]
        pairs = zip(self._pools, held.tables, strict=True)
        return self._table(
            [pool.exclusive_pages(table) for pool, table in pairs], self._widths(held.totals)
        )

    def share_pages(self, one: int, other: int) -> bool:
        """True if two sequences hold pages in common: those of a beginning, so the first ones."""
        pairs = zip(self._held[one].tables, self._held[other].tables, strict=True)
        return any(a.pages and a.pages[:1] == b.pages[:1] for a, b in pairs)

    def lacking(self, key: int | None, other: int, end: int) -> int:
        """Return how many full pages of another's first ``end`` tokens a sequence does not share.

        Pages of all ranks; without a sequence, all of them.
        """
        full = self.full_pages(other, self.stored(other, end))
        lacking = sum(len(table.pages) for table in full)
        if key is None:
            return lacking
        for own, table in zip(self._held[key].tables, full, strict=True):
            n = min(len(own.pages), len(table.pages))
            parts = own.numbers[:n] != table.numbers[:n]
            lacking -= int(parts.argmax()) if parts.any() else n
        return lacking

    def full_pages(self, key: int, stored: Ints) -> list[PageTable]:
        """Return tables, by rank, of the pages that a sequence's first ``stored`` tokens fill."""
        full = (stored // self.cache.page_size).tolist()
        pairs = zip(self._held[key].tables, full, strict=True)
        return [PageTable(table.pages[:count]) for table, count in pairs]

    def together(self, keys: Seq[int], *more: Seq[PageTable]) -> Ints:
        """Return what sequences hold that share pages, and ``more`` tables of every rank."""
        held = [self._held[key] for key in keys]
        tables = zip(*(one.tables for one in held), *more, strict=True)
        pages = [int(held_by(of_rank, self.cache.num_pages).sum()) for of_rank in tables]
        pages = pages or [0] * self.world_size
        widths = [self._widths(one.totals) for one in held]
        return self._table(pages, [sum(of_arena) for of_arena in zip(*widths, strict=True)])

    def stored(self, key: int | None, end: int) -> Ints:
        """Return the tokens on every rank of a sequence's first ``end``, once they are prefilled.

        Without a sequence, all ranks compute these.
        """
        size = self.world_size
        if key is None:
            return np.array(shard_sizes(0, 0, end, size), np.int64)
        held = self._held[key]
        # Chunks of any lengths give every rank as much, once all are done.
        planned = end >= held.chunks_end
        before = shard_lengths(held.chunks, held.begin if planned else end, size)
        own = shard_sizes(held.begin, held.chunks_end, end, size) if planned else 0
        return np.array(before, np.int64) + own

    # ------------------------------------------------------------------- sequences come and go

    def open(self, key: int, source: int | None, begin: int, chunks_end: int, total: int) -> None:
        """Take what `need` says, for a sequence that begins as the first tokens of ``source``.

        These may not be prefilled yet. The length of ``source`` is what `grown` has counted so far.
        """
        arenas = self.cache.arenas
        before = _nothing(self.world_size, arenas) if source is None else self._held[source]
        stored = self.stored(source, begin)
        sizes = shard_sizes(begin, chunks_end, total, self.world_size)
        scratch = self.need(stored, begin, chunks_end, total)[-1]
        tables = [
            pool.fork(table, held, held + new)
            for pool, table, held, new in zip(
                self._pools, before.tables, stored.tolist(), sizes, strict=True
            )
        ]
        self._free_scratch = self._free_scratch - scratch
        tails = [a.tail_begin(begin, at) for a, at in zip(arenas, before.tails, strict=True)]
        chunks = cut_chunks(before.chunks, begin)
        totals = [total for _ in arenas]
        self._enter(key, Allocation(tables, totals, tails, chunks, begin, chunks_end, scratch))

    def restore(self, key: int, chunks: list[Chunk], total: int, tails: Seq[int]) -> None:
        """Take what `restored` says, for a sequence of these chunks."""
        sizes = shard_lengths(chunks, total, self.world_size)
        tables = [
            pool.fork(PageTable(), 0, tokens)
            for pool, tokens in zip(self._pools, sizes, strict=True)
        ]
        begins = [
            a.tail_begin(total, tail) for a, tail in zip(self.cache.arenas, tails, strict=True)
        ]
        self._enter(key, Allocation(tables, [total] * len(begins), begins, chunks, total, total))

    def _enter(self, key: int, new: Allocation) -> None:
        assert key not in self._held, f"sequence {key} is open"
        self._held[key] = new
        for index, width in enumerate(self._widths(new.totals)):
            self._free_places[index] -= width

    def end_prompt(self, key: int) -> None:
        """Take back the scratch pages, as the ranks do when a prompt ends."""
        held = self._held[key]
        if held.scratch is not None:
            self._free_scratch = self._free_scratch + held.scratch
            held.scratch = None

    def keep(self, key: int, length: int) -> None:
        """Count a sequence of ``length`` tokens as cached (`Cache`)."""
        held = self._held[key]
        sizes = shard_lengths(held.chunks, length, self.world_size)
        for pool, table, tokens in zip(self._pools, held.tables, sizes, strict=True):
            table.tokens = tokens
            pool.cache(table)
        held.cached = True
        before = self._widths(held.totals)
        held.totals = [
            arena.kept_total(total, length)
            for arena, total in zip(self.cache.arenas, held.totals, strict=True)
        ]
        for index, width in enumerate(self._widths(held.totals)):
            self._free_places[index] += before[index] - width
            self._cached_places[index] += width
        self.grown(key, length)

    def close(self, key: int) -> None:
        self.end_prompt(key)
        held = self._held.pop(key)
        for pool, table in zip(self._pools, held.tables, strict=True):
            pool.release(table)
        for index, width in enumerate(self._widths(held.totals)):
            self._free_places[index] += width
            self._cached_places[index] -= width * held.cached

    def grown(self, key: int, length: int) -> int:
        """Note that a sequence has come to ``length`` tokens, with which its tails have moved.

        Return the least n that it can be cut to. What is copied of it (`open`) has no more.
        """
        held = self._held[key]
        arenas = zip(self.cache.arenas, held.tails, strict=True)
        held.tails = [arena.tail_begin(length, tail) for arena, tail in arenas]
        return self.least_cut(length, held.tails)

    def least_cut(self, length: int, tails: Seq[int]) -> int:
        """Return the least n that a sequence of ``length`` tokens with these tails is cut to."""
        arenas = zip(self.cache.arenas, tails, strict=True)
        return max((arena.least_cut(length, tail) for arena, tail in arenas), default=0)

    def first_cut(self, end: int, begin: int) -> int:
        """The least n to which a prompt can be cut that is read to ``end`` from ``begin`` on."""
        begins = [arena.tail_begin(begin) for arena in self.cache.arenas]
        arenas = zip(self.cache.arenas, begins, strict=True)
        return self.least_cut(end, [arena.tail_begin(end, at) for arena, at in arenas])


def _nothing(world_size: int, arenas: Seq[Arena]) -> Allocation:
    tables = [PageTable() for _ in range(world_size)]
    return Allocation(tables, [0 for _ in arenas], [0 for _ in arenas], [], 0, 0)
