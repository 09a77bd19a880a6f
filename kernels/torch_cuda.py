"""torch's own fused attention ops on CUDA, each returning its natural-log log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from razor_dist.kernels.partial import (
    Partial,
    attend_folded,
    foldable,
    over_keys,
    per_head,
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

# The memory-efficient op wants rows of its mask, and so parts of the keys, aligned to 16 bytes:
# 8 numbers are, in 16 and in 32 bits.
_ALIGN = 8
# Numbers of a head dimension that the ops want a multiple of.
_DIM = 8
# cuDNN makes a plan for every shape, which takes as long as attention to tens of thousands of keys.
# So it gets queries padded to a multiple of the first number, if there are at least four times as
# many, and keys in blocks of the second; the rest and a chunk's own keys are flash attention's.
_QUERIES, _KEYS = 512, 32768
# By others' measurements it is half as fast again on Hopper; newer ones have given wrong results
# (pytorch/pytorch#193893).
_CUDNN_ON = (9, 0)


def supports(q: Tensor, causal: bool, bias: Tensor | None) -> bool:
    """CUDA tensors: flash or cuDNN for 16-bit without a bias, else memory-efficient attention."""
    return q.device.type == "cuda"


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    heads, group, queries, dim = q.shape
    if dim % _DIM:
        q, k, v = (functional.pad(x, (0, -dim % _DIM)) for x in (q, k, v))
        out, lse = attend(q, k, v, scale, causal, bias)
        return Partial(out[..., :dim], lse)
    flash = bias is None and q.dtype in (torch.float16, torch.bfloat16) and dim <= 256
    long = queries >= 4 * _QUERIES and k.shape[1] >= _KEYS
    if flash and long and not causal and _takes_cudnn(q, k):
        return _by_cudnn(q, k, v, scale)

    def op(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if flash:
            out, lse, *_ = _flash(q, k, v, 0.0, causal, False, scale=scale)
        else:
            out, lse, *_ = _efficient(q, k, v, _mask(q, k, mask), True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    if foldable(q, causal, bias):
        # Flash cuts the keys by itself; the other op has one block per head for so few rows.
        # Two blocks for every multiprocessor, so that one computes while the other waits to read.
        parts = 1 if flash else -(-2 * _multiprocessors(q.device) // heads)
        return attend_folded(op, q, k, v, bias, parts, _ALIGN)
    k4 = k.unsqueeze(1).expand(heads, group, k.shape[1], dim)
    v4 = v.unsqueeze(1).expand(heads, group, k.shape[1], dim)
    return Partial(*op(q, k4, v4, None if bias is None else per_head(bias)))


def _takes_cudnn(q: Tensor, k: Tensor) -> bool:
    """Tell if cuDNN is there and computes this on this GPU."""
    if torch.cuda.get_device_capability(q.device) != _CUDNN_ON:
        return False
    rows, keys = q[None, :, 0], k[None, :, :_KEYS]
    params = torch.backends.cuda.SDPAParams(rows, keys, keys, None, 0.0, False, True)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Attention of many queries to all of `_KEYS` keys and more, in shapes that come again."""
    heads, group, queries, dim = q.shape
    rows = -(-queries // _QUERIES) * _QUERIES
    padded = functional.pad(q, (0, 0, 0, rows - queries)).reshape(1, heads * group, rows, dim)

    def attend_block(keys: slice) -> Partial:
        if keys.stop > k.shape[1]:
            return attend(q, k[:, keys], v[:, keys], scale, False, None)
        # Fewer key heads than of queries: nothing is expanded.
        block = k[:, keys].unsqueeze(0), v[:, keys].unsqueeze(0)
        out, lse, *_ = _cudnn(padded, *block, None, True, 0.0, False, False, scale=scale)
        out, lse = (x.view(heads, group, rows, -1)[:, :, :queries] for x in (out, lse))
        return Partial(out, lse.squeeze(-1))  # lse [1, H, T, 1]

    return over_keys(attend_block, k.shape[1], _KEYS)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _mask(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask in the dtype of ``q``, expanded to the scores' shape, its rows aligned."""
    if mask is None:
        return None
    keys = k.shape[2]
    width = -(-keys // _ALIGN) * _ALIGN
    if q.dtype == torch.float16:
        mask = mask.clamp(min=torch.finfo(torch.float16).min / 2)  # `HIDDEN` would be -inf
    mask = mask.to(q.dtype)
    steps = [step for step, n in zip(mask.stride()[:3], mask.shape, strict=False) if n > 1]
    if width > keys or any(number % _ALIGN for number in (mask.storage_offset(), *steps)):
        padded = mask.new_zeros(*mask.shape[:-1], width)
        padded[..., :keys] = mask
        mask = padded[..., :keys]
    return mask.expand(*q.shape[:-1], keys)
