"""Attention of one prefill chunk on one rank."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from razor_dist.attention.streaming_prefill import StreamingChunk, StreamingTransfers
from razor_dist.cache.caches import Caches
from razor_dist.cache.pages import PagePool, PageTable
from razor_dist.cache.sequence import Sequence, SharedWindow
from razor_dist.heads.layout import LayerHeads, StreamingGroup
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import Earlier, positions_of
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.ring import RingAttention, ring_attention
from razor_dist.parallel.sharding import shard_positions
from razor_dist.parallel.zigzag import Chunk, Interval


class PrefillContext:
    """`AttentionContext` of one chunk.

    Retrieval heads attend over the whole context by ring attention and leave their keys and
    values in this rank's pages. Streaming heads attend to sinks, window and compensation token;
    with exact prefill they are treated like retrieval heads and compressed when the prompt ends.

    ``chunk`` starts at ``sequence.length``; ``last`` says that the prompt ends with it.
    """

    def __init__(
        self,
        comm: Communicator,
        caches: Caches,
        sequence: Sequence,
        chunk: Chunk,
        *,
        last: bool,
        ring: RingAttention = ring_attention,
    ) -> None:
        assert chunk.begin == sequence.length
        self.comm, self.caches, self.sequence = comm, caches, sequence
        self.chunk, self.last, self._ring_attention = chunk, last, ring
        self.tokens = chunk.tokens(comm.rank)
        self.exact = sequence.scratch is not None
        self._slots = self._slots_of(caches.pages, sequence.table)
        if self.exact:
            assert caches.scratch is not None and sequence.scratch is not None
            self._scratch_slots = self._slots_of(caches.scratch, sequence.scratch)
        # What every rank holds of earlier chunks: of all tokens, and of this prompt's alone.
        self._earlier = {False: sequence.shard_tokens}
        if self.exact:
            prompt = [sum(w.tokens(r) for w in sequence.done) for r in range(comm.size)]
            self._earlier[True] = prompt
        self._earlier_positions: dict[bool, list[Tensor]] = {}
        self._device = caches.pages.k.device
        windows = sequence.window or [{} for _ in caches.streaming]
        shared: Seq[SharedWindow | None] = sequence.shared or [None for _ in caches.streaming]
        each = zip(caches.streaming, sequence.streaming, windows, shared, strict=True)
        self._streaming = [
            StreamingChunk(
                comm,
                cache,
                slot,
                sequence,
                window,
                chunk,
                exact=self.exact,
                last=last,
                shared=of_all,
            )
            for cache, slot, window, of_all in each
        ]

    def _slots_of(self, pool: PagePool, table: PageTable) -> tuple[list, list]:
        """Slots of the tokens already stored, and of this chunk's."""
        old = table.tokens
        return pool.spans(table, 0, old), pool.extents(table, old, old + self.tokens)

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        heads = self.caches.layout.layers[layer]
        dtype = query.q.dtype
        kv_heads, group_size, n, dim = query.q.shape
        out = torch.zeros(n, kv_heads, group_size, dim, dtype=dtype, device=k.device)
        out_KGTD = out.permute(1, 2, 0, 3)
        # The streaming heads' transfers are under way while the retrieval heads' ring turns.
        # Queries and results are copies that have no name, so that none outlives its use.
        transfers = []
        if len(heads.streaming) and (not self.exact or self.last):
            streaming_k, streaming_v = k[heads.streaming_index], v[heads.streaming_index]
            transfers = [
                self._start_streaming(layer, heads, group, streaming_k, streaming_v)
                for group in heads.groups
            ]
        if len(heads.retrieval):
            of = heads.retrieval_index
            out_KGTD[heads.retrieval] = self._ring(
                heads.retrieval_rows, query.heads(of), k[of], v[of], exact=False
            ).to(dtype)
        if len(heads.streaming) and self.exact:
            of = heads.streaming_index
            out_KGTD[heads.streaming] = self._ring(
                heads.streaming_rows, query.heads(of), k[of], v[of], exact=True
            ).to(dtype)
        if transfers:
            streaming = query.heads(heads.streaming_index)
            for group, transfer in zip(heads.groups, transfers, strict=True):
                found = self._streaming[group.index].finish(
                    layer, group, streaming.heads(group.part), transfer
                )
                if found is not None:
                    out_KGTD[heads.streaming[group.part]] = found.to(dtype)
        return out.flatten(1, 2)

    def _ring(self, rows: slice, query: Query, k: Tensor, v: Tensor, *, exact: bool) -> Tensor:
        pool = self.caches.scratch if exact else self.caches.pages
        assert pool is not None
        old, new = self._scratch_slots if exact else self._slots
        positions = self._positions(exact) if query.by_distance else []
        earlier = Earlier(pool.segments(rows, old), self._earlier[exact], positions)
        k, v = pool.stored(k, v)
        out = self._ring_attention(self.comm, self.chunk, query, k, v, earlier)
        pool.write(rows, new, k, v)
        return out

    def _positions(self, exact: bool) -> list[Tensor]:
        """Positions of the tokens of earlier chunks, for every rank's shard, in its order."""
        if exact not in self._earlier_positions:
            done = self.sequence.done if exact else self.sequence.chunks
            end, size = self.chunk.begin, self.comm.size
            self._earlier_positions[exact] = [
                positions_of(shard_positions(done, end, rank, size), self._device)
                for rank in range(size)
            ]
        return self._earlier_positions[exact]

    def _start_streaming(
        self, layer: int, heads: LayerHeads, group: StreamingGroup, k: Tensor, v: Tensor
    ) -> StreamingTransfers:
        stored: list[KVPiece] = []
        if self.exact:
            pool, table = self.caches.scratch, self.sequence.scratch
            assert pool is not None and table is not None
            first = heads.streaming_rows.start
            rows = slice(first + group.part.start, first + group.part.stop)
            done = 0
            for before in self.sequence.done:
                for shard in before.owned(self.comm.rank):
                    for a, b in pool.extents(table, done, done + len(shard)):
                        at = Interval(shard.begin, shard.begin + b - a)
                        shard = Interval(at.end, shard.end)
                        stored.append(KVPiece(at, pool.k[rows, a:b], pool.v[rows, a:b]))
                        done += b - a
        chunk = self._streaming[group.index]
        new = self.caches.streaming[group.index].stored(k[group.part], v[group.part])
        return chunk.start(layer, group, stored, *new)

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens of the chunk: int64 ``[tokens]``."""
        return positions_of(self.chunk.ranges(self.comm.rank), self._device)

    def finish(self) -> None:
        """Account for the chunk in the sequence; call once, after the forward pass."""
        sequence = self.sequence
        pages = self.caches.pages
        if pages.positions is not None:
            pages.place(self._slots[1], self.positions)
        sequence.grow([self.chunk.tokens(r) for r in range(self.comm.size)], self.comm.rank)
        sequence.done.append(self.chunk)
        sequence.chunks.append(self.chunk)
        if self.exact:
            assert sequence.scratch is not None
            sequence.scratch.tokens += self.tokens
        window = [heads.close() for heads in self._streaming]
        if not self.exact:
            sequence.window = None if self.last else window
        if self.last:
            sequence.done, sequence.shared = [], None
            if sequence.scratch is not None:
                assert self.caches.scratch is not None
                self.caches.scratch.release(sequence.scratch)
                sequence.scratch = None
