"""Counters of one rank, and their form as the integers that all ranks gather."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor

from razor_dist.cache.accounting import Ints
from razor_dist.cache.caches import Caches
from razor_dist.config.errors import EngineError
from razor_dist.config.memory import resident_bytes
from razor_dist.engine.sequences import Sequences
from razor_dist.parallel.comm import PURPOSES, Communicator
from razor_dist.protocol.counters import Counters, PrefixCounters


class RankStats(NamedTuple):
    """Counters of one rank since its start, and what it holds now."""

    kv_bytes: int  # keys and values of sequences in use
    peak_kv_bytes: int
    retrieval_kv_bytes: int  # of `kv_bytes`
    cached_bytes: int  # keys and values that may be evicted
    rss: int  # resident bytes
    peak_rss: int
    cpu_us: int  # processor time in microseconds
    sent: tuple[int, ...]  # bytes by `PURPOSES`
    # As `Scheduler.on_ranks`: free pages, places of each arena and scratch pages; references to
    # pages; sequences.
    caches: tuple[int, ...]

    @classmethod
    def now(cls, comm: Communicator, caches: Caches, sequences: Sequences) -> RankStats:
        scratch = 0 if caches.scratch is None else caches.scratch.free_pages
        places = (cache.free_places for cache in caches.streaming)
        references = int(caches.pages.references.sum())
        return cls(
            sequences.kv_bytes,
            sequences.peak_kv_bytes,
            caches.pages.used_bytes,
            sequences.cached_bytes,
            *resident_bytes(),
            time.process_time_ns() // 1000,
            tuple(comm.bytes_sent[purpose] for purpose in PURPOSES),
            (caches.pages.free_pages, *places, scratch, references, len(sequences)),
        )

    @property
    def row(self) -> list[int]:
        return [*self[:-2], *self.sent, *self.caches]

    @classmethod
    def of(cls, row: list[int]) -> RankStats:
        """Inverse of `row`."""
        first = len(cls._fields) - 2
        end = first + len(PURPOSES)
        return cls._make([*row[:first], tuple(row[first:end]), tuple(row[end:])])


def read_stats(table: Tensor, caches: Caches, counted: Ints) -> list[RankStats]:
    """Read every rank's `RankStats.row`, int64 ``[P, n]``; ``caches`` are rank 0's.

    Raises `EngineError` unless each rank's `RankStats.caches` are what rank 0 has ``counted``.
    """
    found = [RankStats.of(row) for row in table.tolist()]
    for rank, (stats, ours) in enumerate(zip(found, counted.T.tolist(), strict=True)):
        if caches.scratch is None:
            ours[-3] = 0  # no head needs the scratch pages that exact prefill may have
        if list(stats.caches) != ours:
            raise EngineError(
                f"rank {rank} has {list(stats.caches)} pages and places free, page references and "
                f"sequences, and rank 0 counts {ours}: a defect of razor_dist; please report it"
            )
    return found


def counters_of(ranks: Sequence[RankStats], prefix_cache: PrefixCounters) -> Counters:
    """Return the counters that the ranks have, beside those of the prefix cache."""
    sent = zip(PURPOSES, zip(*(rank.sent for rank in ranks), strict=True), strict=True)
    return Counters(
        kv_bytes_per_rank=[rank.kv_bytes for rank in ranks],
        retrieval_kv_bytes_per_rank=[rank.retrieval_kv_bytes for rank in ranks],
        peak_kv_bytes_per_rank=[rank.peak_kv_bytes for rank in ranks],
        rss_per_rank=[rank.rss for rank in ranks],
        peak_rss_per_rank=[rank.peak_rss for rank in ranks],
        cpu_us_per_rank=[rank.cpu_us for rank in ranks],
        bytes_sent={purpose: sum(by_rank) for purpose, by_rank in sent},
        bytes_sent_per_rank=[sum(rank.sent) for rank in ranks],
        prefix_cache=replace(prefix_cache, bytes_per_rank=[rank.cached_bytes for rank in ranks]),
    )
