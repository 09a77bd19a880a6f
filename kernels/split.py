"""Few queries over many keys: the keys cut into parts that are computed side by side.

The fused ops are parallel over batch, heads and blocks of queries only, so that at decode a single
key-value head would keep one core, or one multiprocessor of a GPU, busy. Parts of the keys take
the place of the ops' head axis and are merged by their lse (flash-decoding).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial, merge_stacked

# ``op(q, k, v, mask) -> (out, lse)`` over ``[batch, heads, rows or keys, D]``; the mask is added
# to the scores and broadcasts to them.
Op = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

# Up to this many queries the group is folded into the query axis, so that a key is read once for
# its whole group instead of once per query head: decode is bound by memory.
FOLD_UP_TO = 16
# Fewer keys than this are not worth a part of their own.
LEAST_KEYS = 256


def foldable(q: Tensor, causal: bool, bias: Tensor | None) -> bool:
    """Tell if the rows of a head see the same keys, and are few."""
    return not causal and q.shape[2] <= FOLD_UP_TO and (bias is None or bias.dim() != 2)


def per_head(bias: Tensor) -> Tensor:
    """A bias ``[S]``, ``[T, S]`` or ``[K, G, S]`` in the order of the ops, for any queries."""
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
