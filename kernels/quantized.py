"""Keys and values in 8 or 4 bits: whole numbers, with one scale for each token and head.

A token's codes depend on that token alone: not on its neighbours, the chunks of its prompt, or the
rank that stores it. Both formats are symmetric, ``x = scale * level``; the dtype of the codes says
which one it is:

* `INT8`: levels are the codes, -127 to 127, and ``scale = max |x| / 127``.
* `INT4`: 16 levels, -15, -13, ..., 15: a level of 0 would leave one of 16 codes unused. A byte has
  ``(level + 15) / 2`` of dimension 2d in its lower half and that of 2d + 1 in its upper half. Not
  ``x`` is rounded but ``hadamard(x)``: a few dimensions of keys are far larger than all others,
  which would be rounded to 0, and the transform spreads them evenly (QuaRot, arXiv 2404.00456).
  Readers need not transform keys and values back: scores of transformed queries are the same, and
  the weighted sum of values is transformed back once (`Codes.transform`).

*Packed*, a token is the bytes of its codes and then the four of its float32 scale, in a tensor that
can be cut, joined and sent like any other. `Codes` are the form that kernels read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial

INT8, INT4 = torch.int8, torch.uint8
SCALE_BYTES = 4
_LARGEST = {INT8: 127, INT4: 15}  # levels


@dataclass(frozen=True)
class Codes:
    """Rounded keys or values ``[K, n, D]``, indexed and converted as a tensor is."""

    codes: Tensor  # INT8 [K, n, D] or INT4 [K, n, D / 2]
    scale: Tensor  # float32 [K, n]

    @property
    def shape(self) -> torch.Size:
        *rows, width = self.codes.shape
        return torch.Size([*rows, width * (2 if self.transformed else 1)])

    @property
    def transformed(self) -> bool:
        return self.codes.dtype == INT4

    def __getitem__(self, at: Any) -> Codes:
        """Index heads and tokens."""
        return Codes(self.codes[at], self.scale[at])

    def transform(self, x: Tensor) -> Tensor:
        """Transform queries as `levels` are, or weighted levels back, in the dtype of ``x``."""
        return hadamard(x.float()).to(x.dtype) if self.transformed else x

    def levels(self) -> Tensor:
        """The levels, float32 ``[K, n, D]``, still to be multiplied by the scale."""
        if not self.transformed:
            return self.codes.float()
        both = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)
        return both.float().mul_(2).sub_(15)

    def scaled(self) -> Tensor:
        """Levels times scale, float32 ``[K, n, D]``: the numbers, or their transform."""
        return self.levels().mul_(self.scale.unsqueeze(-1))

    def to(self, dtype: torch.dtype) -> Tensor:
        """The numbers, transformed back, in a new tensor."""
        return self.transform(self.scaled()).to(dtype)

    def packed(self) -> Tensor:
        return torch.cat([self.codes, self.scale.unsqueeze(-1).view(self.codes.dtype)], -1)


KeysOrValues: TypeAlias = Tensor | Codes


def of_one_dtype(q: Tensor, k: KeysOrValues, v: KeysOrValues) -> bool:
    """True for keys and values that are tensors of the queries' dtype, not `Codes`."""
    return all(isinstance(x, Tensor) and x.dtype == q.dtype for x in (k, v))


def code_width(dim: int, dtype: torch.dtype) -> int:
    """Elements of ``dtype`` for one token's ``dim`` dimensions in a head, without the scale."""
    return dim // 2 if dtype == INT4 else dim


def packed_width(dim: int, dtype: torch.dtype) -> int:
    """Elements of ``dtype`` for one token's ``dim`` dimensions in a head, with the scale if any."""
    return code_width(dim, dtype) + (SCALE_BYTES if has_scale(dtype) else 0)


def row_bytes(dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token's key or value in a head of ``dim`` dimensions."""
    return packed_width(dim, dtype) * dtype.itemsize


def has_scale(dtype: torch.dtype) -> bool:
    """True if keys and values of this dtype are `Codes`."""
    return dtype in _LARGEST


def hadamard(x: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of ``x``, float32 ``[..., D]``, not normalised.

    Each B adjacent dimensions are transformed together, where B is the largest power of 2 that
    divides D; done twice, it multiplies by B. All implementations add in this order, so that they
    agree in the last bit.
    """
    block, half = block_of(x.shape[-1]), 1
    while half < block:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return x


def block_of(dim: int) -> int:
    """B of `hadamard`."""
    return dim & -dim


def quantize(x: Tensor, dtype: torch.dtype = INT8) -> Codes:
    """Round ``x`` ``[..., D]`` to codes; `INT4` needs an even D.

    If a number is not finite, neither is its token's scale, so that NaN is read back.
    """
    x = x.float()
    if dtype == INT4:
        x = hadamard(x)
    # By a tensor: CUDA multiplies by the rounded reciprocal of a host's number.
    scale = x.abs().amax(-1, keepdim=True) / x.new_full((), _LARGEST[dtype])
    tiny = torch.finfo(torch.float32).tiny
    if dtype == INT8:
        return Codes(torch.round(x / scale.clamp(min=tiny)).to(dtype), scale.squeeze(-1))
    step = (2 * scale).clamp(min=tiny)
    codes = (torch.round(x / step - 0.5) + 8).to(dtype)
    return Codes(codes[..., ::2] | codes[..., 1::2] << 4, scale.squeeze(-1) / block_of(x.shape[-1]))


def unpacked(x: KeysOrValues) -> KeysOrValues:
    """View a packed tensor as `Codes`; return anything else unchanged."""
    if isinstance(x, Codes) or not has_scale(x.dtype):
        return x
    codes, scale = x[..., :-SCALE_BYTES], x[..., -SCALE_BYTES:]
    if x.shape[-1] % SCALE_BYTES:  # float32 wants to be aligned
        scale = scale.clone(memory_format=torch.contiguous_format)
    return Codes(codes, scale.view(torch.float32).squeeze(-1))


def packed(x: KeysOrValues) -> Tensor:
    """One tensor to send: `Codes` are packed."""
    return x.packed() if isinstance(x, Codes) else x


def attend_codes(q: Tensor, k: Codes, v: Codes, scale: float, bias: Tensor | None) -> Partial:
    """Attention of few queries to codes; ``q`` and ``out`` are transformed as the codes are.

    It is bound by memory: the scales multiply scores and weights, not all keys and values. ``bias``
    is ``[S]`` or ``[K, G, S]``; see `razor_dist.kernels.attend`.
    """
    heads, group, queries, dim = q.shape
    keys = k.shape[1]
    rows = q.reshape(heads, group * queries, dim).float()
    scores = torch.bmm(rows, k.levels().transpose(1, 2))
    scores = scores.mul_(k.scale.unsqueeze(1)).view(heads, group, queries, keys).mul_(scale)
    if bias is not None:
        scores += bias if bias.dim() == 1 else bias.unsqueeze(2)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().view(heads, group * queries, keys)
    out = torch.bmm(weights.mul_(v.scale.unsqueeze(1)), v.levels())
    return Partial(out.view(q.shape), lse)
