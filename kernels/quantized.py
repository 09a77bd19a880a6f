"""Keys and values in 8 or 4 bits: whole numbers, with one scale for each token and head.

What a token is kept as depends on the token alone: not on its neighbours, nor on how a prompt is
cut or who holds it. Both are symmetric, ``x = scale * level``; the dtype of the codes says which
it is:

* `INT8`: levels are the codes, -127 to 127, and ``scale = max |x| / 127``.
* `INT4`: 16 levels, -15, -13, ..., 15, so that none is lost to 0 having no sign. A byte holds those
  of dimensions 2d and 2d + 1, ``(level + 15) / 2`` in its lower and its upper half. What is rounded
  is not ``x`` but ``hadamard(x)``, as a few dimensions of keys are far larger than all others,
  which would be rounded to nothing; the transform deals them out evenly (QuaRot, arXiv 2404.00456).
  Readers need not transform keys and values back: scores of transformed queries are the same, and
  what is weighted is transformed back once (`Codes.transform`).

To be cut, joined and sent like any other tensor, they are *packed*, the bytes of the codes and
after them the four of the float32 scale. To be read, they are `Codes`.
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
    """Keys or values to be read, ``[K, n, D]``; as far as readers go, a tensor of these numbers."""

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
        """Cut heads and tokens."""
        return Codes(self.codes[at], self.scale[at])

    def transform(self, x: Tensor) -> Tensor:
        """Take queries to where the levels are, or weighted levels from there; in its dtype."""
        return hadamard(x.float()).to(x.dtype) if self.transformed else x

    def levels(self) -> Tensor:
        """Return float32 ``[K, n, D]``, to be multiplied by the scale."""
        if not self.transformed:
            return self.codes.float()
        both = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)
        return both.float().mul_(2).sub_(15)

    def scaled(self) -> Tensor:
        """Return levels times scale, float32 ``[K, n, D]``: the numbers, or their transform."""
        return self.levels().mul_(self.scale.unsqueeze(-1))

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers, in a tensor of their own."""
        return self.transform(self.scaled()).to(dtype)

    def packed(self) -> Tensor:
        return torch.cat([self.codes, self.scale.unsqueeze(-1).view(self.codes.dtype)], -1)


KeysOrValues: TypeAlias = Tensor | Codes


def code_width(dim: int, dtype: torch.dtype) -> int:
    """Return the numbers of ``dtype`` that keep ``dim`` dimensions, without their scale."""
    return dim // 2 if dtype == INT4 else dim


def packed_width(dim: int, dtype: torch.dtype) -> int:
    """Return the numbers of ``dtype`` that keep ``dim`` dimensions."""
    return code_width(dim, dtype) + (SCALE_BYTES if has_scale(dtype) else 0)


def row_bytes(dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's key or value in one head, of ``dim`` dimensions."""
    return packed_width(dim, dtype) * dtype.itemsize


def has_scale(dtype: torch.dtype) -> bool:
    """Tell if keys and values of this dtype are `Codes`."""
    return dtype in _LARGEST


def hadamard(x: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of ``x``, float32 ``[..., D]``, not normalised.

    It is taken of each B dimensions side by side, B the largest power of 2 that divides D; done
    twice, it multiplies by B. All implementations add in this order, so that they agree in the last
    bit.
    """
    block, half = block_of(x.shape[-1]), 1
    while half < block:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return x


def block_of(dim: int) -> int:
    """Return the dimensions that `hadamard` takes together."""
    return dim & -dim


def quantize(x: Tensor, dtype: torch.dtype = INT8) -> Codes:
    """Round ``x`` ``[..., D]``, of an even D where ``dtype`` is `INT4`.

    Where it is not finite, the scale is not either, so that what is read back is NaN.
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
    """Return views of what is packed; what is not, as it is."""
    if isinstance(x, Codes) or not has_scale(x.dtype):
        return x
    codes, scale = x[..., :-SCALE_BYTES], x[..., -SCALE_BYTES:]
    if x.shape[-1] % SCALE_BYTES:  # float32 wants to be aligned
        scale = scale.clone(memory_format=torch.contiguous_format)
    return Codes(codes, scale.view(torch.float32).squeeze(-1))


def packed(x: KeysOrValues) -> Tensor:
    """Return a tensor that can be sent."""
    return x.packed() if isinstance(x, Codes) else x


def attend_codes(q: Tensor, k: Codes, v: Codes, scale: float, bias: Tensor | None) -> Partial:
    """Attention of few queries, to levels: both sides of it are yet to be transformed.

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
