"""Attention of many queries on CPU by the compiled operation: `razor_dist.kernels.compiled`.

Keys are read as they are kept, codes among them, and windows in one call; torch's own op knows
neither, and takes up to a quarter longer (docs/LOG.md).
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


def supports(q: Tensor, causal: bool, bias: Tensor | None) -> bool:
    """Tell if these queries are many, of a common head dimension, and scored without a bias.

    A few that see the same keys are bound by memory, and shared out otherwise
    (`razor_dist.kernels.partial.attend_folded`).
    """
    return (
        q.device.type == "cpu"
        and bias is None
        and q.dtype in _DTYPES
        and q.shape[-1] % _WIDTH == 0
        and not foldable(q, causal, bias)
        and not (torch.is_grad_enabled() and q.requires_grad)
        and operations() is not None
    )


def reads(x: KeysOrValues) -> bool:
    """Tell if keys or values are read as they are."""
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
    own = [data_of(x) for x in (k, v)]
    (keys, k_scale), (values, v_scale) = own
    return Partial(
        *operations().attend_many(
            _rows(q.float()), keys, values, k_scale, v_scale, first, causal, scale
        )
    )


def data_of(x: KeysOrValues) -> tuple[Tensor, Tensor | None]:
    """Return numbers and scales as the compiled operations read them: rows are contiguous."""
    if isinstance(x, Codes):
        scale = x.scale if x.scale.stride(-1) == 1 else x.scale.contiguous()
        return _rows(x.codes), scale
    return _rows(x), None


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
