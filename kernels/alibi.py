"""Attention biased by distance (ALiBi): ``slope * (j - i)`` is added to the score of key j.

Softmax ignores a constant per query, so the bias may as well be ``slope * (j - r)`` for any
reference r; only the lse must be put right afterwards, by ``slope * (r - i)``. The choice of r is
one of precision. ``slope * j`` with j counted from the context's beginning is rounded to within
0.03 at a million tokens and a slope of 1, and so then is every score, of near keys too. With r
among the queries at hand, what is large, and rounded, is the bias of far keys only, whose weights
vanish. So queries are taken in blocks, each with its first position for r: near keys' scores are
off by ``slope * BLOCK * 2**-24`` (3e-5) at most, however long the context.

How the bias gets into the fused ops depends on what they take:

- in float32, and on CPU, as a float32 mask with one row per head;
- in bfloat16 on CUDA, where a mask would have to be bfloat16 too and flash attention takes none, as
  further dimensions of the head: `widened`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial, merge

# Queries that share a reference.
BLOCK = 512
# Dimensions that `widened` adds: 3 digits times 2 parts of the slope, and 2 for a multiple of 8.
WIDER = 8


class Alibi(NamedTuple):
    """Slopes, and where the tokens of an attention call stand.

    Attributes
    ----------
    slopes : Tensor
        float32 ``[K, G]``, not negative; below 1 in every published model.
    queries : sequence of range
        Positions of the queries, in order, as runs of consecutive ones.
    keys : Tensor
        int64 ``[S]``, positions of the keys, in any order.
    """

    slopes: Tensor
    queries: Sequence[range]
    keys: Tensor

    def distance(self, reference: int) -> Tensor:
        """``j - reference`` of the keys, float32 ``[S]``; exact below 2**24."""
        return (self.keys - reference).float()


class Attend(Protocol):
    """`razor_dist.kernels.attend` without ALiBi."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, bias: Tensor | None
    ) -> Partial: ...


def distance_bias(slopes: Tensor, distance: Tensor) -> Tensor:
    """The bias of keys at ``distance`` (float32 ``[S]``, ``j - i``), float32 ``[K, G, S]``."""
    return slopes.unsqueeze(-1) * distance


def attend_alibi(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, alibi: Alibi
) -> Partial:
    """Attention over one segment with the distance added to the scores.

    Parameters
    ----------
    attend : callable
        What computes it without.
    q, k, v, scale, causal
        As of `razor_dist.kernels.attend`.
    alibi : Alibi

    Returns
    -------
    Partial
        Its lse holds the bias ``slope * (j - i)``, so that it merges with any other segment's.
    """
    partials = []
    for begin, positions in _blocks(alibi.queries):
        end = begin + len(positions)
        q_block = q[:, :, begin:end]
        if causal:
            parts = [
                _attend_block(attend, q_block, k[:, at], v[:, at], scale, own, alibi, positions, at)
                for at, own in ((slice(0, begin), False), (slice(begin, end), True))
                if at.stop > at.start
            ]
        else:
            everything = slice(0, k.shape[1])
            parts = [
                _attend_block(attend, q_block, k, v, scale, False, alibi, positions, everything)
            ]
        block = merge(parts) if len(parts) > 1 else parts[0]
        shift = torch.arange(0, -len(positions), -1, device=q.device, dtype=torch.float32)
        partials.append(Partial(block.out, block.lse + distance_bias(alibi.slopes, shift)))
    if len(partials) == 1:
        return partials[0]
    # A causal block is merged, so in float32, unless it is the first.
    return Partial(
        torch.cat([p.out.float() for p in partials], 2), torch.cat([p.lse for p in partials], 2)
    )


def _blocks(queries: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Blocks of queries: the index of the first one, and their positions."""
    done = 0
    for run in queries:
        for begin in range(0, len(run), BLOCK):
            yield done + begin, run[begin : begin + BLOCK]
        done += len(run)


def _attend_block(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    alibi: Alibi,
    positions: range,
    at: slice,
) -> Partial:
    """Attention to the keys ``at``, relative to the first of the queries' positions."""
    distance = alibi._replace(keys=alibi.keys[at]).distance(positions[0])
    if q.device.type == "cuda" and q.dtype != torch.float32:
        if q.dtype == torch.bfloat16:
            wide = widened(q, k, v, scale, alibi.slopes, distance)
            out, lse = attend(*wide, scale=scale, causal=causal, bias=None)
            return Partial(out[..., : q.shape[3]], lse)
        # float16 does not reach as far as the digits do.
        q, k, v = q.float(), k.float(), v.float()
    bias = distance_bias(alibi.slopes, distance)
    return attend(q, k, v, scale=scale, causal=causal, bias=bias)


def widened(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slopes: Tensor, distance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose plain attention is ``q . k`` biased by distance.

    ``slope * distance`` becomes part of the dot product: a key is followed by its distance as
    three signed digits of base 256, which bfloat16 holds exactly, and a query by the slope, as a
    bfloat16 number and another for what the first leaves, at each digit's place value. The slope is
    then right to 16 bits, which is as good as exact where a weight is not negligible.

    Parameters
    ----------
    q : Tensor
        ``[K, G, T, D]`` bfloat16.
    k, v : Tensor
        ``[K, S, D]``.
    scale : float
    slopes : Tensor
        float32 ``[K, G]``.
    distance : Tensor
        float32 ``[S]``, whole numbers below 2**24.

    Returns
    -------
    tuple of Tensor
        The same with ``D + WIDER`` dimensions; the values' further ones are 0.
    """
    size, sign = distance.abs(), distance.sign()
    digits = [(size // place % 256 * sign).to(q.dtype) for place in (65536, 256, 1)]
    unit = slopes / scale
    high = unit.to(q.dtype)
    low = (unit - high.float()).to(q.dtype)
    columns = [part * place for place in (65536, 256, 1) for part in (high, low)]
    heads, group, queries, _ = q.shape
    zeros = (0, WIDER - len(columns))
    q_more = torch.nn.functional.pad(torch.stack(columns, -1), zeros)
    k_more = torch.nn.functional.pad(
        torch.stack([digit for digit in digits for _ in (high, low)], -1), zeros
    )
    return (
        torch.cat([q, q_more[:, :, None].expand(heads, group, queries, WIDER)], -1),
        torch.cat([k, k_more.expand(heads, *k_more.shape)], -1),
        torch.nn.functional.pad(v, (0, WIDER)),
    )
