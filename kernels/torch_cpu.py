"""torch's flash attention on CPU, with its log-sum-exp.

``aten::_scaled_dot_product_flash_attention_for_cpu`` is private API; pyproject.toml pins torch and
``tests/test_kernels.py`` checks what we rely on: natural-log lse, an upper-left aligned causal
mask, broadcast key heads (stride 0) and an additive mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial, merge

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Below this many queries the group is folded into the query axis, so that a key is read once for
# its whole group instead of once per query head: decode is bound by memory.
_FOLD_BELOW = 16
# Fewer keys than this per thread are not worth splitting.
_SPLIT_KEYS = 512


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
            partial.out.view(heads, group, queries, dim), partial.lse.view(heads, group, queries)
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

    The op is parallel over batch, heads and blocks of queries only; a single head with a single
    query would run on one core. Parts of the keys take the place of its head axis, and the parts
    are merged by their lse (flash-decoding).
    """
    heads, _, rows, dim = q.shape
    keys = k.shape[1]
    parts = min(-(-torch.get_num_threads() // heads), keys // _SPLIT_KEYS)
    if parts <= 1 or bias is not None:
        return _call(q, k.unsqueeze(1), v.unsqueeze(1), scale, False, bias)
    length = keys // parts
    main = length * parts
    qs = q.expand(heads, parts, rows, dim)
    out, lse = _call(
        qs,
        k[:, :main].unflatten(1, (parts, length)),
        v[:, :main].unflatten(1, (parts, length)),
        scale,
        False,
        None,
    )
    partials = [Partial(out[:, i : i + 1], lse[:, i : i + 1]) for i in range(parts)]
    if main < keys:
        partials.append(_call(q, k[:, None, main:], v[:, None, main:], scale, False, None))
    return merge(partials)
