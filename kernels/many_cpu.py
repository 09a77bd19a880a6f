"""Attention of many queries on CPU by compiled C++ (`razor_dist.kernels.compiled`).

It reads keys and values in the dtype that they are stored in, codes included, and computes all
windows in one call. torch's own op does neither, and takes up to a quarter longer (docs/LOG.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels.compiled import operations
from razor_dist.kernels.partial import Partial, foldable
from razor_dist.kernels.quantized import Codes, KeysOrValues

# Head dimensions are multiples of 16, the float32 numbers of the widest vector. With codes they are
# multiples of 32, as 16-bit numbers are multiplied in pairs. Above 512, int32 sums could overflow.
_WIDTH = 16
_MOST_CODES = 512
_DTYPES = (torch.float32, torch.bfloat16)


def supports(q: Tensor, k: KeysOrValues, v: KeysOrValues, causal: bool, biased: bool) -> bool:
    """True for many queries without a bias, and keys and values that are read as they are stored.

    A few queries that see the same keys are bound by memory instead, and go to
    `razor_dist.kernels.partial.attend_folded`.
    """
    return (
        q.device.type == "cpu"
        and not biased
        and q.dtype in _DTYPES
        and q.shape[-1] % _WIDTH == 0
        and not foldable(q, causal, None)
        and not (torch.is_grad_enabled() and q.requires_grad)
        and _reads(k)
        and _reads(v)
        and operations() is not None
    )


def _reads(x: KeysOrValues) -> bool:
    if isinstance(x, Codes):
        return x.shape[-1] % (2 * _WIDTH) == 0 and x.shape[-1] <= _MOST_CODES
    return x.dtype in _DTYPES and not (torch.is_grad_enabled() and x.requires_grad)


def attend(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    scale: float,
    causal: bool,
    bias: Tensor | None = None,
    first: Tensor | None = None,
) -> Partial:
    """See `razor_dist.kernels.attend` and `razor_dist.kernels.attend_windows`; in float32."""
    assert bias is None
    (keys, k_scale), (values, v_scale) = data_of(k), data_of(v)
    return Partial(
        *operations().attend_many(
            _rows(q.float()), keys, values, k_scale, v_scale, first, causal, scale
        )
    )


def data_of(x: KeysOrValues) -> tuple[Tensor, Tensor | None]:
    """The numbers of ``x`` with contiguous rows, and the scales if ``x`` is `Codes`."""
    if isinstance(x, Codes):
        scale = x.scale if x.scale.stride(-1) == 1 else x.scale.contiguous()
        return _rows(x.codes), scale
    return _rows(x), None


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
