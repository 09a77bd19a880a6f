"""Retrieval heads that read blocks of keys, chosen for each query: the reference, as a mask.

Blocks are `BLOCK` tokens at absolute positions. The query at position i reads the *fixed* ones: the
first, and all from that of position i - `RECENT` on. Of each block between them a selector
estimates the log of its mass, ``log sum_j exp(scale q . k_j)``, and the block is read if, for any
query head of its KV head,

    exp(estimate) >= share * (mass of the fixed blocks + sum of exp(estimate) over the others).

What is not read is left out of the softmax. A query's result follows from the keys before it alone:
not from its neighbours, nor from how a prompt is cut. Each query head reads at most ``1 / share``
blocks beside the fixed ones. A mask saves nothing: this measures what choosing loses.

Letters: G query heads of one KV head, T queries, n keys, B blocks, D dimensions of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from razor_dist.heads.decision import Flags
from razor_dist.kernels.chosen import BLOCK, RECENT
from razor_dist.kernels.fused import rotate
from razor_dist.kernels.query import Query

_TILE = 16  # queries that a kernel would read the union of blocks for

# Of scaled queries [G, T, D], whole blocks of keys [n, D], and the slower dimensions [D / 2], the
# estimates [G, T, n / BLOCK].
Selector = Callable[[Tensor, Tensor, Tensor], Tensor]


def _coded(x: Tensor, bits: int) -> Tensor:
    """Round rows to whole numbers of ``bits`` with a scale each, as an index would keep them."""
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.round(x / scale.clamp(min=torch.finfo(x.dtype).tiny)) * scale


def _largest(scores: Tensor) -> Tensor:
    """The largest term of each block: no order of keys or blocks changes it."""
    return scores.unflatten(-1, (-1, BLOCK)).amax(-1)


def _means(q: Tensor, k: Tensor, slow: Tensor, page: int = 32) -> Tensor:
    means = k.unflatten(0, (-1, page)).mean(1)
    return (q @ means.mT + math.log(page)).unflatten(-1, (-1, BLOCK // page)).logsumexp(-1)


def _quest(q: Tensor, k: Tensor, slow: Tensor, page: int = 16) -> Tensor:
    """Quest's upper bound of a score (arXiv 2406.10774), by each dimension's range in a page."""
    pages = k.unflatten(0, (-1, page))
    bounds = q.clamp(min=0) @ pages.amax(1).mT + q.clamp(max=0) @ pages.amin(1).mT
    return bounds.unflatten(-1, (-1, BLOCK // page)).amax(-1)


SELECTORS: Mapping[str, Selector] = {
    # An index of D / 2 bytes a key.
    "slower": lambda q, k, slow: _largest(_coded(q[..., slow], 8) @ _coded(k[:, slow], 8).mT),
    "keys-4bit": lambda q, k, slow: _largest(_coded(q, 8) @ _coded(k, 4).mT),
    # Of D / 4.
    "slower-4bit": lambda q, k, slow: _largest(_coded(q[..., slow], 8) @ _coded(k[:, slow], 4).mT),
    # To compare with: unrounded, summaries of blocks, what cannot be known before reading, nothing.
    "slower-unrounded": lambda q, k, slow: _largest(q[..., slow] @ k[:, slow].mT),
    "means": _means,
    "quest": _quest,
    "mass": lambda q, k, slow: (q @ k.mT).unflatten(-1, (-1, BLOCK)).logsumexp(-1),
    "none": lambda q, k, slow: q.new_full((*q.shape[:2], len(k) // BLOCK), -math.inf),
}


@dataclass(frozen=True)
class Selection:
    """A rule, and the heads that read by it."""

    share: float  # of a query's mass, from which a block is read
    selector: str  # of `SELECTORS`
    heads: Flags


def attend_selected(
    q: Tensor, k: Tensor, v: Tensor, share: float, selector: Selector, slow: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of one KV head to the blocks chosen.

    ``q`` ``[G, T, D]`` are scaled queries at the last T positions of the keys ``k`` and values
    ``v`` ``[n, D]``. Returns the output, ``[G, T, D]``, and which blocks each query reads, bool
    ``[T, B]``.
    """
    begin, end = len(k) - q.shape[1], len(k)
    outs, reads = [], []
    while begin < end:
        # Up to a block's edge: these queries have the same fixed blocks.
        stop = min(end, (begin // BLOCK + 1) * BLOCK)
        tile, q = q[:, : stop - begin], q[:, stop - begin :]
        out, read = _attend_tile(tile, k[:stop], v[:stop], share, selector, slow)
        outs.append(out)
        reads.append(pad(read, (0, math.ceil(end / BLOCK) - read.shape[1])))
        begin = stop
    return torch.cat(outs, 1), torch.cat(reads)


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, share: float, selector: Selector, slow: Tensor
) -> tuple[Tensor, Tensor]:
    """`attend_selected` for queries of one block."""
    count, n = q.shape[1], len(k)
    positions = torch.arange(n - count, n, device=q.device)
    # Blocks 1 to recent - 1 are to be chosen from.
    recent = max(1, (n - count - RECENT) // BLOCK)
    read = torch.ones(count, math.ceil(n / BLOCK), dtype=torch.bool, device=q.device)
    tokens = torch.arange(n, device=q.device)
    tokens = torch.cat([tokens[:BLOCK], tokens[recent * BLOCK :]])
    scores = q @ k[tokens].mT
    scores.masked_fill_(tokens > positions.unsqueeze(-1), -torch.inf)
    if recent > 1:
        estimate = selector(q, k[BLOCK : recent * BLOCK], slow)
        total = torch.logaddexp(scores.logsumexp(-1), estimate.logsumexp(-1))
        chosen = (estimate >= math.log(share) + total.unsqueeze(-1)).any(0)
        read[:, 1:recent] = chosen
        union = chosen.any(0).nonzero().flatten()
        among = ((union + 1).unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=q.device)).flatten()
        unread = ~chosen[:, union].repeat_interleave(BLOCK, 1)
        others = (q @ k[among].mT).masked_fill_(unread, -torch.inf)
        tokens, scores = torch.cat([tokens, among]), torch.cat([scores, others], -1)
    return scores.softmax(-1) @ v[tokens], read


def turned(query: Query, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries ``[K, G, T, D]`` and keys ``[K, T, D]``, rotated copies where asked for."""
    if query.rotation is None:
        return query.q, k
    q, k = rotate(query.q.flatten(0, 1)[None], k[None], *query.rotation)
    return q[0].view(query.q.shape), k[0]


class SelectedHeads:
    """The heads of a model that choose blocks, with their keys and values, for one sequence."""

    def __init__(self, selection: Selection, slow: Tensor, tokens: int) -> None:
        self._slow, self._tokens = slow, tokens
        self._share, self._selector = selection.share, SELECTORS[selection.selector]
        # Indices of the choosing KV heads by layer; layers without any are missing.
        self.heads = {
            layer: [head for head, own in enumerate(row) if own]
            for layer, row in enumerate(selection.heads)
            if any(row)
        }
        self._kv: dict[int, Tensor] = {}  # keys and values by layer, [2, heads, tokens, D]
        # By position, the sum over heads of the share of blocks before it that are read, by the
        # query and by its tile; float64 [2, tokens].
        self._read = torch.zeros(2, tokens, dtype=torch.float64)

    def blocks_read(self, positions: range) -> tuple[Tensor, Tensor]:
        """Return the share of blocks that queries read, and that tiles of 16 queries read.

        Float64 ``[positions]``; means over the selecting KV heads.
        """
        heads = sum(map(len, self.heads.values()))
        by_query, by_tile = self._read[:, positions.start : positions.stop] / heads
        return by_query, by_tile

    def attend(
        self, layer: int, query: Query, k: Tensor, v: Tensor, positions: Tensor
    ) -> Tensor | None:
        """Attention ``[T, heads, G, D]`` of a layer's selecting heads, if there are any.

        The arguments are those of an attention context's ``attend``, and the tokens' positions.
        """
        heads = self.heads.get(layer)
        if heads is None:
            return None
        span = slice(int(positions[0]), int(positions[-1]) + 1)
        assert span.stop - span.start == len(positions), "not one sequence's tokens"
        q, k = turned(query, k)
        if layer not in self._kv:
            self._kv[layer] = k.new_empty(2, len(heads), self._tokens, k.shape[-1])
        self._kv[layer][:, :, span] = torch.stack([k[heads], v[heads]])
        if layer == next(iter(self.heads)):
            self._read[:, span] = 0
        outs = []
        for head, (keys, values) in zip(heads, self._kv[layer].unbind(1), strict=True):
            keys, values = keys[: span.stop], values[: span.stop]
            own = q[head] * query.scale
            out, read = attend_selected(own, keys, values, self._share, self._selector, self._slow)
            outs.append(out)
            self._note(read, span)
        return torch.stack(outs).permute(2, 0, 1, 3)

    def _note(self, read: Tensor, span: slice) -> None:
        count = len(read)
        before = torch.arange(span.start, span.stop) // BLOCK + 1
        tiles = pad(read, (0, 0, 0, -count % _TILE)).unflatten(0, (-1, _TILE)).any(1)
        for which, found in enumerate((read, tiles.repeat_interleave(_TILE, 0)[:count])):
            self._read[which, span] += found.sum(-1).cpu() / before
