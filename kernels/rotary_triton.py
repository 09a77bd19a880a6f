"""`razor_dist.kernels.fused.rotate` as one Triton kernel, for CUDA."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(
    q, q_head, q_token, k, k_head, k_token, cos, sin, table_token, out_q, out_k, tokens,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < H:
        read, write = q + head * q_head + token * q_token, out_q + (token * H + head) * D
    else:
        read = k + (head - H) * k_head + token * k_token
        write = out_k + (token * K + head - H) * D
    i = tl.arange(0, HALF)
    paired = i < R // 2
    c = tl.load(cos + token * table_token + i, mask=paired, other=0.0).to(tl.float32)
    s = tl.load(sin + token * table_token + i, mask=paired, other=0.0).to(tl.float32)
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else i + R // 2
    a = tl.load(read + first, mask=paired, other=0.0).to(tl.float32)
    b = tl.load(read + second, mask=paired, other=0.0).to(tl.float32)
    tl.store(write + first, (a * c - b * s).to(out_q.dtype.element_ty), mask=paired)
    tl.store(write + second, (b * c + a * s).to(out_q.dtype.element_ty), mask=paired)
    if R < D:
        d = R + tl.arange(0, REST)
        tl.store(write + d, tl.load(read + d, mask=d < D), mask=d < D)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """See `razor_dist.kernels.fused.rotate`; what comes out lies token by token."""
    _, heads, tokens, dim = q.shape
    kv_heads, width = k.shape[1], cos.shape[-1]
    assert q.stride(3) == k.stride(3) == cos.stride(2) == 1 and cos.stride() == sin.stride()
    out_q, out_k = (x.new_empty(1, tokens, x.shape[1], dim).transpose(1, 2) for x in (q, k))
    rotate_kernel[(tokens, heads + kv_heads)](
        q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), cos, sin, cos.stride(1),
        out_q, out_k, tokens,
        H=heads, K=kv_heads, R=width, D=dim, INTERLEAVED=interleaved,
        HALF=triton.next_power_of_2(width // 2), REST=triton.next_power_of_2(max(1, dim - width)),
        num_warps=1,
    )  # fmt: skip
    return out_q, out_k
