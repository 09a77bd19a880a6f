"""The streaming heads of one window in a prefill chunk: what they fetch, see and leave behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.attention.step import WindowPart
from razor_dist.attention.streaming import SpanKeys, SpanQueries, window_attention
from razor_dist.attention.window_plan import edge_sums
from razor_dist.cache.streaming import ChunkedWindow, SinksAndSums, StreamingCache
from razor_dist.heads.layout import StreamingGroup
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator, Pending
from razor_dist.parallel.halo import Arriving, KVPiece, assemble
from razor_dist.parallel.zigzag import Chunk, Interval


@dataclass
class StreamingTransfers:
    own: list[KVPiece]
    replicated: list[KVPiece]
    halo: Arriving
    sinks: Arriving
    sums: Pending | None
    handover: Arriving | None


class StreamingChunk:
    """One chunk as the streaming heads of one window see it.

    They attend to sinks, window and compensation token. With exact prefill they attend to the whole
    context elsewhere, and sinks, window and sums are worked out here when the prompt ends.
    """

    def __init__(
        self, comm: Communicator, cache: StreamingCache, part: WindowPart, chunk: Chunk
    ) -> None:
        self._comm, self._cache, self._part, self._chunk = comm, cache, part, chunk
        # Tokens that all ranks compute find their whole window in the slot.
        self._window = cache.chunked.get(part.slot.index) or ChunkedWindow()
        self._fixed = self._window.fixed or cache.sinks_and_sums(part.slot)

    def start(
        self, layer: int, group: StreamingGroup, stored: list[KVPiece], k: Tensor, v: Tensor
    ) -> StreamingTransfers:
        """Post the transfers of a layer's heads.

        ``stored`` is what this rank holds of the prompt in the scratch pool (exact prefill); ``k``
        and ``v`` are ``[K, T, D]`` of this rank's tokens of the chunk.
        """
        part, plan, cache = self._part, self._part.plan, self._cache
        assert plan is not None
        early, late = self._chunk.owned(self._comm.rank)
        split = len(early)
        pieces = [
            *stored,
            *self._window.pieces.get(layer, ()),
            KVPiece(early, k[:, :split], v[:, :split]),
            KVPiece(late, k[:, split:], v[:, split:]),
        ]
        halo = plan.halo.start(self._comm, pieces, "halo")
        sinks = plan.sinks.start(self._comm, pieces, "sinks")
        handover = None
        if plan.handover is not None:
            handover = plan.handover.start(self._comm, pieces, "halo", group.shares)
        replicated = []
        if len(part.replicated):
            both = cache.at(group.rows, part.replicated_at)
            replicated.append(KVPiece(part.replicated, *both))
        sums = None
        if plan.changes_sums and cache.policy.compensation:
            # What every rank holds is counted once.
            counted = pieces + (replicated if self._comm.rank == 0 else [])
            sums = self._comm.all_reduce(edge_sums(plan.edges, counted), "compensation")
        return StreamingTransfers(pieces, replicated, halo, sinks, sums, handover)

    def finish(
        self, layer: int, group: StreamingGroup, query: Query, transfers: StreamingTransfers
    ) -> Tensor | None:
        """Attention of a layer's queries, once its transfers have arrived; keeps what stays.

        ``group`` and ``transfers`` are those of `start`. The result is float32 ``[K, G, T, D]``;
        None if there is nothing to attend with.
        """
        plan, rows, fixed = self._part.plan, group.rows, self._fixed
        assert plan is not None
        sinks, new = transfers.own + transfers.sinks.wait(), plan.new_sinks
        if len(new):
            both = assemble(sinks, new)
            fixed.k[rows, new.begin : new.end], fixed.v[rows, new.begin : new.end] = both
        pieces = transfers.replicated + transfers.own + transfers.halo.wait()
        base = fixed.sums[:, rows]
        at_edges = base.unsqueeze(0).expand(len(plan.edges), *base.shape)
        if transfers.sums is not None:
            (steps,) = transfers.sums.wait()
            at_edges = at_edges.clone()
            at_edges[1:] += steps.cumsum(0)
        out = self._attend_spans(rows, fixed, query, pieces, at_edges)
        fixed.sums[:, rows] = at_edges[-1]
        if plan.window is not None:
            if transfers.handover is not None:
                assert group.kept is not None
                mine = group.shares[self._comm.rank]
                pieces = [p.heads(mine) for p in transfers.own] + transfers.handover.wait()
                of_group = slice(rows.start + mine.start, rows.start + mine.stop)
                self._cache.load(group.kept, self._part.slot, fixed.heads(of_group))
                rows = group.kept
            self._store(rows, pieces, plan.keep)
            self._window.pieces.pop(layer, None)
        else:
            kept = self._part.kept
            parts = [p.part(kept) for p in transfers.own if len(p.at & kept)]
            # Clones: views would keep the whole chunk's keys and values alive.
            own = [KVPiece(p.at, p.k.clone(), p.v.clone()) for p in parts]
            self._window.pieces[layer] = own
        return out

    def _store(self, rows: slice, pieces: list[KVPiece], keep: int) -> None:
        """Store what the cache keeps, of the heads that are ``rows`` there."""
        cache, part = self._cache, self._part
        for positions, at in ((part.new, part.new_at), (part.tail, part.tail_at)):
            if len(positions):
                cache.write(rows, at, *assemble(pieces, positions))
        dropped = keep - cache.policy.sinks
        if dropped > 0 and cache.policy.compensation:
            cache.refresh(rows, part.slot, dropped)

    def _attend_spans(
        self,
        rows: slice,
        fixed: SinksAndSums,
        query: Query,
        pieces: list[KVPiece],
        at_edges: Tensor,
    ) -> Tensor | None:
        plan, policy = self._part.plan, self._cache.policy
        assert plan is not None
        sink_k, sink_v = fixed.k[rows], fixed.v[rows]
        outs = []
        for span in plan.spans:
            first = plan.edges[span.edge]
            k, v = assemble(pieces, Interval(first, span.at.end))
            keys = SpanKeys(k, v, first, sink_k, sink_v, at_edges[span.edge])
            own = query.tokens(slice(span.offset, span.offset + len(span.at)))
            queries = SpanQueries(own, span.at.begin)
            outs.append(window_attention(queries, span, keys, policy))
        return torch.cat(outs, dim=2) if outs else None
