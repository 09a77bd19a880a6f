"""Attention of one prefill wave on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.cache.local import LocalCache
from razor_dist.cache.pages import PagePool, PageTable
from razor_dist.cache.sequence import Sequence
from razor_dist.heads.layout import HeadLayout, LayerHeads
from razor_dist.parallel.comm import Communicator, Pending
from razor_dist.parallel.halo import Arriving, Piece, assemble
from razor_dist.parallel.ring import Earlier, RingAttention, ring_attention
from razor_dist.parallel.window import (
    WindowPlan,
    edge_sums,
    plan_compression,
    plan_window,
    window_attention,
)
from razor_dist.parallel.zigzag import Interval, Wave


@dataclass
class Caches:
    """The stores of one rank.

    Attributes
    ----------
    layout : HeadLayout
    pages : PagePool
        Retrieval heads.
    local : LocalCache
        Local heads.
    scratch : PagePool or None
        Local heads' full keys and values while a prompt is prefilled exactly.
    """

    layout: HeadLayout
    pages: PagePool
    local: LocalCache
    scratch: PagePool | None

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values in the dtype in which they are kept and travel.

        Attention sees no others, not even of the tokens at hand: what it computes then does not
        depend on which keys have been through a cache or a link.
        """
        dtype = self.pages.k.dtype
        return k.to(dtype), v.to(dtype)


@dataclass
class _LocalTransfers:
    """One layer's local-head transfers in flight."""

    own: list[Piece]
    replicated: list[Piece]
    halo: Arriving
    sinks: Arriving
    sums: Pending | None


class PrefillContext:
    """`AttentionContext` of one wave.

    Retrieval heads attend over the whole context by ring attention and leave their keys and
    values in this rank's pages. Local heads attend to sinks, window and compensation token; with
    exact prefill they are treated like retrieval heads and compressed when the prompt ends.

    Parameters
    ----------
    comm : Communicator
    caches : Caches
    sequence : Sequence
    wave : Wave
        Starts at ``sequence.length``.
    last : bool
        Whether the prompt ends with this wave.
    ring : RingAttention
        `ring_attention`, or another implementation of it.
    """

    def __init__(
        self,
        comm: Communicator,
        caches: Caches,
        sequence: Sequence,
        wave: Wave,
        *,
        last: bool,
        ring: RingAttention = ring_attention,
    ) -> None:
        assert wave.begin == sequence.length
        self.comm, self.caches, self.sequence = comm, caches, sequence
        self.wave, self.last, self._ring_attention = wave, last, ring
        self.owned = wave.owned(comm.rank)
        self.tokens = wave.tokens(comm.rank)
        self.exact = sequence.scratch is not None
        self._slots = self._extents(caches.pages, sequence.table)
        if self.exact:
            assert caches.scratch is not None and sequence.scratch is not None
            self._scratch_slots = self._extents(caches.scratch, sequence.scratch)
        # What every rank holds of earlier waves: of all tokens, and of this prompt's alone.
        prompt = [sum(w.tokens(r) for w in sequence.done) for r in range(comm.size)]
        self._earlier = {False: sequence.shard_tokens, True: prompt}
        # A prompt that continues a finished one finds the window replicated in the local cache.
        prompt_begin = sequence.done[0].begin if sequence.done else wave.begin
        base = max(caches.local.policy.sinks, sequence.local.start)
        self._replicated = Interval(base, max(base, 0 if self.exact else prompt_begin))
        self._plan = self._plan_local()
        self._next_window: list[list[Piece]] = []
        if self._plan is not None:
            self._new_sinks_at = caches.local.indices(
                sequence.local, self._plan.new_sinks.begin, self._plan.new_sinks.end
            )
            if self._plan.window is not None:
                self._window_at = caches.local.indices(
                    sequence.local, self._plan.window.begin, self._plan.window.end
                )

    def _extents(self, pool: PagePool, table: PageTable) -> tuple[list, list]:
        """Slots of the tokens already stored, and of this wave's."""
        old = table.tokens
        return pool.extents(table, 0, old), pool.extents(table, old, old + self.tokens)

    def _plan_local(self) -> WindowPlan | None:
        policy, sequence = self.caches.local.policy, self.sequence
        if self.exact:
            if not self.last:
                return None
            return plan_compression(policy, [*sequence.done, self.wave], self.comm.rank)
        base = max(policy.sinks, sequence.local.start)
        retained = Interval(base, self.wave.begin)
        held = [
            (chunk & retained, rank)
            for wave in sequence.done
            for rank in range(self.comm.size)
            for chunk in wave.owned(rank)
            if len(chunk & retained)
        ]
        return plan_window(policy, self.wave, self.comm.rank, base=base, held=held, last=self.last)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `razor_dist.attention.AttentionContext`."""
        heads = self.caches.layout.layers[layer]
        k, v = self.caches.stored(k, v)
        kv_heads, n = k.shape[0], self.tokens
        dtype, width = q.dtype, q.shape[1]
        # A rank without tokens of this wave runs one dummy token: drop it here.
        q, k, v = q[:, :n].unflatten(0, (kv_heads, -1)), k[:, :n], v[:, :n]
        out = torch.zeros(width, *q.shape[:2], q.shape[3], dtype=dtype, device=q.device)
        out_KGTD = out[:n].permute(1, 2, 0, 3)

        transfers = None
        if heads.num_local and self._plan is not None:
            transfers = self._start_local(
                layer, heads, _pick(k, heads.local), _pick(v, heads.local)
            )
        if heads.num_retrieval:
            out_KGTD[heads.retrieval] = self._ring(
                heads.retrieval, heads.retrieval_rows, q, k, v, scale, exact=False
            ).to(dtype)
        if heads.num_local:
            if self.exact:
                out_KGTD[heads.local] = self._ring(
                    heads.local, heads.local_rows, q, k, v, scale, exact=True
                ).to(dtype)
            if transfers is not None:
                local = self._finish_local(heads, _pick(q, heads.local), transfers, scale)
                if local is not None:
                    out_KGTD[heads.local] = local.to(dtype)
        elif not self.exact:
            self._next_window.append([])
        return out.flatten(1, 2)

    def _ring(
        self,
        index: Tensor,
        rows: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        *,
        exact: bool,
    ) -> Tensor:
        pool = self.caches.scratch if exact else self.caches.pages
        assert pool is not None
        old, new = self._scratch_slots if exact else self._slots
        k, v = _pick(k, index), _pick(v, index)
        earlier = Earlier(pool.segments(rows, old), self._earlier[exact])
        out = self._ring_attention(self.comm, self.wave, _pick(q, index), k, v, earlier, scale)
        pool.write(rows, new, k, v)
        return out

    def _own_pieces(self, layer: int, heads: LayerHeads, k: Tensor, v: Tensor) -> list[Piece]:
        """What this rank alone holds of the layer's local heads, this wave's tokens last."""
        pieces = []
        if self.exact:
            pool, table = self.caches.scratch, self.sequence.scratch
            assert pool is not None and table is not None
            done = 0
            for wave in self.sequence.done:
                for chunk in wave.owned(self.comm.rank):
                    for a, b in pool.extents(table, done, done + len(chunk)):
                        at = Interval(chunk.begin, chunk.begin + b - a)
                        chunk = Interval(at.end, chunk.end)
                        rows = heads.local_rows
                        pieces.append(Piece(at, pool.k[rows, a:b], pool.v[rows, a:b]))
                        done += b - a
        elif self.sequence.window is not None:
            pieces += self.sequence.window[layer]
        split = len(self.owned[0])
        pieces.append(Piece(self.owned[0], k[:, :split], v[:, :split]))
        pieces.append(Piece(self.owned[1], k[:, split:], v[:, split:]))
        return pieces

    def _start_local(self, layer: int, heads: LayerHeads, k: Tensor, v: Tensor) -> _LocalTransfers:
        plan, local = self._plan, self.caches.local
        assert plan is not None
        pieces = self._own_pieces(layer, heads, k, v)
        halo = plan.halo.start(self.comm, pieces, "halo")
        sinks = plan.sinks.start(self.comm, pieces, "sinks")
        replicated = []
        if len(self._replicated):
            both = local.read(
                heads.local_rows, self.sequence.local, self._replicated.begin, self._replicated.end
            )
            replicated.append(Piece(self._replicated, *both))
        sums = None
        if plan.changes_sums:
            # What every rank holds is counted once.
            counted = pieces + (replicated if self.comm.rank == 0 else [])
            sums = self.comm.all_reduce(edge_sums(plan.edges, counted), "compensation")
        return _LocalTransfers(pieces, replicated, halo, sinks, sums)

    def _finish_local(
        self, heads: LayerHeads, q: Tensor, transfers: _LocalTransfers, scale: float
    ) -> Tensor | None:
        plan, local, slot = self._plan, self.caches.local, self.sequence.local
        assert plan is not None
        rows = heads.local_rows
        sinks = transfers.own + transfers.sinks.wait()
        if len(plan.new_sinks):
            local.write(rows, slot, self._new_sinks_at, *assemble(sinks, plan.new_sinks))
        pieces = transfers.replicated + transfers.own + transfers.halo.wait()
        base = local.sums[:, rows, slot.index]
        at_edges = base.unsqueeze(0).expand(len(plan.edges), *base.shape)
        if transfers.sums is not None:
            (steps,) = transfers.sums.wait()
            at_edges = at_edges.clone()
            at_edges[1:] += steps.cumsum(0)
        out = self._attend_spans(rows, q, pieces, at_edges, scale)
        local.sums[:, rows, slot.index] = at_edges[-1]
        if plan.window is not None:
            if len(plan.window):
                local.write(rows, slot, self._window_at, *assemble(pieces, plan.window))
            dropped = plan.keep - local.policy.sinks
            if dropped > 0:
                local.refresh(rows, slot, dropped)
        else:
            kept = Interval(plan.keep, self.wave.end)
            parts = [p.part(kept) for p in transfers.own if len(p.at & kept)]
            # Clones: a view would keep the whole wave's keys and values alive.
            self._next_window.append([Piece(p.at, p.k.clone(), p.v.clone()) for p in parts])
        return out

    def _attend_spans(
        self, rows: slice, q: Tensor, pieces: list[Piece], at_edges: Tensor, scale: float
    ) -> Tensor | None:
        plan, local, slot = self._plan, self.caches.local, self.sequence.local
        assert plan is not None
        policy = local.policy
        sink_k = local.k[rows, slot.index, 1 : 1 + policy.sinks]
        sink_v = local.v[rows, slot.index, 1 : 1 + policy.sinks]
        outs = []
        for span in plan.spans:
            first = plan.edges[span.edge]
            k, v = assemble(pieces, Interval(first, span.at.end))
            outs.append(
                window_attention(
                    q[:, :, span.offset : span.offset + len(span.at)],
                    span,
                    k,
                    v,
                    first,
                    sink_k,
                    sink_v,
                    at_edges[span.edge],
                    policy,
                    scale,
                )
            )
        return torch.cat(outs, dim=2) if outs else None

    def finish(self) -> None:
        """Account for the wave in the sequence; call once, after the forward pass."""
        sequence = self.sequence
        sequence.table.tokens += self.tokens
        for rank in range(self.comm.size):
            sequence.shard_tokens[rank] += self.wave.tokens(rank)
        sequence.length = self.wave.end
        sequence.done.append(self.wave)
        if self.exact:
            assert sequence.scratch is not None
            sequence.scratch.tokens += self.tokens
        if self._plan is not None:
            sequence.local.start = self._plan.keep
            sequence.window = None if self.last else self._next_window
        if self.last:
            sequence.done = []
            if sequence.scratch is not None:
                assert self.caches.scratch is not None
                self.caches.scratch.release(sequence.scratch)
                sequence.scratch = None


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """The heads ``index`` of ``x`` along its first dimension, without a copy if that is all."""
    return x if index.numel() == x.shape[0] else x[index]
