"""Partial attention results and their merge, the one idea everything else stands on.

Shapes use these letters throughout the package: K key-value heads, G query heads per key-value
head, T queries, S keys, D head dimension.

**Few queries over many keys.** The fused ops are parallel over batch, heads and blocks of queries
only, so that at decode a single key-value head would keep one core, or one multiprocessor of a GPU,
busy. So the keys are cut into parts, which take the place of the ops' head axis and are merged by
their lse (flash-decoding): `attend_folded`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.kernels.compiled import operations
from razor_dist.kernels.decode import available

# A bias that hides a key. It is finite because the fused ops report lse = 0 for a row whose keys
# are all at -inf. A segment of hidden keys has an lse near -1e30, so that merges ignore it.
HIDDEN = -1e30

# ``op(q, k, v, mask) -> (out, lse)`` over ``[batch, heads, rows or keys, D]``; the mask is added
# to the scores and broadcasts to them.
Op = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

# Up to this many queries the group is folded into the query axis, so that a key is read once for
# its whole group instead of once per query head: decode is bound by memory.
FOLD_UP_TO = 16
# Fewer keys than this are not worth a part of their own.
LEAST_KEYS = 256


class Partial(NamedTuple):
    """Attention over a segment of keys; for a query that sees none, lse is -inf and out 0."""

    out: Tensor  # [K, G, T, D], the softmax-weighted mean of the segment's values
    lse: Tensor  # [K, G, T] float32, natural logarithm of the segment's softmax denominator

    def tokens(self, span: slice) -> Partial:
        return Partial(self.out[:, :, span], self.lse[:, :, span])

    def packed(self) -> Tensor:
        """``out`` and ``lse`` as one tensor to send, float32 ``[K, G, T, D + 1]``."""
        return torch.cat([self.out.float(), self.lse.unsqueeze(-1)], -1)

    @classmethod
    def unpacked(cls, x: Tensor) -> Partial:
        """Views of a `packed` result, or of several that are stacked."""
        return cls(x[..., :-1], x[..., -1])


def joined(partials: Iterable[Partial]) -> Partial:
    """Concatenate the results of adjacent queries."""
    found = list(partials)
    if len(found) == 1:
        return found[0]
    out, lse = (torch.cat(x, 2) for x in zip(*found, strict=True))
    return Partial(out, lse)


def over_keys(attend: Callable[[slice], Partial], keys: int, block: int) -> Partial:
    """Attention over ``keys`` keys, at most ``block`` at a time, which ``attend`` has to copy.

    The result of one block is in the dtype that ``attend`` returns, that of several in float32.
    """
    begins = range(0, keys, block)
    partials = (attend(slice(begin, begin + block)) for begin in begins)
    return next(partials) if len(begins) == 1 else merge(partials)


def merge(partials: Iterable[Partial]) -> Partial:
    """Combine attention over disjoint segments into attention over their union.

    ``lse = log sum_i exp(lse_i)`` and ``out = sum_i exp(lse_i - lse) out_i``, in float32 with
    the running maximum subtracted. Rows that see no key in any segment give ``out = 0`` and
    ``lse = -inf``, never NaN. ``partials`` are one or more, of the same shapes. An iterator makes
    them one after the other, so that few of them are in memory at once.
    """
    each = iter(partials)
    first = next(each)
    found = Partial(first.out.float(), first.lse)
    del first
    for other in each:
        found = _merge(found, other)
        del other  # before the next one is made
    return found


def _merge(one: Partial, other: Partial) -> Partial:
    if (merged := _merged_at_once(one, other)) is not None:
        return merged
    top = torch.maximum(one.lse, other.lse)
    # Where both are -inf the differences would be NaN; any finite reference gives weight 0.
    top = top.masked_fill(top == -torch.inf, 0.0)
    w_a, w_b = torch.exp(one.lse - top), torch.exp(other.lse - top)
    total = w_a + w_b
    inverse = torch.where(total > 0, 1.0 / total, 0.0)
    out = one.out * (w_a * inverse).unsqueeze(-1)
    out.addcmul_(other.out.float(), (w_b * inverse).unsqueeze(-1))
    return Partial(out, top + torch.log(total))


def _merged_at_once(one: Partial, other: Partial) -> Partial | None:
    """Merge by one compiled operation instead of ten of torch's; None if there is none.

    It has no gradients.
    """
    tensors = *one, *other
    apart = any(x.dim() == 4 and x.stride(-1) != 1 for x in tensors)
    if apart or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return None
    device = one.out.device
    if device.type == "cpu" and operations() is not None:
        if {x.dtype for x in tensors} == {torch.float32}:
            return Partial(*operations().merge(*tensors))
    elif device.type == "cuda" and available(device):
        kernels = importlib.import_module("razor_dist.kernels.merge_triton")
        return Partial(*kernels.merge_pair(one, other))
    return None


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


def foldable(q: Tensor, causal: bool, bias: Tensor | None) -> bool:
    """True for up to `FOLD_UP_TO` queries that all see the same keys."""
    return not causal and q.shape[2] <= FOLD_UP_TO and (bias is None or bias.dim() != 2)


def per_head(bias: Tensor) -> Tensor:
    """View a bias ``[S]``, ``[T, S]`` or ``[K, G, S]`` to broadcast to scores ``[K, G, T, S]``."""
    if bias.dim() == 3:
        return bias.unsqueeze(2)
    return bias.view(1, 1, -1, bias.shape[-1])


def attend_folded(
    op: Op, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, parts: int, align: int = 1
) -> Partial:
    """Attention of few queries, a group folded into rows and the keys cut into parts.

    ``q`` is ``[K, G, T, D]``, ``k`` and ``v`` are ``[K, S, D]``, ``bias`` is float32 ``[S]`` or
    ``[K, G, S]``. The keys make up to ``parts`` parts of equal length, a multiple of ``align`` and
    `LEAST_KEYS` at least; what remains is one more part.
    """
    heads, group, queries, dim = q.shape
    rows, keys = group * queries, k.shape[1]
    folded = q.reshape(heads, 1, rows, dim)
    parts = min(parts, keys // max(LEAST_KEYS, align))
    mask = None
    if bias is not None and bias.dim() == 1:
        mask = bias.view(1, 1, 1, keys)
    elif bias is not None:
        every_query = bias.unsqueeze(2).expand(heads, group, queries, keys)
        mask = every_query.reshape(heads, 1, rows, keys)
    if parts <= 1:
        out, lse = op(folded, k.unsqueeze(1), v.unsqueeze(1), mask)
    else:
        out, lse = _attend_parts(op, folded, k, v, mask, parts, keys // parts // align * align)
    return Partial(out.reshape(heads, group, queries, dim), lse.reshape(heads, group, queries))


def _attend_parts(
    op: Op, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, parts: int, length: int
) -> tuple[Tensor, Tensor]:
    heads, _, rows, dim = q.shape
    keys, main = k.shape[1], length * parts
    own = rest = None
    if mask is not None:
        own = mask[:, 0, :, :main].unflatten(-1, (parts, length)).transpose(1, 2)
        rest = mask[..., main:]
    out, lse = op(
        q.expand(heads, parts, rows, dim),
        k[:, :main].unflatten(1, (parts, length)),
        v[:, :main].unflatten(1, (parts, length)),
        own,
    )
    if main < keys:
        last = op(q, k[:, None, main:], v[:, None, main:], rest)
        out, lse = torch.cat([out, last[0]], 1), torch.cat([lse, last[1]], 1)
    return merge_stacked(out.float(), lse, dim=1)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of a GPU's multiprocessors; 1 for another device."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
