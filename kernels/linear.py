"""Linear layers on x86 CPUs in float32, by the faster of torch's ways to compute them.

`torch.nn.functional.linear` calls MKL, which on processors of other makers than Intel keeps to
slower code: on an AMD EPYC with two threads a matrix-vector product reads its matrix at 15 GB/s
where the machine reads 40, and a product of many rows runs at 190 GFLOP/s where oneDNN, which torch
carries too, has 420 (docs/LOG.md). No Intel CPU has been measured. The choice is made here, once.

``mkldnn::_linear_pointwise`` is the op that torch's own compiler emits, and private; pyproject.toml
pins torch and ``tests/test_kernels_linear.py`` checks what we rely on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

# A matrix of one vector's product is cut into up to so many blocks of rows: a batch of products,
# which MKL computes side by side and by better code than a single one.
_BLOCKS = 16

_AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as `torch.nn.functional.linear` but for rounding.

    ``x`` is ``[..., I]``, ``weight`` ``[O, I]``, ``bias`` ``[O]`` and the result ``[..., O]``.
    """
    if not _served(x, weight):
        return functional.linear(x, weight, bias)
    outputs, inputs = weight.shape
    blocks = math.gcd(outputs, _BLOCKS)
    if x.numel() != inputs or blocks == 1:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    # A transposed row, not a reshaped one: strides (1, I) lead MKL to the faster of its two ways.
    column = x.reshape(1, inputs).t().expand(blocks, inputs, 1)
    product = torch.bmm(weight.unflatten(0, (blocks, -1)), column).view(*x.shape[:-1], outputs)
    return product if bias is None else product + bias


def _served(x: Tensor, weight: Tensor) -> bool:
    """Tell if the other ways than torch's default compute it; they have no gradients."""
    return (
        _AVAILABLE
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_fast_linear(model: nn.Module) -> None:
    """Have a model's plain `torch.nn.Linear` layers computed by `linear`; subclasses are left."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
