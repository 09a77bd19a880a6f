"""Attention of one decode step on one rank: one new token for each of several sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from razor_dist.cache.sequence import Sequence, owner_of
from razor_dist.heads.layout import LayerHeads
from razor_dist.kernels import Partial, attend, empty_partial, merge, merge_stacked
from razor_dist.parallel.comm import Communicator
from razor_dist.prefill import Caches


class DecodeContext:
    """`AttentionContext` of one decode step.

    Local heads are computed on every rank from the replicated cache, without traffic. Retrieval
    heads attend to each rank's shard; one all-gather per layer carries ``out`` and ``lse``, packed
    together. A layer without retrieval heads makes no collective at all.

    Parameters
    ----------
    comm : Communicator
    caches : Caches
    sequences : sequence of Sequence
        One per token of the step; the new token's position is the sequence's length.
    """

    def __init__(self, comm: Communicator, caches: Caches, sequences: Seq[Sequence]) -> None:
        self.comm, self.caches, self.sequences = comm, caches, sequences
        policy, local = caches.local.policy, caches.local
        for sequence in sequences:
            start = max(policy.sinks, policy.start(sequence.length))
            if start > sequence.local.start:
                # For all layers at once, before the new token takes the place of a dropped one.
                local.drop(local.rows, sequence.local, sequence.local.start, start)
                sequence.local.start = start
        self._biases = [local.visibility(s.local, s.length) for s in sequences]
        self._at = [local.indices(s.local, s.length, s.length + 1) for s in sequences]
        self._own = [owner_of(s.length, comm.size) == comm.rank for s in sequences]
        self._new, self._seen = [], []
        for sequence, own in zip(sequences, self._own, strict=True):
            table = sequence.table
            seen = table.tokens + own
            self._new.append(caches.pages.extents(table, table.tokens, seen))
            self._seen.append(caches.pages.extents(table, 0, seen))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `razor_dist.attention.AttentionContext`."""
        heads = self.caches.layout.layers[layer]
        q = q.unflatten(0, (k.shape[0], -1))
        if heads.num_local == 0:
            out_KGTD = self._retrieval(heads, q, k, v, scale)
        elif heads.num_retrieval == 0:
            out_KGTD = self._local(heads, q, k, v, scale)
        else:
            parts = [
                compute(heads, q[index], k[index], v[index], scale)
                for index, compute in (
                    (heads.retrieval, self._retrieval),
                    (heads.local, self._local),
                )
            ]
            out_KGTD = torch.cat(parts)[heads.inverse]
        return out_KGTD.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)

    def _local(self, heads: LayerHeads, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        local, rows = self.caches.local, heads.local_rows
        outs = []
        for t, sequence in enumerate(self.sequences):
            slot, bias = sequence.local, self._biases[t]
            local.write(rows, slot, self._at[t], k[:, t : t + 1], v[:, t : t + 1])
            seen = slice(0, bias.shape[0])
            outs.append(
                attend(
                    q[:, :, t : t + 1],
                    local.k[rows, slot.index, seen],
                    local.v[rows, slot.index, seen],
                    scale=scale,
                    bias=bias,
                ).out.float()
            )
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _retrieval(
        self, heads: LayerHeads, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        pages, rows = self.caches.pages, heads.retrieval_rows
        partials: list[Partial] = []
        for t in range(len(self.sequences)):
            if self._own[t]:
                pages.write(rows, self._new[t], k[:, t : t + 1], v[:, t : t + 1])
            q_t = q[:, :, t : t + 1]
            parts = [
                attend(q_t, *segment, scale=scale)
                for segment in pages.segments(rows, self._seen[t])
            ]
            partials.append(merge(parts) if parts else empty_partial(q_t))
        out = torch.cat([p.out for p in partials], dim=2)
        if self.comm.size == 1:
            return out
        lse = torch.cat([p.lse for p in partials], dim=2)
        packed = torch.cat([out, lse.unsqueeze(-1)], dim=-1)
        gathered = self.comm.all_gather(packed, "merge")
        return merge_stacked(gathered[..., :-1], gathered[..., -1]).out

    def finish(self) -> None:
        """Account for the step in the sequences; call once, after the forward pass."""
        for t, sequence in enumerate(self.sequences):
            sequence.table.tokens += self._own[t]
            sequence.shard_tokens[owner_of(sequence.length, self.comm.size)] += 1
            sequence.length += 1
