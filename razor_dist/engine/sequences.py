"""The sequences of one rank: made, forked, cached and released as plans say."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

from razor_dist.attention.shared_window import shared_windows
from razor_dist.cache.caches import Caches
from razor_dist.cache.sequence import ChunkedPrefill, Sequence
from razor_dist.cache.streaming import ChunkedWindow
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.sharding import cut_chunks, shard_lengths, shard_sizes
from razor_dist.parallel.zigzag import Chunk
from razor_dist.protocol.step_plan import Fork, Open


class Sequences(dict[int, Sequence]):
    """The sequences in a rank's caches, by key.

    ``position_mark`` gives the mark of a sequence's positions (`razor_dist.models.longrope`) from
    the tokens that the model may ever read of it.
    """

    def __init__(
        self, comm: Communicator, caches: Caches, position_mark: Callable[[int], int]
    ) -> None:
        super().__init__()
        self._comm, self._caches, self._position_mark = comm, caches, position_mark
        self.peak_kv_bytes = 0

    def open(self, plan: Open) -> None:
        caches, size, rank = self._caches, self._comm.size, self._comm.rank
        prefill = None
        if caches.scratch is not None and plan.end:
            prompt = shard_sizes(0, plan.end, plan.end, size)
            scratch = caches.scratch.allocate(prompt[rank])
            prefill = ChunkedPrefill(scratch=scratch)
        sizes = shard_sizes(0, plan.end, plan.total, size)
        self[plan.sequence] = Sequence(
            total=plan.total,
            table=caches.pages.allocate(sizes[rank]),
            shard_tokens=[0] * size,
            streaming=tuple(cache.allocate(plan.total) for cache in caches.streaming),
            position_mark=self._position_mark(plan.max_read),
            prefill=prefill,
        )
        self.note_peak()

    def fork(self, plan: Fork) -> None:
        caches, size, rank = self._caches, self._comm.size, self._comm.rank
        source, cut = self[plan.source], plan.begin
        assert source.prefill is None, "fork finished prompts only"
        stored = shard_lengths(source.chunks, cut, size)
        new = shard_sizes(cut, plan.end, plan.total, size)[rank]
        self[plan.sequence] = Sequence(
            total=plan.total,
            table=caches.pages.fork(source.table, stored[rank], stored[rank] + new),
            shard_tokens=stored,
            streaming=tuple(
                cache.fork(slot, cut, plan.total, instead=plan.instead)
                for cache, slot in zip(caches.streaming, source.streaming, strict=True)
            ),
            length=cut,
            position_mark=source.position_mark,
            chunks=cut_chunks(source.chunks, cut),
        )
        if plan.instead:
            caches.pages.release(self.pop(plan.source).table)
        self.note_peak()

    def begin_chunks(self, key: int) -> None:
        """Make a sequence ready for its prompt's first chunk, if the next chunk is the first.

        All ranks call this together: with tensor-parallel decode they exchange their windows.
        """
        caches, sequence = self._caches, self[key]
        sequence.prefill = sequence.prefill or ChunkedPrefill()
        if sequence.prefill.done:
            return
        windows = [ChunkedWindow() for _ in caches.streaming]
        if caches.layout.share is not None:
            windows = shared_windows(self._comm, caches, sequence)
        for cache, slot, window in zip(caches.streaming, sequence.streaming, windows, strict=True):
            cache.chunked[slot.index] = window

    def cache(self, key: int) -> None:
        """Mark a sequence as not in use: it may be evicted."""
        sequence = self[key]
        assert sequence.prefill is None, "cache finished prompts only"
        sequence.end_answer()
        self._caches.pages.cache(sequence.table)
        for cache, slot in zip(self._caches.streaming, sequence.streaming, strict=True):
            cache.cache(slot, sequence.length, sequence.total)

    def restore(self, key: int, total: int, chunks: Rows[Rows[int]], mark: int) -> None:
        """Make room for a sequence of ``total`` tokens that comes from host memory or disk."""
        caches, size, rank = self._caches, self._comm.size, self._comm.rank
        whole = [Chunk(a, b, size, (c, d)) for a, b, c, d in chunks]
        sizes = shard_lengths(whole, total, size)
        table = caches.pages.allocate(sizes[rank])
        table.tokens = sizes[rank]
        self[key] = Sequence(
            total=total,
            table=table,
            shard_tokens=sizes,
            streaming=tuple(cache.allocate(total) for cache in caches.streaming),
            length=total,
            position_mark=mark,
            chunks=whole,
        )
        self.note_peak()

    def close(self, key: int) -> None:
        sequence, caches = self.pop(key), self._caches
        caches.pages.release(sequence.table)
        for cache, slot in zip(caches.streaming, sequence.streaming, strict=True):
            cache.release(slot)
        if sequence.prefill is not None and sequence.prefill.scratch is not None:
            assert caches.scratch is not None
            caches.scratch.release(sequence.prefill.scratch)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that sequences in use hold on this rank now."""
        return sum(store.used_bytes for store in self._caches.stores)

    @property
    def cached_bytes(self) -> int:
        """Bytes of keys and values that may be evicted on this rank."""
        caches = self._caches
        return caches.pages.cached_bytes + sum(cache.cached_bytes for cache in caches.streaming)

    def note_peak(self) -> None:
        """Take note of `kv_bytes`, if it never was larger."""
        self.peak_kv_bytes = max(self.peak_kv_bytes, self.kv_bytes)
