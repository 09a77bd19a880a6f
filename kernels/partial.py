"""Partial attention results and their merge, the one idea everything else stands on.

Shapes use these letters throughout the package: K key-value heads, G query heads per key-value
head, T queries, S keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A bias that hides a key. Finite, for the fused ops report lse = 0 for a row whose keys are all at
# -inf: so a segment that is hidden altogether has an lse that counts for nothing in a merge.
HIDDEN = -1e30


class Partial(NamedTuple):
    """Attention over a segment of the keys; where none of them is visible, lse -inf and out 0."""

    out: Tensor  # [K, G, T, D], the softmax-weighted mean of the segment's values
    lse: Tensor  # [K, G, T] float32, natural logarithm of the segment's softmax denominator


def over_keys(attend: Callable[[slice], Partial], keys: int, block: int) -> Partial:
    """Attention over ``keys`` keys, at most ``block`` at a time, where keys must be copied first.

    The result is as ``attend`` gives it for a slice of the keys where one block is all, else in
    float32.
    """
    partials = [attend(slice(begin, begin + block)) for begin in range(0, keys, block)]
    return partials[0] if len(partials) == 1 else merge(partials)


def merge(partials: Sequence[Partial]) -> Partial:
    """Combine attention over disjoint segments into attention over their union.

    ``lse = log sum_i exp(lse_i)`` and ``out = sum_i exp(lse_i - lse) out_i``, in float32 with
    the running maximum subtracted. Rows that see no key in any segment give ``out = 0`` and
    ``lse = -inf``, never NaN. ``partials`` are one or more of the same shapes.
    """
    if len(partials) == 1:
        return Partial(partials[0].out.float(), partials[0].lse)
    out, lse = partials[0].out.float(), partials[0].lse
    for other in partials[1:]:
        top = torch.maximum(lse, other.lse)
        # Where both are -inf the differences would be NaN; any finite reference gives weight 0.
        top = top.masked_fill(top == -torch.inf, 0.0)
        w_a, w_b = torch.exp(lse - top), torch.exp(other.lse - top)
        total = w_a + w_b
        inverse = torch.where(total > 0, 1.0 / total, 0.0)
        out = out * (w_a * inverse).unsqueeze(-1) + other.out * (w_b * inverse).unsqueeze(-1)
        lse = top + torch.log(total)
    return Partial(out, lse)


def empty_partial(q: Tensor) -> Partial:
    """Attention of ``q`` ``[K, G, T, D]`` over no keys at all."""
    return Partial(
        torch.zeros_like(q, dtype=torch.float32),
        torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device),
    )


def merge_stacked(out: Tensor, lse: Tensor, dim: int = 0) -> Partial:
    """`merge` of P partials stacked along dimension ``dim``, in one pass.

    ``out`` is float32 ``[..., P, ..., D]``, ``lse`` float32 ``[..., P, ...]``; ``dim`` is not
    negative, so that it means the same of both.
    """
    # Plain elementwise operations: decode runs this in every layer, and torch's softmax over an
    # inner dimension wakes its threads even for a handful of numbers.
    # Where no partial sees a key, any finite reference gives weight 0.
    top = lse.amax(dim, keepdim=True).clamp(min=torch.finfo(lse.dtype).min)
    weights = torch.exp(lse - top)
    total = weights.sum(dim)
    merged = (out * weights.unsqueeze(-1)).sum(dim)
    merged = merged / total.clamp(min=torch.finfo(lse.dtype).tiny).unsqueeze(-1)
    return Partial(merged, top.squeeze(dim) + torch.log(total))
