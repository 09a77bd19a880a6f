"""Rounding and reading of codes (`razor_dist.kernels.quantized`) inside Triton kernels."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from razor_dist.kernels.quantized import INT4, INT8

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Added and taken off again, it rounds a float32 to the nearest whole number, a half to even.
_TO_WHOLE = tl.constexpr(1.5 * 2.0**23)


def bits_of(keys: torch.dtype) -> int:
    """The bits of a code; 0 for keys that are not codes."""
    return {INT8: 8, INT4: 4}.get(keys, 0)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`razor_dist.kernels.quantized.hadamard` of ``x`` ``[ROWS, WIDTH]``, ``BLOCK`` together."""
    for half in tl.static_range(1, BLOCK):
        if half & (half - 1) == 0:
            pairs = tl.reshape(x, (ROWS, WIDTH // (2 * half), 2, half))
            a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, WIDTH))
    return x


@triton.jit
def halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the even and the odd columns of ``x`` ``[ROWS, WIDTH]``."""
    return tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))


@triton.jit
def levels(codes, dtype: tl.constexpr):
    """Half of the levels of 4-bit codes, those in the bytes' lower halves and in the upper ones."""
    if dtype == tl.bfloat16:
        # A bfloat16 of 16 has room for a code in its mantissa: no conversion, which takes longest.
        wide = codes.to(tl.int16)
        low = (((wide << 3) & 0x78) | 0x4180).to(tl.bfloat16, bitcast=True) - 23.5
        high = (((wide >> 1) & 0x78) | 0x4180).to(tl.bfloat16, bitcast=True) - 23.5
    else:
        low, high = (codes & 15).to(dtype) - 7.5, (codes >> 4).to(dtype) - 7.5
    return low.to(dtype), high.to(dtype)


@triton.jit
def whole(x):
    """Round float32 to the nearest whole numbers, a half to the even one."""
    return (x + _TO_WHOLE) - _TO_WHOLE


@triton.jit
def quantized(new, BITS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """The codes and the scale of one token's ``new``, as in `razor_dist.kernels.quantized`.

    `tl.max` ignores NaN, so the sum of ``new * 0`` is added: NaN if any number is not finite.
    """
    new = new.to(tl.float32)
    nothing = tl.sum(new * 0.0, 0)
    if BITS == 8:
        scale = tl.div_rn(tl.max(tl.abs(new), 0) + nothing, 127.0)
        codes = whole(tl.div_rn(new, tl.maximum(scale, TINY))).to(tl.int8)
    else:
        new = hadamard(tl.reshape(new, (1, WIDTH)), 1, WIDTH, D & -D)
        scale = tl.div_rn(tl.max(tl.max(tl.abs(new), 1), 0) + nothing, 15.0)
        step = tl.maximum(2 * scale, TINY)
        low, high = halves((whole(tl.div_rn(new, step) - 0.5) + 8).to(tl.int32), 1, WIDTH)
        codes = tl.reshape(low | (high << 4), (WIDTH // 2,)).to(tl.uint8)
        scale = scale * (1.0 / (D & -D))
    return codes, scale
