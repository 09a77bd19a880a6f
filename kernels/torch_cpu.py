"""torch's flash attention on CPU, with its log-sum-exp.

``aten::_scaled_dot_product_flash_attention_for_cpu`` is private API; pyproject.toml pins torch and
``tests/test_kernels.py`` checks what we rely on: natural-log lse, an upper-left aligned causal
mask, broadcast key heads (stride 0) and an additive mask, float32 whatever the queries are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial, attend_folded, foldable, per_head
from razor_dist.kernels.quantized import KeysOrValues, of_one_dtype

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# From 192 and from 768 queries on, torch's kernel takes larger blocks and reads keys less often.
_LARGER_BLOCKS = (192, 768)


def supports(q: Tensor, k: KeysOrValues, v: KeysOrValues, causal: bool, biased: bool) -> bool:
    served = (torch.float32, torch.bfloat16, torch.float16)
    return q.device.type == "cpu" and q.dtype in served and of_one_dtype(q, k, v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    def op(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    heads, group, queries, dim = q.shape
    if foldable(q, causal, bias):
        # Three heads on two threads would leave one idle for a quarter of the time.
        threads = torch.get_num_threads()
        return attend_folded(op, q, k, v, bias, threads // math.gcd(heads, threads))
    if not causal and bias is None and any(queries < n <= group * queries for n in _LARGER_BLOCKS):
        return attend_folded(op, q, k, v, None, 1)
    k4 = k.unsqueeze(1).expand(heads, group, k.shape[1], dim)
    v4 = v.unsqueeze(1).expand(heads, group, k.shape[1], dim)
    return Partial(*op(q, k4, v4, None if bias is None else per_head(bias)))
