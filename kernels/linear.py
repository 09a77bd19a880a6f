"""Linear layers on CPUs: in float32 by the faster of torch's ways, or with 8-bit weights.

On x86 `torch.nn.functional.linear` calls MKL, which on processors of other makers than Intel keeps
to slower code: on an AMD EPYC with two threads a matrix-vector product reads its matrix at 15 GB/s
where the machine reads 40, and a product of many rows runs at 190 GFLOP/s where oneDNN, which torch
carries too, has 420 (docs/LOG.md). No Intel CPU has been measured. The choice is made here, once.

``mkldnn::_linear_pointwise`` is the op that torch's own compiler emits, and private; pyproject.toml
pins torch and ``tests/test_kernels_linear.py`` checks what we rely on.
"""

from __future__ import annotations

import math
from typing import Any

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


class Int8Linear(nn.Linear):
    """A linear layer of 8-bit integers: ``y = s_x s_w (q_x . q_w)``, accumulated in 32 bits.

    ``q_w = round(w / s_w)`` with a scale for each output, ``q_x = round(x / s_x)`` with one per
    row, so that a row's result is the same in any company. Made of a float32 layer on CPU by
    `use_int8_linear`; ``weight`` stays what it was, and is not read.
    """

    _packed: Any
    _bounds: Tensor
    _reduced: bool

    def pack(self) -> None:
        weight = self.weight.detach()
        scales = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny).double() / 127
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        # torch scales the rows of a call together, by the least and the largest number in them:
        # with these, and each row divided by its own largest, that is the same in every call.
        self._bounds = torch.zeros(1, self.in_features)
        self._bounds[0, 0], self._bounds[0, -1] = 1, -1
        # Without VNNI pairs of products are added up in 16 bits, which 8 bits times 8 can exceed.
        self._reduced = not torch.cpu._is_vnni_supported()

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        largest = rows.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(rows.dtype).tiny)
        scaled = torch.cat([rows / largest, self._bounds])
        product = torch.ops.quantized.linear_dynamic(scaled, self._packed, self._reduced)[:-1]
        out: Tensor = product.mul_(largest).view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def use_fast_linear(model: nn.Module) -> None:
    """Have a model's plain `torch.nn.Linear` layers computed by `linear`; subclasses are left."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def use_int8_linear(model: nn.Module) -> None:
    """Make `Int8Linear` of a model's linear layers, the output head among them."""
    for module in model.modules():
        if type(module) in (nn.Linear, Linear):
            module.__class__ = Int8Linear
            assert isinstance(module, Int8Linear)
            module.pack()
