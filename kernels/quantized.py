"""Keys and values in 8 bits: whole numbers, with one scale for each token and head.

``x`` of D numbers is kept as ``codes = round(x / scale)``, int8 from -127 to 127, and
``scale = max |x| / 127``, float32. No zero point: keys and values are centred well enough.

To be cut, joined and sent like any other tensor, they are *packed*, int8 ``[..., D + 4]``: the
codes, and after them the four bytes of the scale. To be read, they are `Codes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial

SCALE_BYTES = 4
_LARGEST = 127


@dataclass(frozen=True)
class Codes:
    """Keys or values to be read, ``[K, n, D]``; as far as readers go, a tensor of these numbers."""

    codes: Tensor  # int8 [K, n, D]
    scale: Tensor  # float32 [K, n]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, at: Any) -> Codes:
        """Cut heads and tokens."""
        return Codes(self.codes[at], self.scale[at])

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers, in a tensor of their own."""
        return self.codes.float().mul_(self.scale.unsqueeze(-1)).to(dtype)

    def packed(self) -> Tensor:
        return torch.cat([self.codes, self.scale.unsqueeze(-1).view(torch.int8)], -1)


KeysOrValues: TypeAlias = Tensor | Codes


def row_bytes(dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's key or value in one head, of ``dim`` dimensions."""
    return dim * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)


def quantize(x: Tensor, largest: int = _LARGEST) -> Codes:
    """Round ``x`` ``[..., D]`` to whole numbers from ``-largest`` to ``largest``.

    Where it is not finite, the scale is not either, so that what is read back is NaN.
    """
    x = x.float()
    scale = x.abs().amax(-1) / largest
    codes = torch.round(x / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))
    return Codes(codes.to(torch.int8), scale)


def unpacked(x: KeysOrValues) -> KeysOrValues:
    """Return views of what is packed; what is not, as it is."""
    if isinstance(x, Codes) or x.dtype != torch.int8:
        return x
    codes, scale = x[..., :-SCALE_BYTES], x[..., -SCALE_BYTES:]
    if x.shape[-1] % SCALE_BYTES:  # float32 wants to be aligned
        scale = scale.clone(memory_format=torch.contiguous_format)
    return Codes(codes, scale.view(torch.float32).squeeze(-1))


def packed(x: KeysOrValues) -> Tensor:
    """Return a tensor that can be sent."""
    return x.packed() if isinstance(x, Codes) else x


def attend_codes(q: Tensor, k: Codes, v: Codes, scale: float, bias: Tensor | None) -> Partial:
    """Attention of few queries; see `razor_dist.kernels.attend`.

    It is bound by memory: the scales multiply scores and weights, not all keys and values. ``bias``
    is ``[S]`` or ``[K, G, S]``.
    """
    heads, group, queries, dim = q.shape
    keys = k.shape[1]
    rows = q.reshape(heads, group * queries, dim).float()
    scores = torch.bmm(rows, k.codes.float().transpose(1, 2))
    scores = scores.mul_(k.scale.unsqueeze(1)).view(heads, group, queries, keys).mul_(scale)
    if bias is not None:
        scores += bias if bias.dim() == 1 else bias.unsqueeze(2)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().view(heads, group * queries, keys)
    out = torch.bmm(weights.mul_(v.scale.unsqueeze(1)), v.codes.float())
    return Partial(out.view(q.shape), lse)
