"""Merges of partial results as Triton kernels: of a query's splits, of ranks, and of pairs."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from razor_dist.kernels.softmax_triton import LEAST, WARPS

_PAIR_ROWS = 16  # queries of a program
# Splits, and dimensions, that a program of the merge reads at a time.
MERGED, MERGED_WIDTH = 64, 32


@triton.jit
def _add(top, total, sums, lse, parts):
    """Take partial results ``parts`` [n, WIDTH] with ``lse`` [n] into a running merge."""
    higher = tl.maximum(top, tl.max(lse, 0))
    shrink, weights = tl.exp(top - higher), tl.exp(lse - higher)
    sums = sums * shrink + tl.sum(parts * weights[:, None], 0)
    return higher, total * shrink + tl.sum(weights, 0), sums


@triton.jit
def _place(order, places, head, g, G: tl.constexpr, PLACED: tl.constexpr):
    """The row of a query head's result, or -1."""
    row = tl.load(order + head) * G + g
    if PLACED:
        row = tl.load(places + row)
    return row


@triton.jit(do_not_specialize=["tokens", "retrieval", "page_splits", "ring_splits"])
def merge_splits_kernel(
    parts, lse, order, places, tokens, retrieval, page_splits, ring_splits,
    out, out_token, out_head, packed,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    PACKED: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query, ``WIDTH`` dimensions of them."""
    head, token = tl.program_id(0), tl.program_id(1)
    g, d = tl.program_id(2) % G, tl.program_id(2) // G * WIDTH + tl.arange(0, WIDTH)
    if head < retrieval:
        first, splits = (head * tokens + token) * page_splits, page_splits
    else:
        first = retrieval * tokens * page_splits
        first, splits = first + ((head - retrieval) * tokens + token) * ring_splits, ring_splits
    top, total = tl.full([], LEAST, tl.float32), tl.zeros([], tl.float32)
    sums = tl.zeros([WIDTH], tl.float32)
    for low in range(0, splits, SPLITS):
        s = low + tl.arange(0, SPLITS)
        row = (first + s).to(tl.int64) * G + g
        of = tl.load(lse + row, mask=s < splits, other=float("-inf"))
        # A split without keys has written its lse only.
        read = (of != float("-inf"))[:, None] & (d < D)[None, :]
        values = tl.load(parts + row[:, None] * D + d[None, :], mask=read, other=0.0)
        top, total, sums = _add(top, total, sums, of, values)
    sums = sums / tl.where(total == 0, 1.0, total)
    if PACKED and head < retrieval:
        row = (((head * G + g) * tokens + token) * (D + 1)).to(tl.int64)
        tl.store(packed + row + d, sums, mask=d < D)
        if tl.program_id(2) < G:
            natural = tl.where(total == 0, float("-inf"), top + tl.log(total))
            tl.store(packed + row + D, natural)
    else:
        to = _place(order, places, head, g, G, PLACED)
        at = to * out_head + token.to(tl.int64) * out_token
        tl.store(out + at + d, sums.to(out.dtype.element_ty), mask=(d < D) & (to >= 0))


@triton.jit(do_not_specialize=["tokens", "rows"])
def merge_ranks_kernel(
    gathered, rows, order, places, tokens, out, out_token, out_head,
    RANKS: tl.constexpr, PARTS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """Merge all ranks' results for one query, ``gathered`` [P, R, G, n, D + 1]."""
    head, token, g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    to = _place(order, places, head, g, G, PLACED)
    if to < 0:
        return
    d, rank = tl.arange(0, WIDTH), tl.arange(0, PARTS)
    row = (head * G + g) * tokens + token
    at = (rank.to(tl.int64) * rows + row) * (D + 1)
    of = tl.load(gathered + at + D, mask=rank < RANKS, other=float("-inf"))
    read = (rank < RANKS)[:, None] & (d < D)[None, :]
    values = tl.load(gathered + at[:, None] + d[None, :], mask=read, other=0.0)
    top, total = tl.full([], LEAST, tl.float32), tl.zeros([], tl.float32)
    top, total, sums = _add(top, total, tl.zeros([WIDTH], tl.float32), of, values)
    sums = sums / tl.where(total == 0, 1.0, total)
    at = to * out_head + token.to(tl.int64) * out_token
    tl.store(out + at + d, sums.to(out.dtype.element_ty), mask=d < D)


def merge_splits(
    parts: Tensor,
    lse: Tensor,
    order: Tensor,
    retrieval: int,
    splits: tuple[int, int],
    out: Tensor,
    packed: Tensor | None,
    places: Tensor | None,
) -> None:
    """Merge splits ``parts`` ``[programs, G, D]`` with ``lse`` into ``out`` ``[n, H, D]``.

    ``splits`` is the number of splits of the first ``retrieval`` heads of ``order``, and of the
    other heads. With ``packed`` ``[R, G, n, D + 1]`` the results of the first heads go there.
    """
    tokens, (_, group, dim) = len(out), parts.shape
    chunks = -(-dim // MERGED_WIDTH)
    merge_splits_kernel[(len(order), tokens, group * chunks)](
        parts, lse, order, order if places is None else places, tokens, retrieval, *splits,
        out, *out.stride()[:2], parts if packed is None else packed,
        G=group, D=dim, WIDTH=MERGED_WIDTH, SPLITS=MERGED, PACKED=packed is not None,
        PLACED=places is not None,
        num_warps=WARPS,
    )  # fmt: skip


def merge_ranks(gathered: Tensor, order: Tensor, out: Tensor, places: Tensor | None = None) -> None:
    """See `razor_dist.kernels.decode`."""
    ranks, heads, group, tokens, width = gathered.shape
    assert gathered.is_contiguous()
    merge_ranks_kernel[(heads, tokens, group)](
        gathered, heads * group * tokens, order, order if places is None else places, tokens,
        out, *out.stride()[:2],
        RANKS=ranks, PARTS=triton.next_power_of_2(ranks), G=group, D=width - 1,
        WIDTH=triton.next_power_of_2(width - 1), PLACED=places is not None, num_warps=WARPS,
    )  # fmt: skip


# Strides of lse are 1, 129 or any other number: specialised, each would be compiled during a first
# prompt, and lse is loaded number by number in any case.
_LSE_STRIDES = [f"{x}_lse_{dim}" for x in "ab" for dim in ("head", "group", "token")]


@triton.jit(do_not_specialize=["group", "tokens", *_LSE_STRIDES])
def merge_pair_kernel(
    a, a_head, a_group, a_token, a_lse, a_lse_head, a_lse_group, a_lse_token,
    b, b_head, b_group, b_token, b_lse, b_lse_head, b_lse_group, b_lse_token,
    out, lse, group, tokens,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge two partial results of some queries of one head."""
    head, g = (tl.program_id(1) // group).to(tl.int64), (tl.program_id(1) % group).to(tl.int64)
    t, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64), tl.arange(0, WIDTH)
    there = t < tokens
    read = there[:, None] & (d < D)[None, :]
    of_a = tl.load(
        a_lse + head * a_lse_head + g * a_lse_group + t * a_lse_token, mask=there, other=0.0
    )
    of_b = tl.load(
        b_lse + head * b_lse_head + g * b_lse_group + t * b_lse_token, mask=there, other=0.0
    )
    top = tl.maximum(tl.maximum(of_a, of_b), LEAST)
    w_a, w_b = tl.exp(of_a - top), tl.exp(of_b - top)
    total = w_a + w_b
    divisor = tl.where(total == 0, 1.0, total)
    of_a = tl.load(a + head * a_head + g * a_group + (t * a_token)[:, None] + d, mask=read, other=0)
    of_b = tl.load(b + head * b_head + g * b_group + (t * b_token)[:, None] + d, mask=read, other=0)
    sums = of_a.to(tl.float32) * (w_a / divisor)[:, None]
    sums += of_b.to(tl.float32) * (w_b / divisor)[:, None]
    row = (head * group + g) * tokens + t
    tl.store(out + row[:, None] * D + d, sums, mask=read)
    tl.store(lse + row, tl.where(total == 0, float("-inf"), top + tl.log(divisor)), mask=there)


def merge_pair(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two results ``[K, G, T, D]`` with ``[K, G, T]`` in one launch; see `partial.merge`."""
    (a, a_lse), (b, b_lse) = one, other
    heads, group, tokens, dim = a.shape
    assert a.stride(3) == b.stride(3) == 1
    out, lse = (x.new_empty(x.shape, dtype=torch.float32) for x in (a, a_lse))
    merge_pair_kernel[(-(-tokens // _PAIR_ROWS), heads * group)](
        a, *a.stride()[:3], a_lse, *a_lse.stride(), b, *b.stride()[:3], b_lse, *b_lse.stride(),
        out, lse, group, tokens,
        D=dim, WIDTH=triton.next_power_of_2(dim), ROWS=_PAIR_ROWS, num_warps=WARPS,
    )  # fmt: skip
    return out, lse
