"""Attention of shapes alone: tensors on torch's meta device, which hold no numbers.

It lets the planner run the engine's own prefill to see what it would allocate
(`razor_dist.plan.memory`), with results of the shapes and dtypes of the fused kernels'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial
from razor_dist.kernels.quantized import KeysOrValues, of_one_dtype


def supports(q: Tensor, k: KeysOrValues, v: KeysOrValues, causal: bool, biased: bool) -> bool:
    return q.device.type == "meta" and of_one_dtype(q, k, v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    return Partial(
        torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    )
