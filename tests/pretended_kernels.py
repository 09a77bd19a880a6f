"""Kernels of the pretended GPU (`tests.pretended_gpu`), made of torch's operations.

torch's attention for CUDA, with what it insists on; and those of our Triton kernels that have a
program for every token, which take seconds to interpret. Their own tests interpret them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.partials import _plain_op

# Outputs of the attention operations that inference has no use for.
_SEEDS = (torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), torch.empty(0))


def _of_16_bits(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype in (torch.float16, torch.bfloat16), f"no kernel for {x.dtype}"
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 and x.stride(-1) == 1


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *, scale: float
) -> Any:
    _of_16_bits(q, k, v)
    assert q.shape[1] == k.shape[1] == v.shape[1] and not dropout
    out, lse = _plain_op(q, k, v, None, scale, causal)
    return out.to(q.dtype), lse, None, None, q.shape[2], k.shape[2], *_SEEDS


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, with_lse: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float,
) -> Any:  # fmt: skip
    _of_16_bits(q, k, v)
    assert with_lse and not dropout and mask is None
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = _plain_op(q, k, v, None, scale, causal)
    return out.to(q.dtype), lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *_SEEDS


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, with_lse: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float,
) -> Any:  # fmt: skip
    assert q.shape[1] == k.shape[1] == v.shape[1] and with_lse and not dropout
    if mask is not None:
        assert mask.dtype == q.dtype and mask.shape == (*q.shape[:3], k.shape[2])
        steps = zip(mask.stride()[:3], mask.shape, strict=False)
        assert all(step % 8 == 0 for step, n in steps if n > 1) and mask.storage_offset() % 8 == 0
    out, lse = _plain_op(q, k, v, mask, scale, causal)
    return out.to(q.dtype), functional.pad(lse, (0, -q.shape[2] % 32)), *_SEEDS[:2]


ATTENTION: dict[Any, Any] = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default: op
    for name, op in (("flash", _flash), ("cudnn", _cudnn), ("efficient", _efficient))
}


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    width = cos.shape[-1]
    c, s = (x[:, None, :, : width // 2].float() for x in (cos, sin))
    found = []
    for x in (q, k):
        turned = x[..., :width].float()
        if interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat((a * c - b * s, b * c + a * s), -1)
        found.append(torch.cat((turned.to(x.dtype), x[..., width:]), -1))
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in found)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), total


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def _merge_pair(one: Any, other: Any) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(one[1], other[1])
    weights = [(x[1] - lse).exp().nan_to_num(0.0).unsqueeze(-1) for x in (one, other)]
    return one[0].float() * weights[0] + other[0].float() * weights[1], lse


def install() -> None:
    """Have our calls of Triton's kernels for every token call these functions."""
    from razor_dist.kernels import fused_triton, merge_triton

    fused_triton.rotate, fused_triton.add_rms_norm = _rotate, _add_rms_norm
    fused_triton.gated, merge_triton.merge_pair = _gated, _merge_pair
