"""Attention of one decode step on one rank: one new token for each of several sequences.

What a step needs is kept in two parts. `Reach` says which memory it touches: plain numbers and
slices, fixed once a CUDA graph is captured. `StepInputs` holds everything else as one tensor, so
that a graph is told of the next step by writing to that tensor (`razor_dist.engine.graph`). The
attention itself is the same code for both, whether it is captured or not.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.cache.local import LocalSlot
from razor_dist.cache.sequence import Sequence, owner_of
from razor_dist.heads.layout import LayerHeads
from razor_dist.kernels import Partial, attend, empty_partial, merge, merge_stacked
from razor_dist.parallel.comm import Communicator
from razor_dist.prefill import Caches

# Hides a key as -inf would, but finite: where the keys of a segment are all hidden, the segment's
# lse is that low, and counts for nothing when it is merged.
_HIDDEN = -1e30


@dataclass(frozen=True)
class Reach:
    """The memory that a step touches for one sequence on this rank.

    Attributes
    ----------
    slot : LocalSlot
    width : int
        How much of the local slot is read.
    segments : tuple of (int, int)
        Extents of the page pool that are read.
    exact : bool
        Whether ``segments`` end with the newest token. Otherwise they reach further, and a bias
        hides what no token has filled yet.
    writes : bool
        Whether this rank writes the new token's retrieval keys and values.
    """

    slot: LocalSlot
    width: int
    segments: tuple[tuple[int, int], ...]
    exact: bool
    writes: bool


def exact_reach(comm: Communicator, caches: Caches, sequence: Sequence) -> Reach:
    """What the next step needs, and no more."""
    table = sequence.table
    own = owner_of(sequence.length, comm.size) == comm.rank
    return Reach(
        slot=sequence.local,
        width=caches.local.width(sequence.local, sequence.length + 1),
        segments=tuple(caches.pages.extents(table, 0, table.tokens + own)),
        exact=True,
        writes=own,
    )


def padded_reach(caches: Caches, sequence: Sequence, width: int, stored: int) -> Reach:
    """What every step needs until the sequence outgrows ``width`` and ``stored``.

    Parameters
    ----------
    caches : Caches
    sequence : Sequence
    width : int
        Of the local slot.
    stored : int
        Tokens of the shard. The sequence's own pages bound it too: what lies beyond them is
        another's, and may change and hold anything.
    """
    table, pages = sequence.table, caches.pages
    within = min(stored, len(table.pages) * pages.page_size)
    return Reach(
        slot=sequence.local,
        width=width,
        segments=tuple(pages.extents(table, 0, within)),
        exact=False,
        writes=True,
    )


class StepInputs(NamedTuple):
    """What changes from one step to the next; each int64 ``[n]``, a number per sequence.

    Attributes
    ----------
    token, position : Tensor
        The new token's id and place.
    start : Tensor
        ``s`` of its query (`razor_dist.policy`).
    at : Tensor
        Slot of the page pool for its retrieval keys and values; the pool's spare slot on ranks
        that do not keep them.
    stored : Tensor
        Tokens of this rank's shard, the new one included where it is kept.
    """

    token: Tensor
    position: Tensor
    start: Tensor
    at: Tensor
    stored: Tensor


def step_inputs(
    comm: Communicator, caches: Caches, sequences: Seq[Sequence], tokens: Seq[int]
) -> Tensor:
    """The fields of `StepInputs` as rows of one tensor ``[5, n]``, in the host's memory."""
    columns = []
    for sequence, token in zip(sequences, tokens, strict=True):
        position, table = sequence.length, sequence.table
        own = owner_of(position, comm.size) == comm.rank
        at = caches.pages.slot(table, table.tokens) if own else caches.pages.spare
        start = caches.local.policy.start(position)
        columns.append((token, position, start, at, table.tokens + own))
    return torch.tensor(columns, dtype=torch.int64).T.contiguous()


def drop_outdated(caches: Caches, sequences: Seq[Sequence]) -> None:
    """Move what the next query no longer sees into the compensation sums.

    For all layers at once, and before the new token takes the place of a dropped one. It happens
    once in ``block`` steps, so it is never part of a CUDA graph.
    """
    policy, local = caches.local.policy, caches.local
    for sequence in sequences:
        start = max(policy.sinks, policy.start(sequence.length))
        if start > sequence.local.start:
            local.drop(local.rows, sequence.local, sequence.local.start, start)
            sequence.local.start = start


def account(comm: Communicator, sequences: Seq[Sequence]) -> None:
    """Count the step's tokens in the sequences; once, after the forward pass."""
    for sequence in sequences:
        owner = owner_of(sequence.length, comm.size)
        sequence.table.tokens += owner == comm.rank
        sequence.shard_tokens[owner] += 1
        sequence.length += 1


class DecodeContext:
    """`AttentionContext` of one decode step.

    Local heads are computed on every rank from the replicated cache, without traffic. Retrieval
    heads attend to each rank's shard; one all-gather per layer carries ``out`` and ``lse``, packed
    together. A layer without retrieval heads makes no collective at all.

    Nothing is read back from the device, here or in `attend`, so that both can be captured.

    Parameters
    ----------
    comm : Communicator
    caches : Caches
    reaches : sequence of Reach
        One per token of the step.
    inputs : StepInputs
        On the caches' device.
    """

    def __init__(
        self, comm: Communicator, caches: Caches, reaches: Seq[Reach], inputs: StepInputs
    ) -> None:
        self.comm, self.caches, self._reaches = comm, caches, reaches
        local = caches.local
        self._biases, self._places, self._at = [], [], []
        self._segments: list[list[tuple[int, int, Tensor | None]]] = []
        for t, reach in enumerate(reaches):
            position = inputs.position[t]
            self._biases.append(
                local.visibility(reach.slot, reach.width, position, inputs.start[t])
            )
            self._places.append(local.places(reach.slot, inputs.position[t : t + 1]))
            self._at.append(inputs.at[t : t + 1])
            self._segments.append(_with_bias(reach, inputs.stored[t]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `razor_dist.attention.AttentionContext`."""
        heads = self.caches.layout.layers[layer]
        k, v = self.caches.stored(k, v)
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
        for t, reach in enumerate(self._reaches):
            slot, seen = reach.slot, slice(0, reach.width)
            local.write(rows, slot, self._places[t], k[:, t : t + 1], v[:, t : t + 1])
            outs.append(
                attend(
                    q[:, :, t : t + 1],
                    local.k[rows, slot.index, seen],
                    local.v[rows, slot.index, seen],
                    scale=scale,
                    bias=self._biases[t],
                ).out.float()
            )
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _retrieval(
        self, heads: LayerHeads, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        pages, rows = self.caches.pages, heads.retrieval_rows
        partials: list[Partial] = []
        for t, reach in enumerate(self._reaches):
            if reach.writes:
                pages.put(rows, self._at[t], k[:, t : t + 1], v[:, t : t + 1])
            q_t = q[:, :, t : t + 1]
            parts = [
                attend(q_t, pages.k[rows, a:b], pages.v[rows, a:b], scale=scale, bias=bias)
                for a, b, bias in self._segments[t]
            ]
            partials.append(merge(parts) if parts else empty_partial(q_t))
        out = torch.cat([p.out for p in partials], dim=2)
        if self.comm.size == 1:
            return out
        lse = torch.cat([p.lse for p in partials], dim=2)
        packed = torch.cat([out, lse.unsqueeze(-1)], dim=-1)
        gathered = self.comm.all_gather(packed, "merge")
        return merge_stacked(gathered[..., :-1], gathered[..., -1]).out


def _with_bias(reach: Reach, stored: Tensor) -> list[tuple[int, int, Tensor | None]]:
    """The extents that are read, each with the bias that hides the places after ``stored``."""
    if reach.exact:
        return [(a, b, None) for a, b in reach.segments]
    lengths = [b - a for a, b in reach.segments]
    place = torch.arange(sum(lengths), device=stored.device)
    bias = torch.zeros(len(place), device=stored.device).masked_fill_(place >= stored, _HIDDEN)
    return [(a, b, part) for (a, b), part in zip(reach.segments, bias.split(lengths), strict=True)]
