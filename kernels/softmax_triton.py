"""The running softmax over tiles of keys that Triton kernels of attention share, and their sizes.

Scores and sums are float32, in base 2.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import os

import triton
import triton.language as tl

from razor_dist.kernels.codes_triton import levels

LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# A finite maximum for rows that see no key: ``exp2(-inf - LEAST)`` is 0, and not NaN.
LEAST = tl.constexpr(-1e30)

# Keys of a tile, by the larger itemsize of queries and keys in bytes: float32 takes more registers
# and more shared memory.
TILES = {2: 64, 4: 16}
# The least rows of a tile: tensor cores take no fewer.
ROWS = 16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# With bfloat16 keys, a multiprocessor holds three programs on an H100, two on an A100, and one with
# 100 KB of shared memory. With more stages it would hold fewer.
WARPS, STAGES = 4, 3


@triton.jit
def softmax_tile(
    top, total, sums, odd_sums, queries, odd_queries, factor, bias, seen, k_at, v_at, read,
    k_scale, v_scale,
    BIASED: tl.constexpr, MASKED: tl.constexpr, LOADS_MASKED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to a running softmax.

    With 4 bits, even and odd dimensions are multiplied separately.
    """
    if LOADS_MASKED:
        keys, values = tl.load(k_at, mask=read, other=0), tl.load(v_at, mask=read, other=0)
    else:
        keys, values = tl.load(k_at), tl.load(v_at)
    if BITS == 4:
        keys, odd_keys = levels(keys, queries.dtype)
        values, odd_values = levels(values, queries.dtype)
    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    if BITS == 4:
        scores = tl.dot(odd_queries, tl.trans(odd_keys), scores, input_precision="ieee")
    if BITS:
        if MASKED:
            k_factor = tl.load(k_scale, mask=seen, other=1.0) * factor
            v_factor = tl.load(v_scale, mask=seen, other=1.0)
        else:
            k_factor, v_factor = tl.load(k_scale) * factor, tl.load(v_scale)
        if BITS == 4:
            k_factor, v_factor = 2 * k_factor, 2 * v_factor
        scores *= k_factor[None, :]
    else:
        scores *= factor
    if BIASED:
        scores += bias
    if MASKED:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, 1)
    if BITS:
        weights *= v_factor[None, :]
    weights = weights.to(queries.dtype)
    sums = tl.dot(weights, values.to(queries.dtype), sums * shrink[:, None], input_precision="ieee")
    if BITS == 4:
        odd_sums = tl.dot(weights, odd_values, odd_sums * shrink[:, None], input_precision="ieee")
    return higher, total, sums, odd_sums


@triton.jit
def ended(top, total, sums):
    """The weighted mean of the values that a running softmax has read, and its natural-log lse.

    Both are NaN if a score was.
    """
    natural = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * _LN2)
    return sums / tl.where(total == 0, 1.0, total)[:, None], natural
