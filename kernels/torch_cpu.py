"""torch's flash attention on CPU, with its log-sum-exp.

``aten::_scaled_dot_product_flash_attention_for_cpu`` is private API; pyproject.toml pins torch and
``tests/test_kernels.py`` checks what we rely on: natural-log lse, an upper-left aligned causal
mask, broadcast key heads (stride 0) and an additive mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Below this many queries the group is folded into the query axis, so that a key is read once for
# its whole group instead of once per query head: decode is bound by memory.
_FOLD_BELOW = 16
# Fewer keys than this per thread are not worth splitting.
_SPLIT_KEYS = 256


def supports(q: Tensor, causal: bool, bias: Tensor | None) -> bool:
    """CPU tensors in float32, bfloat16 or float16."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    """See `razor_dist.kernels.attend`."""
    heads, group, queries, dim = q.shape
    keys = k.shape[1]
    if not causal and queries <= _FOLD_BELOW and (bias is None or bias.dim() == 1):
        folded = q.reshape(heads, 1, group * queries, dim)
        partial = _split_keys(folded, k, v, scale, bias)
        return Partial(
            partial.out.reshape(heads, group, queries, dim),
            partial.lse.reshape(heads, group, queries),
        )
    k4 = k.unsqueeze(1).expand(heads, group, keys, dim)
    v4 = v.unsqueeze(1).expand(heads, group, keys, dim)
    return _call(q, k4, v4, scale, causal, bias)


def _call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    mask = None if bias is None else bias.to(q.dtype).view(1, 1, *_two_dims(bias))
    return Partial(*_flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale))


def _two_dims(bias: Tensor) -> tuple[int, int]:
    return (1, bias.shape[-1]) if bias.dim() == 1 else (bias.shape[-2], bias.shape[-1])


def _split_keys(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Partial:
    """Attend few queries over many keys, the keys cut so that every thread has a share.

    The op is parallel over batch, heads and blocks of queries only: a single head would run on
    one core, and three heads on two cores would leave one idle for a quarter of the time. Parts of
    the keys take the place of its head axis, and are merged by their lse (flash-decoding).
    """
    heads, _, rows, dim = q.shape
    keys, threads = k.shape[1], torch.get_num_threads()
    parts = min(threads // math.gcd(heads, threads), keys // _SPLIT_KEYS)
    if parts <= 1:
        return _call(q, k.unsqueeze(1), v.unsqueeze(1), scale, False, bias)
    length = keys // parts
    main = length * parts
    mask = rest = None
    if bias is not None:
        # A part may be hidden altogether, for which the op reports lse = 0, not -inf: a finite
        # bias gives it an lse whose weight in the merge is 0.
        bias = bias.clamp(min=torch.finfo(q.dtype).min / 2)
        mask, rest = bias[:main].view(1, parts, 1, length), bias[main:]
    out, lse = _flash(
        q.expand(heads, parts, rows, dim),
        k[:, :main].unflatten(1, (parts, length)),
        v[:, :main].unflatten(1, (parts, length)),
        0.0,
        False,
        attn_mask=None if mask is None else mask.to(q.dtype),
        scale=scale,
    )
    if main < keys:
        last = _call(q, k[:, None, main:], v[:, None, main:], scale, False, rest)
        out, lse = torch.cat([out, last.out], 1), torch.cat([lse, last.lse], 1)
    # Few and short operations: decode runs this in every layer for every token.
    weights = torch.softmax(lse, 1).unsqueeze(-1)
    return Partial((out * weights).sum(1), torch.logsumexp(lse, 1))
