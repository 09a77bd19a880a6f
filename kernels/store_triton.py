"""The store of `razor_dist.kernels.decode` as a Triton kernel, for CUDA."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from razor_dist.kernels.codes_triton import bits_of, quantized
from razor_dist.kernels.fused_triton import load_rotated

if TYPE_CHECKING:
    from razor_dist.kernels.decode import Pages, Turned, Windows

# These arguments are rows of one tensor (`razor_dist.attention.step`), of which every other is not
# aligned if the number of sequences is odd. One compiled kernel serves all, and is as fast.
UNALIGNED = ["at", "stored", "position", "start", "offset", "capacity"]


@triton.jit(do_not_specialize=["retrieval"], do_not_specialize_on_alignment=UNALIGNED)
def store_kernel(
    k, k_head, k_token, v, v_head, v_token, order, retrieval,
    q, q_head, q_group, q_token, turned, turned_head, turned_group, turned_token,
    cos, sin, table_token,
    page_k, page_v, page_row, page_slot, page_k_scale, page_v_scale, page_scale_row, at,
    ring_k, ring_v, ring_row, ring_slot, position, offset, capacity,
    SINKS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    R: tl.constexpr, INTERLEAVED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store one head's new key and value; if R > 0, rotate the key and its query heads first."""
    STORED: tl.constexpr = D // 2 if BITS == 4 else D
    head, token = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    own, at_token = tl.load(order + head), token.to(tl.int64)
    of_k = k + own * k_head + at_token * k_token
    if R > 0:
        c, s = cos + at_token * table_token, sin + at_token * table_token
        new_k = load_rotated(of_k, c, s, d, d < D, R, D, INTERLEAVED).to(k.dtype.element_ty)
        # All query heads of this one, side by side.
        g = tl.arange(0, GROUP)[:, None]
        wide, of_all = d[None, :] + 0 * g, (g < G) & (d[None, :] < D)
        from_q = q + own * q_head + at_token * q_token + g * q_group
        found = load_rotated(from_q, c, s, wide, of_all, R, D, INTERLEAVED)
        to_q = turned + own * turned_head + at_token * turned_token + g * turned_group
        tl.store(to_q + wide, found.to(turned.dtype.element_ty), mask=of_all)
    else:
        new_k = tl.load(of_k + d, mask=d < D, other=0.0)
    new_v = tl.load(v + own * v_head + at_token * v_token + d, mask=d < D, other=0.0)
    if head < retrieval:
        slot = tl.load(at + token)
        kept_k, kept_v = new_k, new_v
        if BITS:
            kept_k, k_scale = quantized(new_k, BITS, D, WIDTH)
            kept_v, v_scale = quantized(new_v, BITS, D, WIDTH)
            tl.store(page_k_scale + head.to(tl.int64) * page_scale_row + slot, k_scale)
            tl.store(page_v_scale + head.to(tl.int64) * page_scale_row + slot, v_scale)
        n = tl.arange(0, WIDTH * STORED // D)
        to_page = head.to(tl.int64) * page_row + slot * page_slot + n
        tl.store(page_k + to_page, kept_k.to(page_k.dtype.element_ty), mask=n < STORED)
        tl.store(page_v + to_page, kept_v.to(page_v.dtype.element_ty), mask=n < STORED)
    else:
        room, stands = tl.load(capacity + token), tl.load(position + token)
        in_ring = SINKS + stands % tl.maximum(room, 1)
        slot = tl.load(offset + token) + 1 + tl.where(stands < SINKS, stands, in_ring)
        place = (head - retrieval).to(tl.int64) * ring_row + slot * ring_slot + d
        kept = (d < D) & (room > 0)
        tl.store(ring_k + place, new_k.to(ring_k.dtype.element_ty), mask=kept)
        tl.store(ring_v + place, new_v.to(ring_v.dtype.element_ty), mask=kept)


def store(
    k: Tensor,
    v: Tensor,
    order: Tensor,
    pages: Pages | None,
    windows: Windows | None,
    turned: Turned | None = None,
) -> None:
    """See `razor_dist.kernels.decode`."""
    heads, tokens, dim = len(order), k.shape[1], k.shape[2]
    assert k.stride(2) == v.stride(2) == 1
    split = 0 if pages is None else len(pages.k)
    own = pages or windows  # in place of the one that is None, for pointers of the right kind
    assert own is not None
    page, ring = pages or own, windows or own
    at = order if pages is None else pages.at
    slot = (order,) * 3 if windows is None else (windows.position, windows.offset, windows.capacity)
    rotated: tuple[object, ...] = (k, 0, 0, 0, k, 0, 0, 0, k, k, 0)
    rotation = {"R": 0, "INTERLEAVED": False, "G": 1}
    if turned is not None:
        q, out, (cos, sin, interleaved) = turned
        assert q.stride(3) == out.stride(3) == cos.stride(2) == 1 and cos.stride() == sin.stride()
        rotated = (q, *q.stride()[:3], out, *out.stride()[:3], cos, sin, cos.stride(1))
        rotation = {"R": cos.shape[-1], "INTERLEAVED": interleaved, "G": q.shape[1]}
    store_kernel[(heads, tokens)](
        k, *k.stride()[:2], v, *v.stride()[:2], order, split, *rotated,
        page.k, page.v, page.k.stride(0), page.k.stride(1), *scales_of(pages, order), at,
        ring.k, ring.v, ring.k.stride(0), ring.k.stride(1), *slot,
        SINKS=0 if windows is None else windows.sinks,
        D=dim, WIDTH=triton.next_power_of_2(dim),
        BITS=bits_of(page.k.dtype),
        **rotation, GROUP=triton.next_power_of_2(rotation["G"]), num_warps=1,
    )  # fmt: skip


def scales_of(pages: Pages | None, absent: Tensor) -> tuple[Tensor, Tensor, int]:
    if pages is None or pages.k_scale is None or pages.v_scale is None:
        return absent, absent, 0
    return pages.k_scale, pages.v_scale, pages.k_scale.stride(0)
