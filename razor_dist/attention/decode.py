"""Attention of one decode step on one rank: one new token for each of several sequences.

The same code runs captured in a CUDA graph or not: `razor_dist.attention.decode_inputs` says which
memory is read and holds what changes from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.attention.decode_inputs import ReadExtent, StepInputs
from razor_dist.attention.prefill import Caches
from razor_dist.heads.layout import LayerHeads, StreamingGroup
from razor_dist.kernels import HIDDEN, Partial, empty_partial, merge, merge_stacked
from razor_dist.kernels.alibi import Distance
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator


class DecodeContext:
    """`AttentionContext` of one decode step.

    Streaming heads are computed on every rank from the replicated cache, without traffic. Retrieval
    heads attend to each rank's shard; one all-gather per layer carries ``out`` and ``lse``, packed
    together. A layer without retrieval heads makes no collective at all.

    Nothing is read back from the device, here or in `attend`, so that both can be captured. There
    is one of ``extents`` per token of the step; ``inputs`` are on the caches' device.
    """

    def __init__(
        self, comm: Communicator, caches: Caches, extents: Seq[ReadExtent], inputs: StepInputs
    ) -> None:
        self.comm, self.caches, self._extents = comm, caches, extents
        self._inputs = inputs
        # By token and streaming cache: what is seen of its slot, and where it is written.
        self._biases: list[list[Tensor]] = []
        self._places: list[list[Tensor]] = []
        self._segments: list[list[tuple[int, int, Tensor | None]]] = []
        for t, extent in enumerate(extents):
            position = inputs.position[t]
            views = list(zip(caches.streaming, extent.streaming, inputs.start[:, t], strict=True))
            self._biases.append(
                [
                    cache.visibility(slot, width, position, start)
                    for cache, (slot, width), start in views
                ]
            )
            self._places.append(
                [cache.places(slot, inputs.position[t : t + 1]) for cache, (slot, _), _ in views]
            )
            self._segments.append(_with_bias(extent, inputs.stored[t]))
        self._distances: _Distances | None = None

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        """See `razor_dist.models.bridge.AttentionContext`."""
        heads = self.caches.layout.layers[layer]
        k, v = self.caches.stored(k, v)
        if query.by_distance and self._distances is None:
            self._distances = self._measure(query.q.dtype)
        parts = []
        if len(heads.retrieval):
            of = heads.retrieval_index
            parts.append(self._retrieval(heads, query.heads(of), k[of], v[of]))
        if len(heads.streaming):
            of = heads.streaming_index
            parts.append(self._streaming(heads, query.heads(of), k[of], v[of]))
        if len(parts) == 1 and len(heads.groups) <= 1:
            (out_KGTD,) = parts
        else:
            out_KGTD = torch.cat(parts)[heads.inverse]
        return out_KGTD.permute(2, 0, 1, 3).flatten(1, 2).to(query.q.dtype)

    def _measure(self, dtype: torch.dtype) -> _Distances:
        """Note where the new tokens stand; return how far from them is all that is read."""
        pages, inputs = self.caches.pages, self._inputs
        assert pages.positions is not None
        distances = _Distances([], [])
        for t, extent in enumerate(self._extents):
            position = inputs.position[t]
            if extent.writes:
                pages.positions.index_copy_(0, inputs.at[t : t + 1], inputs.position[t : t + 1])
            distances.streaming.append(
                [
                    Distance.of(cache.distance(slot, width, position, start), dtype)
                    for cache, (slot, width), start in zip(
                        self.caches.streaming, extent.streaming, inputs.start[:, t], strict=True
                    )
                ]
            )
            distances.segments.append(
                [
                    Distance.of((pages.positions[a:b] - position).float(), dtype)
                    for a, b in extent.segments
                ]
            )
        return distances

    def _streaming(self, heads: LayerHeads, query: Query, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for t in range(len(self._extents)):
            groups = [self._group(t, group, query, k, v) for group in heads.groups]
            outs.append(groups[0] if len(groups) == 1 else torch.cat(groups))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _group(self, t: int, group: StreamingGroup, query: Query, k: Tensor, v: Tensor) -> Tensor:
        """One token's attention by the streaming heads of one window: ``[K, G, 1, D]`` float32."""
        cache, (slot, width) = (
            self.caches.streaming[group.index],
            self._extents[t].streaming[group.index],
        )
        part, new = group.part, slice(t, t + 1)
        cache.write(group.rows, slot, self._places[t][group.index], k[part, new], v[part, new])
        found = (
            query.heads(part)
            .tokens(new)
            .attend(
                *cache.view(group.rows, slot, width),
                bias=self._biases[t][group.index],
                where=self._distances and self._distances.streaming[t][group.index],
            )
        )
        return found.out.float()

    def _retrieval(self, heads: LayerHeads, query: Query, k: Tensor, v: Tensor) -> Tensor:
        pages, rows = self.caches.pages, heads.retrieval_rows
        partials: list[Partial] = []
        for t, extent in enumerate(self._extents):
            if extent.writes:
                at = self._inputs.at[t : t + 1]
                pages.put(rows, at, k[:, t : t + 1], v[:, t : t + 1])
            query_t = query.tokens(slice(t, t + 1))
            parts = [
                query_t.attend(
                    pages.k[rows, a:b],
                    pages.v[rows, a:b],
                    bias=bias,
                    where=self._distances and self._distances.segments[t][index],
                )
                for index, (a, b, bias) in enumerate(self._segments[t])
            ]
            partials.append(merge(parts) if parts else empty_partial(query_t.q))
        out = torch.cat([p.out for p in partials], dim=2)
        if self.comm.size == 1:
            return out
        lse = torch.cat([p.lse for p in partials], dim=2)
        packed = torch.cat([out, lse.unsqueeze(-1)], dim=-1)
        gathered = self.comm.all_gather(packed, "merge")
        return merge_stacked(gathered[..., :-1], gathered[..., -1]).out


class _Distances(NamedTuple):
    """``j - i`` of what a step reads, for each of its tokens."""

    streaming: list[list[Distance]]  # by streaming cache: the places of its slot
    segments: list[list[Distance]]  # the extents of the page pool


def _with_bias(extent: ReadExtent, stored: Tensor) -> list[tuple[int, int, Tensor | None]]:
    """The extents that are read, each with the bias that hides the places after ``stored``."""
    if extent.exact:
        return [(a, b, None) for a, b in extent.segments]
    lengths = [b - a for a, b in extent.segments]
    place = torch.arange(sum(lengths), device=stored.device)
    bias = torch.zeros(len(place), device=stored.device).masked_fill_(place >= stored, HIDDEN)
    return [(a, b, part) for (a, b), part in zip(extent.segments, bias.split(lengths), strict=True)]
