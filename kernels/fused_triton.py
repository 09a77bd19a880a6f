"""`razor_dist.kernels.fused` as Triton kernels, for CUDA."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from razor_dist.kernels.fused import rms_norm

__all__ = ["add_rms_norm", "gated", "rms_norm", "rotate"]

# Numbers of an activation that a program computes.
_GATED = 1024


@triton.jit
def load_rotated(
    x, cos, sin, d, read, R: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Load the numbers ``d`` of rows that begin at ``x``, and rotate them, in float32.

    ``cos`` and ``sin`` point to the tables of the rows' token.
    """
    own = tl.load(x + d, mask=read, other=0.0).to(tl.float32)
    if INTERLEAVED:
        other, angle, is_first = d ^ 1, d // 2, d % 2 == 0
    else:
        is_first = d < R // 2
        other, angle = tl.where(is_first, d + R // 2, d - R // 2), d % (R // 2)
    turned = d < R
    pair = tl.load(x + tl.where(turned, other, d), mask=read & turned, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    return own * c + tl.where(is_first, -pair, pair) * s


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(
    q, q_head, q_token, k, k_head, k_token, cos, sin, table_token, out_q, out_k, tokens,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < H:
        read, write = q + head * q_head + token * q_token, out_q + (token * H + head) * D
    else:
        read = k + (head - H) * k_head + token * k_token
        write = out_k + (token * K + head - H) * D
    d, at = tl.arange(0, WIDTH), token * table_token
    found = load_rotated(read, cos + at, sin + at, d, d < D, R, D, INTERLEAVED)
    tl.store(write + d, found.to(out_q.dtype.element_ty), mask=d < D)


@triton.jit
def add_rms_norm_kernel(
    x, x_row, residual, residual_row, weight, normed, total, eps,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    read = d < D
    own = tl.load(x + row * x_row + d, mask=read, other=0.0).to(tl.float32)
    other = tl.load(residual + row * residual_row + d, mask=read, other=0.0).to(tl.float32)
    both = (own + other).to(total.dtype.element_ty)
    tl.store(total + row * D + d, both, mask=read)
    both = both.to(tl.float32)
    factor = tl.rsqrt(tl.sum(both * both, 0) / D + eps)
    factors = tl.load(weight + d, mask=read, other=0.0).to(tl.float32)
    tl.store(normed + row * D + d, (both * factor * factors).to(normed.dtype.element_ty), mask=read)


@triton.jit(do_not_specialize=["width"])
def gated_kernel(gate, gate_row, up, up_row, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = i < width
    g = tl.load(gate + row * gate_row + i, mask=read, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + i, mask=read, other=0.0).to(tl.float32)
    found = g * tl.sigmoid(g) * u
    tl.store(out + row * width + i, found.to(out.dtype.element_ty), mask=read)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """See `razor_dist.kernels.fused.rotate`; the results lie token by token in memory."""
    _, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    assert q.stride(3) == k.stride(3) == cos.stride(2) == 1 and cos.stride() == sin.stride()
    out_q, out_k = (x.new_empty(1, tokens, x.shape[1], dim).transpose(1, 2) for x in (q, k))
    rotate_kernel[(tokens, heads + kv_heads)](
        q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), cos, sin, cos.stride(1),
        out_q, out_k, tokens,
        H=heads, K=kv_heads, R=cos.shape[-1], D=dim, INTERLEAVED=interleaved,
        WIDTH=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return out_q, out_k


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `razor_dist.kernels.fused.add_rms_norm`."""
    dim = x.shape[-1]
    rows, others = x.reshape(-1, dim), residual.reshape(-1, dim)
    assert rows.stride(1) == others.stride(1) == weight.stride(0) == 1
    normed, total = (x.new_empty(x.shape) for _ in range(2))
    width = triton.next_power_of_2(dim)
    if len(rows):
        add_rms_norm_kernel[(len(rows),)](
            rows, rows.stride(0), others, others.stride(0), weight, normed, total, eps,
            D=dim, WIDTH=width, num_warps=min(8, max(1, width // 512)),
        )  # fmt: skip
    return normed, total


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """See `razor_dist.kernels.fused.gated`."""
    width = gate.shape[-1]
    rows, others, out = gate.flatten(0, -2), up.flatten(0, -2), gate.new_empty(gate.shape)
    assert rows.stride(1) == others.stride(1) == 1
    if out.numel():
        gated_kernel[(len(rows), triton.cdiv(width, _GATED))](
            rows, rows.stride(0), others, others.stride(0), out, width, BLOCK=_GATED
        )
    return out
