"""Attention of prompt tokens that all ranks compute.

These tokens are a whole short prompt, a question that continues a prefix, or a part of a long
prompt. Every rank has all of them, and the whole window before them. So streaming heads compute as
for a chunk on one rank, without transfers. Retrieval heads attend to the tokens themselves, with a
causal mask, and to the rank's shard of earlier tokens; only results for the latter have to be
merged, by one all-gather per layer. Each rank stores the keys and values of the tokens that it
would own had they been decoded.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from razor_dist.attention.chosen import HeldKeys, attend_together
from razor_dist.attention.step import ReplicatedTokens
from razor_dist.attention.streaming_prefill import StreamingChunk
from razor_dist.cache.caches import Caches
from razor_dist.heads.layout import ShortHeads
from razor_dist.kernels import Partial, joined, merge
from razor_dist.kernels.alibi import Places
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import Earlier
from razor_dist.parallel.gather import merged_over_ranks


class ReplicatedContext:
    """`AttentionContext` of the tokens of several prompts, one prompt after the other.

    With tensor-parallel decode, a rank computes its own streaming heads only. With exact prefill,
    all heads see the tokens at the beginning of a sequence in full.
    """

    def __init__(self, comm: Communicator, caches: Caches, prompts: Seq[ReplicatedTokens]) -> None:
        self._comm, self._caches, self._prompts = comm, caches, prompts
        self.tokens = sum(len(prompt.positions) for prompt in prompts)
        alone = Communicator(None)
        self._streaming = [
            [
                StreamingChunk(alone, cache, part, prompt.chunk)
                for cache, part in zip(caches.streaming, prompt.windows, strict=True)
            ]
            for prompt in prompts
        ]

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        heads = self._caches.layout.short[layer]
        parts = []
        if heads.retrieval:
            of = heads.retrieval_index
            own = self._caches.pages.stored(k[of], v[of])
            found = self._retrieval(heads, query.heads(of), *own)
            parts.append(found if heads.taken is None else found.flatten(0, 1)[heads.taken])
        if heads.streaming:
            of = heads.streaming_index
            found = self._stream(layer, heads, query.heads(of), k[of], v[of])
            parts.append(found if heads.taken is None else found.flatten(0, 1))
        if not parts:  # the rank has no head in this layer
            return query.q.new_empty(query.q.shape[2], 0, query.q.shape[3])
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if heads.inverse is not None:
            out = out[heads.inverse]
        if heads.taken is None:
            out = out.flatten(0, 1)
        return out.transpose(0, 1).to(query.q.dtype)

    def _stream(self, layer: int, heads: ShortHeads, query: Query, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the streaming heads: float32 ``[K, G, T, D]``."""
        outs = []
        for group in heads.groups:
            of = query.heads(group.part)
            both = self._caches.streaming[group.index].stored(k[group.part], v[group.part])
            found = []
            for prompt, windows in zip(self._prompts, self._streaming, strict=True):
                mine = self._caches.placed(of.tokens(prompt.at), prompt.chunk.end)
                k_of, v_of = (x[:, prompt.at] for x in both)
                window = windows[group.index]
                transfers = window.start(layer, group, [], k_of, v_of)
                out = window.finish(layer, group, mine, transfers)
                found.append(_own(prompt, mine, k_of, v_of).out.float() if out is None else out)
            outs.append(torch.cat(found, dim=2))
        return torch.cat(outs)

    def _retrieval(self, heads: ShortHeads, query: Query, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the retrieval heads: float32 ``[K, G, T, D]``."""
        pages, rows = self._caches.pages, heads.retrieval_rows
        end = max(prompt.chunk.end for prompt in self._prompts)
        if self._caches.chooses(end):
            return self._by_blocks(rows, query, k, v)
        query = self._caches.placed(query, end)
        own = []
        for prompt in self._prompts:
            k_of, v_of = k[:, prompt.at], v[:, prompt.at]
            own.append(_own(prompt, query.tokens(prompt.at), k_of, v_of))
            pages.write(rows, prompt.extents, k_of[:, prompt.own], v_of[:, prompt.own])
        continuing = [prompt for prompt in self._prompts if prompt.chunk.begin]
        if not continuing:
            return torch.cat([partial.out.float() for partial in own], dim=2)
        found = [self._before(p, query.tokens(p.at), rows) for p in continuing]
        before = merged_over_ranks(self._comm, joined(found))
        outs, first = [], 0
        for prompt, partial in zip(self._prompts, own, strict=True):
            if prompt.chunk.begin:
                at = slice(first, first + len(prompt.positions))
                first = at.stop
                partial = merge([partial, before.tokens(at)])
            outs.append(partial.out.float())
        return torch.cat(outs, dim=2)

    def _by_blocks(self, rows: slice, query: Query, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the retrieval heads to the blocks that tokens choose."""
        pages, choice, readers = self._caches.pages, self._caches.choice, []
        for prompt in self._prompts:
            own = (x[:, prompt.at][:, prompt.own] for x in (k, v))
            pages.write(rows, prompt.extents, *own)
            assert prompt.reader is not None
            readers.append(HeldKeys(pages, rows, prompt.reader))
        assert choice is not None
        return attend_together(self._comm, choice, query, readers)

    def _before(self, prompt: ReplicatedTokens, query: Query, rows: slice) -> Partial:
        """Attention of a prompt's tokens to this rank's shard of the tokens before them."""
        pages, positions = self._caches.pages, list[Tensor]()
        if query.by_distance and prompt.seen:
            assert pages.positions is not None
            positions = [torch.cat([pages.positions[span] for span in prompt.seen])]
        earlier = Earlier(pages.segments(rows, prompt.seen), [], positions)
        return earlier.seen_by(query, prompt.chunk.ranges(0), 0)


def _own(prompt: ReplicatedTokens, query: Query, k: Tensor, v: Tensor) -> Partial:
    """Attention of a prompt's tokens to themselves."""
    where = Places(prompt.chunk.ranges(0), prompt.positions) if query.by_distance else None
    return query.attend(k, v, causal=True, where=where)
