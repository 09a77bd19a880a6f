"""Attention of one prefill chunk on one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.attention.chosen import HeldKeys, attend_chunk
from razor_dist.attention.step import ChunkTokens
from razor_dist.attention.streaming_prefill import StreamingChunk, StreamingTransfers
from razor_dist.cache.caches import Caches
from razor_dist.heads.layout import LayerHeads, StreamingGroup
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import Earlier
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.ring import RingAttention, ring_attention


class PrefillContext:
    """`AttentionContext` of one chunk.

    Retrieval heads attend over the whole context by ring attention and leave their keys and
    values in this rank's pages. Streaming heads attend to sinks, window and compensation token;
    with exact prefill they are treated like retrieval heads and compressed when the prompt ends.
    """

    def __init__(
        self,
        comm: Communicator,
        caches: Caches,
        tokens: ChunkTokens,
        ring: RingAttention = ring_attention,
    ) -> None:
        self.comm, self.caches, self._chunk = comm, caches, tokens
        self._ring_attention, self.tokens = ring, len(tokens.positions)
        self._streaming = [
            StreamingChunk(comm, cache, part, tokens.chunk)
            for cache, part in zip(caches.streaming, tokens.windows, strict=True)
        ]

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        heads, exact = self.caches.layout.layers[layer], self._chunk.exact
        query = self.caches.placed(query, self._chunk.chunk.end)
        dtype = query.q.dtype
        kv_heads, group_size, n, dim = query.q.shape
        out = torch.zeros(n, kv_heads, group_size, dim, dtype=dtype, device=k.device)
        out_KGTD = out.permute(1, 2, 0, 3)
        # The streaming heads' transfers are under way while the retrieval heads' ring turns.
        # Copies of queries and results have no name, so that none outlives its use.
        transfers = []
        if len(heads.streaming) and (not exact or self._chunk.last):
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
        if len(heads.streaming) and exact:
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
        part = self._chunk.scratch if exact else self._chunk.pages
        assert pool is not None and part is not None
        earlier = Earlier(pool.segments(rows, part.seen), part.lengths, part.positions)
        k, v = pool.stored(k, v)
        reader, choice = self._chunk.reader, self.caches.choice
        if reader is not None and choice is not None and not exact:
            pool.write(rows, part.extents, k, v)
            held = HeldKeys(pool, rows, reader)
            return attend_chunk(self.comm, choice, self._chunk.chunk, query, held)
        out = self._ring_attention(self.comm, self._chunk.chunk, query, k, v, earlier)
        pool.write(rows, part.extents, k, v)
        return out

    def _start_streaming(
        self, layer: int, heads: LayerHeads, group: StreamingGroup, k: Tensor, v: Tensor
    ) -> StreamingTransfers:
        stored: list[KVPiece] = []
        if self._chunk.stored:
            pool = self.caches.scratch
            assert pool is not None
            first = heads.streaming_rows.start
            rows = slice(first + group.part.start, first + group.part.stop)
            stored = [KVPiece(at, pool.k[rows, a], pool.v[rows, a]) for at, a in self._chunk.stored]
        chunk = self._streaming[group.index]
        new = self.caches.streaming[group.index].stored(k[group.part], v[group.part])
        return chunk.start(layer, group, stored, *new)
