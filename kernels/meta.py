"""Attention of shapes alone: tensors on torch's meta device, which hold no numbers.

It lets the planner run the engine's own prefill to see what it would allocate
(`razor_dist.plan.memory`), with results of the shapes and dtypes of the fused kernels'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial


def supports(q: Tensor, causal: bool, bias: Tensor | None) -> bool:
    return q.device.type == "meta"


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    return Partial(
        torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    )
