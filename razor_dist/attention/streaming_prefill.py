"""The streaming heads of one window in a prefill chunk: what they fetch, see and leave behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.attention.streaming import SpanKeys, SpanQueries, window_attention
from razor_dist.attention.window_plan import WindowPlan, edge_sums, plan_compression, plan_window
from razor_dist.cache.sequence import Sequence
from razor_dist.cache.streaming import StreamingCache, StreamingSlot
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator, Pending
from razor_dist.parallel.halo import Arriving, KVPiece, assemble
from razor_dist.parallel.zigzag import Chunk, Interval, holdings


@dataclass
class StreamingTransfers:
    own: list[KVPiece]
    replicated: list[KVPiece]
    halo: Arriving
    sinks: Arriving
    sums: Pending | None


class StreamingChunk:
    """One chunk as the streaming heads of one window see it.

    They attend to sinks, window and compensation token. With ``exact`` prefill they see the whole
    context elsewhere, and only what they keep of it is worked out here, when the prompt ends.

    ``slot`` is the sequence's in ``cache``; ``earlier`` has, by layer, what this rank holds of the
    window since the chunk before; ``last`` says that the prompt ends with this chunk.
    """

    def __init__(
        self,
        comm: Communicator,
        cache: StreamingCache,
        slot: StreamingSlot,
        sequence: Sequence,
        earlier: dict[int, list[KVPiece]],
        chunk: Chunk,
        *,
        exact: bool,
        last: bool,
    ) -> None:
        self._comm, self._cache, self._slot = comm, cache, slot
        self._earlier, self._chunk, self._last = earlier, chunk, last
        # A prompt that continues a finished one finds the window replicated in the streaming cache.
        prompt_begin = sequence.done[0].begin if sequence.done else chunk.begin
        sinks = cache.policy.sinks
        base = max(sinks, slot.start)
        self.plan = self._make_plan(sequence, exact, base)
        self._next: dict[int, list[KVPiece]] = {}
        # Of the cache: what is seen, and what is to leave the ring for the tail.
        first = base
        if self.plan is not None and self.plan.window is not None:
            in_ring = max(sinks, slot.ring_begin)
            first = min(base, max(in_ring, self.plan.window.begin))
        self._replicated = Interval(first, max(first, 0 if exact else prompt_begin))
        if self.plan is not None:
            new_sinks, window = self.plan.new_sinks, self.plan.window
            self._new_sinks_at = cache.indices(slot, new_sinks.begin, new_sinks.end)
            if window is not None:
                # The ring has what was replicated already.
                begin = max(self.plan.keep, self._replicated.end)
                self._new = Interval(begin, max(begin, window.end))
                self._new_at = cache.indices(slot, self._new.begin, self._new.end)
                begin = max(in_ring, window.begin)
                self._tail = Interval(begin, max(begin, self.plan.keep))

    def _make_plan(self, sequence: Sequence, exact: bool, base: int) -> WindowPlan | None:
        policy, comm, chunk = self._cache.policy, self._comm, self._chunk
        tail = self._slot.tail_capacity
        if exact:
            if not self._last:
                return None
            return plan_compression(policy, [*sequence.done, chunk], comm.rank, tail)
        held = holdings(sequence.done, Interval(base - tail, chunk.begin))
        return plan_window(
            policy, chunk, comm.rank, base=base, held=held, last=self._last, tail=tail
        )

    def start(
        self, layer: int, rows: slice, stored: list[KVPiece], k: Tensor, v: Tensor
    ) -> StreamingTransfers:
        """Post the transfers of a layer, whose heads are ``rows`` of the cache.

        ``stored`` is what this rank holds of the prompt in the scratch pool (exact prefill); ``k``
        and ``v`` are ``[K, T, D]`` of this rank's tokens of the chunk.
        """
        plan, cache = self.plan, self._cache
        assert plan is not None
        early, late = self._chunk.owned(self._comm.rank)
        split = len(early)
        pieces = [
            *stored,
            *self._earlier.get(layer, ()),
            KVPiece(early, k[:, :split], v[:, :split]),
            KVPiece(late, k[:, split:], v[:, split:]),
        ]
        halo = plan.halo.start(self._comm, pieces, "halo")
        sinks = plan.sinks.start(self._comm, pieces, "sinks")
        replicated = []
        if len(self._replicated):
            both = cache.read(rows, self._slot, self._replicated.begin, self._replicated.end)
            replicated.append(KVPiece(self._replicated, *both))
        sums = None
        if plan.changes_sums and cache.policy.compensation:
            # What every rank holds is counted once.
            counted = pieces + (replicated if self._comm.rank == 0 else [])
            sums = self._comm.all_reduce(edge_sums(plan.edges, counted), "compensation")
        return StreamingTransfers(pieces, replicated, halo, sinks, sums)

    def finish(
        self, layer: int, rows: slice, query: Query, transfers: StreamingTransfers
    ) -> Tensor | None:
        """Attention of a layer's queries, once its transfers have arrived; keeps what stays.

        ``rows`` and ``transfers`` are those of `start`. The result is float32 ``[K, G, T, D]``;
        None if there is nothing to attend with.
        """
        plan, cache, slot = self.plan, self._cache, self._slot
        assert plan is not None
        sinks = transfers.own + transfers.sinks.wait()
        if len(plan.new_sinks):
            cache.write(rows, slot, self._new_sinks_at, *assemble(sinks, plan.new_sinks))
        pieces = transfers.replicated + transfers.own + transfers.halo.wait()
        base = cache.sums[:, rows, slot.index]
        at_edges = base.unsqueeze(0).expand(len(plan.edges), *base.shape)
        if transfers.sums is not None:
            (steps,) = transfers.sums.wait()
            at_edges = at_edges.clone()
            at_edges[1:] += steps.cumsum(0)
        out = self._attend_spans(rows, query, pieces, at_edges)
        cache.sums[:, rows, slot.index] = at_edges[-1]
        if plan.window is not None:
            if len(self._new):
                cache.write(rows, slot, self._new_at, *assemble(pieces, self._new))
            if len(self._tail):
                tail = assemble(pieces, self._tail)
                cache.put_tail(rows, slot, self._tail.begin, self._tail.end, *tail)
            dropped = plan.keep - cache.policy.sinks
            if dropped > 0 and cache.policy.compensation:
                cache.refresh(rows, slot, dropped)
        else:
            kept = Interval(plan.keep - slot.tail_capacity, self._chunk.end)
            parts = [p.part(kept) for p in transfers.own if len(p.at & kept)]
            # Clones: a view would keep the whole chunk's keys and values alive.
            self._next[layer] = [KVPiece(p.at, p.k.clone(), p.v.clone()) for p in parts]
        return out

    def _attend_spans(
        self, rows: slice, query: Query, pieces: list[KVPiece], at_edges: Tensor
    ) -> Tensor | None:
        plan, cache, slot = self.plan, self._cache, self._slot
        assert plan is not None
        sink_k, sink_v = cache.sinks(rows, slot)
        outs = []
        for span in plan.spans:
            first = plan.edges[span.edge]
            k, v = assemble(pieces, Interval(first, span.at.end))
            keys = SpanKeys(k, v, first, sink_k, sink_v, at_edges[span.edge])
            own = query.tokens(slice(span.offset, span.offset + len(span.at)))
            queries = SpanQueries(own, span.at.begin)
            outs.append(window_attention(queries, span, keys, cache.policy))
        return torch.cat(outs, dim=2) if outs else None

    def close(self) -> dict[int, list[KVPiece]]:
        """Account for the chunk, once; return ``earlier`` for the next one."""
        if self.plan is not None and self.plan.window is not None:
            self._cache.advance(self._slot, self.plan.keep)
        elif self.plan is not None:
            self._slot.start = self.plan.keep
        return self._next
