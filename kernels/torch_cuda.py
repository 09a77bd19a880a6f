"""torch's own fused attention ops on CUDA, each returning its natural-log log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial, attend_folded, foldable, per_head

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

# The memory-efficient op wants rows of its mask, and so parts of the keys, aligned to 16 bytes:
# 8 numbers are, in 16 and in 32 bits.
_ALIGN = 8
# From so many queries on, cuDNN is the faster one (by others' measurements on Hopper).
_LONG = 512


def supports(q: Tensor, causal: bool, bias: Tensor | None) -> bool:
    """CUDA tensors; flash or cuDNN for 16-bit without a bias, else memory-efficient attention."""
    return q.device.type == "cuda" and q.shape[-1] % 8 == 0


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    flash = bias is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256

    def op(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if flash:
            out, lse, *_ = _flash(q, k, v, 0.0, causal, False, scale=scale)
        else:
            out, lse, *_ = _efficient(q, k, v, _mask(q, k, mask), True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    heads, group, queries, dim = q.shape
    if flash and queries >= _LONG:
        # Fewer key heads than of queries: nothing is expanded.
        long = q.reshape(1, heads * group, queries, dim), k.unsqueeze(0), v.unsqueeze(0)
        if _cudnn_takes(*long, causal):
            out, lse, *_ = _cudnn(*long, None, True, 0.0, causal, False, scale=scale)
            return Partial(out.reshape(q.shape), lse.reshape(q.shape[:3]))  # lse [1, H, T, 1]
    if foldable(q, causal, bias):
        # Flash cuts the keys by itself; the other op has one block per head for so few rows.
        # Two blocks for every multiprocessor, so that one computes while the other waits to read.
        parts = 1 if flash else -(-2 * _multiprocessors(q.device) // heads)
        return attend_folded(op, q, k, v, bias, parts, _ALIGN)
    k4 = k.unsqueeze(1).expand(heads, group, k.shape[1], dim)
    v4 = v.unsqueeze(1).expand(heads, group, k.shape[1], dim)
    return Partial(*op(q, k4, v4, None if bias is None else per_head(bias)))


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Tell if cuDNN is there and computes this on this GPU."""
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, True)
    return torch.backends.cuda.can_use_cudnn_attention(params)


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
