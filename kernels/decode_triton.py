"""`razor_dist.kernels.decode` as Triton kernels, for CUDA.

Decoding is bound by the memory's speed, so every key and value is read once: the G queries of a
key-value head are the rows of one tile (padded to the least that tensor cores take), and the keys
are cut into splits, each a program, so that a single sequence keeps the whole device busy
(flash-decoding). Retrieval and streaming heads are programs of the same launch, which differ in
how a key's place and bias follow from its index. Scores and sums are float32, in base 2; the lse
that comes out is a natural logarithm.

With ``TRITON_INTERPRET=1`` the same code runs on CPU tensors, slowly. Its products of bfloat16 are
wrong there, so operands are converted first.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from razor_dist.kernels.codes_triton import bits_of, hadamard, halves
from razor_dist.kernels.merge_triton import merge_ranks, merge_splits
from razor_dist.kernels.partial import multiprocessors
from razor_dist.kernels.softmax_triton import (
    INTERPRETED,
    LEAST,
    LOG2E,
    ROWS,
    STAGES,
    TILES,
    WARPS,
    ended,
    softmax_tile,
)
from razor_dist.kernels.store_triton import UNALIGNED, scales_of, store

if TYPE_CHECKING:
    from razor_dist.kernels.decode import Pages, Windows

__all__ = ["ROTATES", "attend", "merge_ranks", "store"]

ROTATES = True  # `store` does so in the same launch

# Programs for every multiprocessor, as nearly as splits of a power of 2 keys allow. Splits stay
# short, so that the device is shared well by a long sequence in a batch with short ones.
_PROGRAMS = 4
_SPLITS = (256, 1024)
# Tensors' sizes, which differ from layer to layer and step to step: one compiled kernel takes all.
_VARYING = ["tokens", "retrieval", "page_splits", "ring_splits", "split", "table_row"]


@triton.jit
def _page_tile(
    top, total, sums, odd_sums, queries, odd_queries, factor, at, high, n, table, k, v, step,
    k_scale, v_scale, places, place, slope,
    MASKED: tl.constexpr, PAGE: tl.constexpr, STORED: tl.constexpr, TILE: tl.constexpr,
    LOADED: tl.constexpr, SLOPES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Add a tile of a retrieval head's keys, from index ``at`` of its shard on.

    A key is ``STORED`` numbers; ``n`` are their indices, up to ``LOADED``.
    """
    i = tl.arange(0, TILE)
    seen = at + i < high
    if PAGE % TILE == 0:
        # One look-up for all keys, whose offsets then have 32 bits.
        first = tl.load(table + at // PAGE).to(tl.int64) * PAGE + at % PAGE
        slot = i
    else:
        first = tl.zeros([], tl.int64)
        page = tl.load(table + (at + i) // PAGE, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE + (at + i) % PAGE
    numbers = slot[:, None] * step + n[None, :]
    bias = 0.0
    if SLOPES:
        stands = tl.load(places + first + slot, mask=seen, other=0)
        bias = slope[:, None] * (stands - place).to(tl.float32)[None, :]
    return softmax_tile(
        top, total, sums, odd_sums, queries, odd_queries, factor, bias, seen,
        k + first * step + numbers, v + first * step + numbers,
        seen[:, None] & (n[None, :] < STORED), k_scale + first + slot, v_scale + first + slot,
        SLOPES, MASKED, MASKED or STORED < LOADED, BITS,
    )  # fmt: skip


@triton.jit
def _see_pages(
    queries, factor, low, high, k, v, step, k_scale, v_scale, table, places, place, slope,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    SLOPES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Attend to a retrieval head's keys from index ``low`` to ``high`` of its shard."""
    STORED: tl.constexpr = D // 2 if BITS == 4 else D
    LOADED: tl.constexpr = WIDTH * STORED // D
    top = tl.full([M], LEAST, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, LOADED], tl.float32)
    odd_queries, odd_sums = queries, sums
    if BITS == 4:
        transformed = hadamard(queries.to(tl.float32), M, WIDTH, D & -D)
        queries, odd_queries = halves(transformed.to(queries.dtype), M, WIDTH)
    if STORED % 16 == 0:
        # A hint for the compiler: rows are aligned, and can be read 16 bytes at once.
        k, v = tl.multiple_of(k, 16), tl.multiple_of(v, 16)
        step = tl.multiple_of(step, 16)
    n = tl.arange(0, LOADED)
    # Splits begin with a tile: all but the last tile of a sequence are whole.
    whole = low + (high - low) // TILE * TILE
    for at in range(low, whole, TILE):
        top, total, sums, odd_sums = _page_tile(
            top, total, sums, odd_sums, queries, odd_queries, factor, at, high, n, table,
            k, v, step, k_scale, v_scale, places, place, slope,
            False, PAGE, STORED, TILE, LOADED, SLOPES, BITS,
        )  # fmt: skip
    if whole < high:
        top, total, sums, odd_sums = _page_tile(
            top, total, sums, odd_sums, queries, odd_queries, factor, whole, high, n, table,
            k, v, step, k_scale, v_scale, places, place, slope,
            True, PAGE, STORED, TILE, LOADED, SLOPES, BITS,
        )  # fmt: skip
    if BITS == 4:
        both = tl.reshape(tl.join(sums, odd_sums), (M, WIDTH))
        sums = hadamard(both, M, WIDTH, D & -D)
    return top, total, sums


@triton.jit
def _ring_tile(
    top, total, sums, queries, factor, at, high, d, shift, k, v, step, far, slope,
    MASKED: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """Add a tile of a window's keys, from its index ``at`` on, which is at place ``at + shift``.

    ``far`` is the distance of the window's first key from the query.
    """
    i = tl.arange(0, TILE)
    seen, first = at + i < high, (at + shift).to(tl.int64)
    numbers = i[:, None] * step + d[None, :]
    bias = 0.0
    if SLOPES:
        bias = slope[:, None] * (far + at + i).to(tl.float32)[None, :]
    top, total, sums, _ = softmax_tile(
        top, total, sums, sums, queries, queries, factor, bias, seen,
        k + first * step + numbers, v + first * step + numbers,
        seen[:, None] & (d[None, :] < D), None, None,
        SLOPES, MASKED, MASKED or D < WIDTH, 0,
    )  # fmt: skip
    return top, total, sums


@triton.jit
def _see_window(
    queries, factor, low, high, leads, first, room, place, k, v, step, slope,
    SINKS: tl.constexpr, COMPENSATION: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Attend to a streaming head's window from its index ``low`` to ``high``.

    The part that ``leads`` also has the compensation token and the sinks.
    """
    d = tl.arange(0, WIDTH)
    wide = d[None, :] < D
    top = tl.full([M], LEAST, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, WIDTH], tl.float32)
    if D % 16 == 0:
        k, v = tl.multiple_of(k, 16), tl.multiple_of(v, 16)
        step = tl.multiple_of(step, 16)
    if leads:
        weight = tl.log2(tl.maximum(first - SINKS, 1).to(tl.float32))
        for at in range(0, 1 + SINKS, TILE):
            i = at + tl.arange(0, TILE)
            means = i == 0
            seen = tl.where(means, COMPENSATION & (first > SINKS), i - 1 <= place)
            seen &= i <= SINKS
            bias = tl.where(means, weight, 0.0)[None, :]
            if SLOPES:
                # The dropped tokens stand in their middle.
                stands = tl.where(means, (first + SINKS - 1) * 0.5, (i - 1).to(tl.float32))
                bias += slope[:, None] * (stands - place)[None, :]
            numbers = i[:, None] * step + d[None, :]
            top, total, sums, _ = softmax_tile(
                top, total, sums, sums, queries, queries, factor, bias, seen,
                k + numbers, v + numbers, seen[:, None] & wide, None, None,
                True, True, True, 0,
            )  # fmt: skip
    # The window in its order: a run up to the ring's end, and a run from the ring's beginning.
    turn = room - first % room
    for run in tl.static_range(2):
        begin = tl.where(run == 0, low, tl.maximum(low, turn))
        end = tl.where(run == 0, tl.minimum(high, turn), high)
        shift = 1 + SINKS + tl.where(run == 0, room - turn, -turn)
        whole = begin + tl.maximum(end - begin, 0) // TILE * TILE
        for at in range(begin, whole, TILE):
            top, total, sums = _ring_tile(
                top, total, sums, queries, factor, at, end, d, shift, k, v, step,
                first - place, slope, False, D, TILE, WIDTH, SLOPES,
            )  # fmt: skip
        if whole < end:
            top, total, sums = _ring_tile(
                top, total, sums, queries, factor, whole, end, d, shift, k, v, step,
                first - place, slope, True, D, TILE, WIDTH, SLOPES,
            )  # fmt: skip
    return top, total, sums


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=UNALIGNED)
def attend_kernel(
    q, q_head, q_group, q_token, order, slopes, scale, tokens, retrieval,
    page_k, page_v, page_row, page_slot, page_k_scale, page_v_scale, page_scale_row,
    table, table_row, stored, places,
    ring_k, ring_v, ring_row, ring_slot, position, start, offset, capacity,
    out, lse, page_splits, ring_splits, split,
    SINKS: tl.constexpr, COMPENSATION: tl.constexpr, PAGE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    SLOPES: tl.constexpr, BITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    program, paged = tl.program_id(0), retrieval * tokens * page_splits
    of_pages = program < paged
    index = tl.where(of_pages, program, program - paged)
    splits = tl.where(of_pages, page_splits, ring_splits)
    part, token, head = index % splits, index // splits % tokens, index // splits // tokens
    rows, d = tl.arange(0, M), tl.arange(0, WIDTH)
    # Counts of tokens have 32 bits here; the numbers of a cache are more.
    place = tl.load(position + token).to(tl.int32)
    room = tl.load(capacity + token).to(tl.int32)
    # Where the query's window begins.
    first = tl.maximum(tl.load(start + token).to(tl.int32), SINKS)
    low = part * split
    if of_pages:
        high = tl.minimum(low + split, tl.load(stored + token).to(tl.int32))
        idle = low >= high
    else:
        high = tl.minimum(low + split, place + 1 - first)
        # The first part also has sinks and compensation token. Rows that pad the batch are idle.
        idle = (room <= 0) | ((part > 0) & (low >= high))
    lse_at = lse + program.to(tl.int64) * G + rows
    if idle:
        tl.store(lse_at, tl.full([M], float("-inf"), tl.float32), mask=rows < G)
        return

    own = tl.load(order + tl.where(of_pages, head, retrieval + head))
    q_at = q + own * q_head + token.to(tl.int64) * q_token + rows[:, None] * q_group + d[None, :]
    used = (rows[:, None] < G) & (d[None, :] < D)
    queries = tl.load(q_at, mask=used, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    slope = tl.zeros([M], tl.float32)
    if SLOPES:
        slope = tl.load(slopes + own * G + rows, mask=rows < G, other=0.0) * LOG2E
    factor = scale * LOG2E
    top = tl.full([M], LEAST, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, WIDTH], tl.float32)
    row = head.to(tl.int64)
    if of_pages:
        top, total, sums = _see_pages(
            queries, factor, low, high, page_k + row * page_row, page_v + row * page_row, page_slot,
            page_k_scale + row * page_scale_row, page_v_scale + row * page_scale_row,
            table + token.to(tl.int64) * table_row, places, place, slope,
            PAGE, D, WIDTH, M, TILE, SLOPES, BITS,
        )  # fmt: skip
    elif BITS == 0:
        slot = row * ring_row + tl.load(offset + token) * ring_slot
        top, total, sums = _see_window(
            queries, factor, low, high, part == 0, first, room, place,
            ring_k + slot, ring_v + slot, ring_slot, slope,
            SINKS, COMPENSATION, D, WIDTH, M, TILE, SLOPES,
        )  # fmt: skip
    found, natural = ended(top, total, sums)
    tl.store(lse_at, natural, mask=rows < G)
    out_at = out + (program.to(tl.int64) * G + rows[:, None]) * D + d[None, :]
    tl.store(out_at, found, mask=used)


def attend(
    q: Tensor,
    order: Tensor,
    pages: Pages | None,
    windows: Windows | None,
    out: Tensor,
    *,
    scale: float,
    slopes: Tensor | None = None,
    pack: bool = False,
    places: Tensor | None = None,
) -> Tensor | None:
    """See `razor_dist.kernels.decode`."""
    _, group, tokens, dim = q.shape
    assert q.stride(3) == out.stride(2) == 1
    own = pages or windows
    assert own is not None
    page, ring = pages or own, windows or own
    assert page.k.stride() == page.v.stride() and ring.k.stride() == ring.v.stride()
    assert page.k.dtype == ring.k.dtype
    retrieval = 0 if pages is None else len(pages.k)
    streaming = 0 if windows is None else len(windows.k)
    keys = 0 if pages is None else pages.table.shape[1] * pages.page_size
    width = 0 if windows is None else windows.width
    split = split_length(retrieval * tokens * keys + streaming * tokens * width, q.device)
    page_splits, ring_splits = -(-keys // split), -(-width // split)
    programs = tokens * (retrieval * page_splits + streaming * ring_splits)
    parts = q.new_empty(programs, group, dim, dtype=torch.float32)
    lse = q.new_empty(programs, group, dtype=torch.float32)
    table = order if pages is None else pages.table
    slot = (
        (own.position,) * 3
        if windows is None
        else (windows.start, windows.offset, windows.capacity)
    )
    attend_kernel[(programs,)](
        q, *q.stride()[:3], order, order if slopes is None else slopes, scale, tokens, retrieval,
        page.k, page.v, page.k.stride(0), page.k.stride(1), *scales_of(pages, order),
        table, table.stride(0), own.position if pages is None else pages.stored,
        order if pages is None or pages.places is None else pages.places,
        ring.k, ring.v, ring.k.stride(0), ring.k.stride(1), own.position, *slot,
        parts, lse, page_splits, ring_splits, split,
        SINKS=0 if windows is None else windows.sinks,
        COMPENSATION=windows is not None and windows.compensation,
        PAGE=1 if pages is None else pages.page_size,
        SLOPES=slopes is not None,
        BITS=bits_of(page.k.dtype),
        UPCAST=INTERPRETED,
        **tile(group, dim, q.dtype, page.k.dtype, slopes=slopes is not None),
    )  # fmt: skip
    packed = None
    if pages is not None and pack:
        packed = parts.new_empty(retrieval, group, tokens, dim + 1)
    merge_splits(parts, lse, order, retrieval, (page_splits, ring_splits), out, packed, places)
    return packed


def tile(
    group: int, dim: int, queries: torch.dtype, keys: torch.dtype, *, slopes: bool
) -> dict[str, int]:
    """Return the attending kernel's constants for a shape."""
    least = 2 * ROWS if bits_of(keys) == 4 else ROWS
    width = max(least, triton.next_power_of_2(dim))
    # Distances take registers: with a whole tile some would be spilled.
    most = TILES[max(queries.itemsize, keys.itemsize)] // (2 if slopes else 1)
    # Without tensor cores a thread holds whole rows: of 128 dimensions, 4 warps spill.
    warps = 2 * WARPS if queries.itemsize == 4 and width >= 128 else WARPS
    return {
        "G": group, "D": dim, "WIDTH": width,
        "M": max(ROWS, triton.next_power_of_2(group)),
        "TILE": max(16, most * 128 // max(128, width)),
        "num_warps": warps, "num_stages": STAGES,
    }  # fmt: skip


def split_length(keys: int, device: torch.device) -> int:
    """Return the keys of a split, for ``keys`` keys of all heads and sequences together."""
    least, most = _SPLITS
    wanted = -(-keys // (_PROGRAMS * multiprocessors(device)))
    return min(most, max(least, triton.next_power_of_2(wanted)))
