"""torch's own fused attention ops on CUDA, each returning its natural-log log-sum-exp."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from razor_dist.kernels.partial import (
    Partial,
    attend_folded,
    foldable,
    joined,
    merge,
    multiprocessors,
    per_head,
)
from razor_dist.kernels.quantized import KeysOrValues, of_one_dtype

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

# The memory-efficient op wants rows of its mask, and so parts of the keys, aligned to 16 bytes:
# 8 numbers are, in 16 and in 32 bits.
_ALIGN = 8
# Numbers of a head dimension that the ops want a multiple of.
_DIM = 8
# cuDNN makes a plan for every shape and every stride, which takes about 20 ms, and torch keeps all
# of them: a ring's block has other strides in every chunk. So each call has the shape of one plan:
# one KV head, `plan_rows` queries of each of its query heads, and `PLAN_KEYS` keys. The keys are a
# batch of `PLAN_SPLITS` parts, so that even a short chunk, as beside an answer, is work for all of
# a GPU's multiprocessors, each of which computes a tile of `PLAN_TILE` queries. The remaining keys
# and queries, and a chunk's own keys, go to flash attention, which is slower.
PLAN_KEYS, PLAN_SPLITS, PLAN_TILE = 32768, 4, 128
# The compute capability on which cuDNN is used: Hopper, where others measured 1.5 times the speed
# of flash attention. On newer GPUs it has given wrong results (pytorch/pytorch#193893).
CUDNN_ON = (9, 0)


def supports(q: Tensor, k: KeysOrValues, v: KeysOrValues, causal: bool, biased: bool) -> bool:
    """CUDA tensors: flash or cuDNN for 16-bit without a bias, else memory-efficient attention."""
    return q.device.type == "cuda" and of_one_dtype(q, k, v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    heads, group, queries, dim = q.shape
    if dim % _DIM:
        q, k, v = (functional.pad(x, (0, -dim % _DIM)) for x in (q, k, v))
        out, lse = attend(q, k, v, scale, causal, bias)
        return Partial(out[..., :dim], lse)
    flash = bias is None and q.dtype in (torch.float16, torch.bfloat16) and dim <= 256
    long = 2 * queries >= plan_rows(q.device, group) and k.shape[1] >= PLAN_KEYS
    if flash and long and not causal and _takes_cudnn(q, k):
        return _mostly_by_cudnn(q, k, v, scale)

    def op(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if flash:
            out, lse, *_ = _flash(q, k, v, 0.0, causal, False, scale=scale)
        else:
            out, lse, *_ = _efficient(q, k, v, _mask(q, k, mask), True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    if foldable(q, causal, bias):
        # Flash cuts the keys by itself; the other op has one block per head for so few rows.
        # Two blocks for every multiprocessor, so that one computes while the other waits to read.
        parts = 1 if flash else -(-2 * multiprocessors(q.device) // heads)
        return attend_folded(op, q, k, v, bias, parts, _ALIGN)
    k4 = k.unsqueeze(1).expand(heads, group, k.shape[1], dim)
    v4 = v.unsqueeze(1).expand(heads, group, k.shape[1], dim)
    return Partial(*op(q, k4, v4, None if bias is None else per_head(bias)))


def plan_rows(device: torch.device, group: int) -> int:
    """Queries of each of ``group`` heads in a call of cuDNN: whole tiles.

    They are as many as the multiprocessors compute at once: 140 tiles, as of 4096 rows of 5 or 7
    heads, take 132 multiprocessors twice the time of 120. Before 9.15.1 torch avoids cuDNN for
    other lengths (pytorch/pytorch#169849).
    """
    return PLAN_TILE * max(1, multiprocessors(device) // (PLAN_SPLITS * group))


def _takes_cudnn(q: Tensor, k: Tensor) -> bool:
    """True if cuDNN is installed and takes these queries and keys on this GPU."""
    if torch.cuda.get_device_capability(q.device) != CUDNN_ON:
        return False
    rows, keys = q[None, :, 0], k[None, :, :PLAN_KEYS]
    params = torch.backends.cuda.SDPAParams(rows, keys, keys, None, 0.0, False, True)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _mostly_by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Attention of many queries to at least `PLAN_KEYS` keys.

    A last block of queries is filled up with zeros if it is at least half full. Otherwise it goes
    to flash attention, which takes about twice as long for a query.
    """
    heads, group, queries, dim = q.shape
    rows, whole = plan_rows(q.device, group), k.shape[1] // PLAN_KEYS * PLAN_KEYS
    count = max(1, (queries + rows // 2) // rows)
    few = min(queries, count * rows)
    out = q.new_empty(heads, group, few, dim, dtype=torch.float32)
    lse = q.new_empty(heads, group, few, dtype=torch.float32)
    for head, begin in product(range(heads), range(0, few, rows)):
        at = slice(begin, min(few, begin + rows))
        block = q.new_zeros(PLAN_SPLITS, group, rows, dim)
        block[:, :, : at.stop - at.start] = q[head, :, at]
        found = merge(
            _by_cudnn(block, k[head, key : key + PLAN_KEYS], v[head, key : key + PLAN_KEYS], scale)
            for key in range(0, whole, PLAN_KEYS)
        )
        found = merge(
            Partial(*(x[split : split + 1] for x in found)) for split in range(PLAN_SPLITS)
        )
        out[head, :, at] = found.out[0, :, : at.stop - at.start]
        lse[head, :, at] = found.lse[0, :, : at.stop - at.start]
    found = Partial(out, lse)
    if whole < k.shape[1]:
        left = attend(q[:, :, :few], k[:, whole:], v[:, whole:], scale, False, None)
        found = merge([found, left])
    if few == queries:
        return found
    rest = attend(q[:, :, few:], k, v, scale, False, None)
    return joined([found, rest])


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Attention of ``q`` ``[PLAN_SPLITS, G, T, D]`` to ``k`` and ``v`` ``[PLAN_KEYS, D]``."""
    found = _cudnn(q, _split(k), _split(v), None, True, 0.0, False, False, scale=scale)
    return Partial(found[0], found[1].view(q.shape[:-1]))


def _split(x: Tensor) -> Tensor:
    """View ``x`` ``[PLAN_KEYS, D]`` as ``[PLAN_SPLITS, 1, PLAN_KEYS / PLAN_SPLITS, D]``."""
    assert x.stride(1) == 1
    length = PLAN_KEYS // PLAN_SPLITS
    part = length * x.stride(0)
    return x.as_strided((PLAN_SPLITS, 1, length, x.shape[1]), (part, part, *x.stride()))


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
