"""torch's own fused attention ops on CUDA, each returning its natural-log log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial


def supports(q: Tensor, causal: bool, bias: Tensor | None) -> bool:
    """CUDA tensors; flash for 16-bit without a bias, memory-efficient attention otherwise."""
    return q.device.type == "cuda" and q.shape[-1] % 8 == 0


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    """See `razor_dist.kernels.attend`."""
    heads, group, queries, dim = q.shape
    keys = k.shape[1]
    if not causal and queries == 1 and bias is None:
        # One row per query head: fold the group into the query axis and read each key once.
        out, lse = _flash_or_efficient(
            q.reshape(heads, 1, group, dim), k.unsqueeze(1), v.unsqueeze(1), scale, False, None
        )
        return Partial(out.reshape(heads, group, 1, dim), lse.reshape(heads, group, 1))
    k4 = k.unsqueeze(1).expand(heads, group, keys, dim)
    v4 = v.unsqueeze(1).expand(heads, group, keys, dim)
    return Partial(*_flash_or_efficient(q, k4, v4, scale, causal, bias))


def _flash_or_efficient(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if bias is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out, lse[..., : q.shape[2]]
    mask = None
    if bias is not None:
        rows = 1 if bias.dim() == 1 else bias.shape[-2]
        # The op wants the last dimension's stride aligned to 16 bytes: pad, then slice.
        width = -(-k.shape[2] // 8) * 8
        padded = torch.zeros(rows, width, dtype=q.dtype, device=q.device)
        padded[:, : k.shape[2]] = bias.view(rows, -1)
        mask = padded[:, : k.shape[2]].expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]
