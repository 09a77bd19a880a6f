"""Attention of queries to blocks of keys that each query chooses, and the rule of the choice.

A block is `BLOCK` tokens at absolute positions. The query at position i always reads the first
block, and all from the block of position i - `RECENT` on (`fixed`). It reads another block if, for
any query head of its KV head,

    exp(estimate) >= share * (mass of the fixed blocks + sum of exp(estimate))      (`choose`)

where the estimate is the largest score of the block's keys, from the slower half of the dimensions
with queries and keys in 8 bits (`largest`). Integer products and their maximum do not depend on
order: the estimates are the same bits, however the keys are distributed over ranks.

Letters: K KV heads, G query heads of each, T queries of one sequence, S keys, D dimensions, W of
them the slower ones, B blocks. Tables of blocks are ``[K, B, ...]``: the queries of one block are
adjacent.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.kernels.compiled import operations
from razor_dist.kernels.decode import available
from razor_dist.kernels.many_cpu import data_of
from razor_dist.kernels.partial import Partial, empty_partial, joined
from razor_dist.kernels.quantized import Codes, KeysOrValues, quantize
from razor_dist.kernels.reference import attend as attend_reference

BLOCK = 128
RECENT = 512
# Without compiled operations, the most scores that are in memory at once.
_SCORES = 1 << 22


@dataclass(frozen=True)
class BlockChoice:
    """The rule by which blocks are chosen."""

    share: float  # of a query's attention, from which on it reads a block
    slow: Tensor  # int64 [W], the dimensions from which scores are estimated


class Shard(NamedTuple):
    """Positions of a part of a sequence's keys, in ascending order."""

    places: Tensor  # int64 [S], ascending
    edges: Tensor  # int64 [B + 1]: block b has the keys from edges[b] to edges[b + 1]

    @classmethod
    def of(cls, runs: Sequence[range], end: int, device: torch.device) -> Shard:
        """Return the keys in ``runs`` of a sequence of ``end`` tokens."""
        parts = [torch.arange(run.start, run.stop, run.step, device=device) for run in runs if run]
        places = torch.cat(parts or [torch.arange(0, device=device)])
        borders = torch.arange(0, blocks_of(end) + 1, device=device) * BLOCK
        return cls(places, torch.searchsorted(places, borders))

    @property
    def blocks(self) -> slice:
        """The blocks from the first key's to the last key's; the shard must not be empty."""
        first, last = self.places[[0, -1]].tolist()
        return slice(first // BLOCK, last // BLOCK + 1)

    def cut(self, begin: int, end: int) -> Shard:
        """Return the keys from index ``begin`` to ``end``."""
        return Shard(self.places[begin:end], self.edges.clamp(begin, end) - begin)

    def before(self, end: int, keys: int) -> Shard:
        """Return the keys of the first ``end`` tokens; ``keys`` is how many of them are here."""
        return Shard(self.places, self.edges[: blocks_of(end) + 1]).cut(0, keys)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def first_recent(positions: Tensor) -> Tensor:
    """Return the first of each query's recent blocks, which are always read: int64 ``[T]``."""
    return ((positions - RECENT) // BLOCK).clamp(min=1)


def chooses(end: int) -> bool:
    """True if a text of ``end`` tokens has blocks that are not always read."""
    return end > RECENT + 2 * BLOCK


def fixed(positions: Tensor, blocks: int) -> Tensor:
    """Blocks that each query always reads, bool ``[B, T]``; also True of blocks after the query."""
    number = torch.arange(blocks, device=positions.device).unsqueeze(-1)
    return (number == 0) | (number >= first_recent(positions))


def choose(share: float, estimate: Tensor, lse: Tensor) -> Tensor:
    """Blocks that each query reads beside the fixed ones, bool ``[K, B, T]``.

    ``estimate`` is from `largest`, ``lse`` ``[K, G, T]`` the logarithm of the fixed blocks' mass.
    """
    total = torch.logaddexp(lse, estimate.logsumexp(1))
    return (estimate >= (math.log(share) + total).unsqueeze(1)).any(2)


def index_of(k: KeysOrValues, slow: Tensor) -> Codes:
    """The slower dimensions of keys in 8 bits, ``[K, S, W]``; 8-bit keys keep their codes."""
    if isinstance(k, Codes):
        return Codes(k.codes[..., slow], k.scale)
    return quantize(k[..., slow])


def largest(q: Tensor, k: KeysOrValues, slow: Tensor, shard: Shard, positions: Tensor) -> Tensor:
    """The largest score of each block, by 8 bits of the dimensions ``slow``: ``[K, B, G, T]``.

    ``q`` is ``[K, G, T, W]``, scaled, at ascending ``positions`` (int64 ``[T]``); ``k`` is
    ``[K, S, D]``. The score is -inf for blocks that are always read, and for blocks without keys.
    """
    kernels = _triton(q.device)
    if kernels is not None:
        estimates: Tensor = kernels.largest(q, k, slow, shard, positions)
        return estimates
    recent = first_recent(positions)
    if q.device.type == "cpu" and operations() is not None:
        of = q.contiguous(), *data_of(k), slow, shard.edges, recent
        compiled: Tensor = operations().block_largest(*of)
        return compiled
    own, index = quantize(q), index_of(k, slow)
    codes, blocks = own.codes.float(), len(shard.edges) - 1
    found = q.new_full((len(q), blocks, *q.shape[1:3]), -math.inf)
    for b in range(1, int(recent.max()) if len(recent) else 0):
        at = slice(int(shard.edges[b]), int(shard.edges[b + 1]))
        if at.stop > at.start:
            scores = torch.einsum("kgtw,ksw->kgts", codes, index.codes[:, at].float())
            scores = scores * own.scale.unsqueeze(-1) * index.scale[:, None, None, at]
            found[:, b] = scores.amax(-1).masked_fill(recent <= b, -math.inf)
    return found


def attend_chosen(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    chosen: Tensor,
    shard: Shard,
    positions: Tensor,
    *,
    scale: float,
) -> Partial:
    """Causal attention of queries to the keys of the blocks that they have ``chosen``.

    ``q`` is ``[K, G, T, D]``, ``k`` and ``v`` ``[K, S, D]``, ``chosen`` bool ``[K, B, T]``; the
    result is float32.
    """
    if not q.shape[2] or not k.shape[1]:
        return empty_partial(q)
    chosen = chosen if chosen.stride()[1:] == (q.shape[2], 1) else chosen.contiguous()
    kernels = _triton(q.device)
    if kernels is not None:
        attended: Partial = kernels.attend_chosen(q, k, v, chosen, shard, positions, scale=scale)
        return attended
    q, width = q.float(), 32 if isinstance(k, Codes) else 16
    compiled = q.device.type == "cpu" and operations() is not None
    if compiled and q.shape[-1] % width == 0 and q.shape[-1] <= 512:
        (keys, k_scale), (values, v_scale) = data_of(k), data_of(v)
        of = q, keys, values, k_scale, v_scale, chosen, shard.edges, shard.places, positions
        return Partial(*operations().attend_chosen(*of, scale))
    block, heads = shard.places // BLOCK, []
    rows = max(1, _SCORES // (q.shape[1] * k.shape[1]))
    for head, of_head in enumerate(chosen):
        one, found = slice(head, head + 1), []
        for t in range(0, q.shape[2], rows):
            at = slice(t, t + rows)
            read = of_head[:, at].any(1)[block].nonzero().flatten()
            seen = of_head[block[read], at].T & (shard.places[read] <= positions[at].unsqueeze(-1))
            hides = torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, -math.inf)
            near = q[one, :, at]
            keys, values = (x[one, read].to(torch.float32) for x in (k, v))
            found.append(attend_reference(near, keys, values, scale, False, hides))
        heads.append(joined(found))
    return Partial(*(torch.cat(x) for x in zip(*heads, strict=True)))


def _triton(device: torch.device) -> ModuleType | None:
    """Return the Triton kernels for tensors on ``device``, if they run there."""
    if device.type != "cuda" or not available(device):
        return None
    return importlib.import_module("razor_dist.kernels.chosen_triton")
