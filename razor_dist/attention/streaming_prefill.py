"""The streaming heads of one window in a prefill chunk: what they fetch, see and leave behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.attention.streaming import SpanKeys, SpanQueries, window_attention
from razor_dist.attention.window_plan import WindowPlan, edge_sums, plan_compression, plan_window
from razor_dist.cache.sequence import Sequence, SharedWindow
from razor_dist.cache.streaming import SinksAndSums, StreamingCache, StreamingSlot
from razor_dist.heads.layout import StreamingGroup
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
    handover: Arriving | None


class StreamingChunk:
    """One chunk as the streaming heads of one window see it.

    They attend to sinks, window and compensation token. With ``exact`` prefill they see the whole
    context elsewhere, and only what they keep of it is worked out here, when the prompt ends.

    ``slot`` is the sequence's in ``cache``; ``earlier`` has, by layer, what this rank holds of the
    window since the chunk before; ``last`` says that the prompt ends with this chunk. With
    ``shared``, the ranks keep some of the heads each, and the chunk has all of them.
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
        shared: SharedWindow | None = None,
    ) -> None:
        self._comm, self._cache, self._slot, self._shared = comm, cache, slot, shared
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
        end = 0 if exact or shared is not None else prompt_begin
        self._replicated = Interval(first, max(first, end))
        if self.plan is not None:
            window = self.plan.window
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
            done, shared = [*sequence.done, chunk], self._shared is not None
            return plan_compression(policy, done, comm.rank, tail, shared=shared)
        seen = Interval(base - tail, chunk.begin)
        held = holdings(sequence.done, seen)
        if self._shared is not None:
            before = [(at & seen, rank) for at, rank in self._shared.held]
            held += [(at, rank) for at, rank in before if len(at)]
        return plan_window(
            policy,
            chunk,
            comm.rank,
            base=base,
            held=held,
            last=self._last,
            tail=tail,
            shared=self._shared is not None,
        )

    @property
    def _fixed(self) -> SinksAndSums:
        if self._shared is not None:
            return self._shared.fixed
        return self._cache.sinks_and_sums(self._slot)

    def start(
        self, layer: int, group: StreamingGroup, stored: list[KVPiece], k: Tensor, v: Tensor
    ) -> StreamingTransfers:
        """Post the transfers of a layer's heads.

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
        handover = None
        if plan.handover is not None:
            handover = plan.handover.start(self._comm, pieces, "halo", group.shares)
        replicated = []
        if len(self._replicated):
            both = cache.read(group.rows, self._slot, self._replicated.begin, self._replicated.end)
            replicated.append(KVPiece(self._replicated, *both))
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
        plan, slot, rows = self.plan, self._slot, group.rows
        assert plan is not None
        fixed = self._fixed
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
                self._cache.load(group.kept, slot, fixed.heads(of_group))
                rows = group.kept
            self._store(rows, pieces, plan.keep)
        else:
            kept = Interval(plan.keep - slot.tail_capacity, self._chunk.end)
            parts = [p.part(kept) for p in transfers.own if len(p.at & kept)]
            # Clones: a view would keep the whole chunk's keys and values alive.
            self._next[layer] = [KVPiece(p.at, p.k.clone(), p.v.clone()) for p in parts]
        return out

    def _store(self, rows: slice, pieces: list[KVPiece], keep: int) -> None:
        """Store what the cache keeps, of the heads that are ``rows`` there."""
        cache, slot, tail = self._cache, self._slot, self._tail
        if len(self._new):
            cache.write(rows, slot, self._new_at, *assemble(pieces, self._new))
        if len(tail):
            cache.put_tail(rows, slot, tail.begin, tail.end, *assemble(pieces, tail))
        dropped = keep - cache.policy.sinks
        if dropped > 0 and cache.policy.compensation:
            cache.refresh(rows, slot, dropped)

    def _attend_spans(
        self,
        rows: slice,
        fixed: SinksAndSums,
        query: Query,
        pieces: list[KVPiece],
        at_edges: Tensor,
    ) -> Tensor | None:
        plan, policy = self.plan, self._cache.policy
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

    def close(self) -> dict[int, list[KVPiece]]:
        """Account for the chunk, once; return ``earlier`` for the next one."""
        if self.plan is not None and self.plan.window is not None:
            self._cache.advance(self._slot, self.plan.keep)
        elif self.plan is not None:
            self._slot.start = self.plan.keep
        return self._next
