"""`razor_dist.kernels.chosen` as Triton kernels, for CUDA.

One kernel estimates: a program rounds one block of keys to 8 bits and multiplies it with many rows
of queries, to the same bits as `razor_dist.kernels.chosen.largest`. Another attends: a program has
a few neighbouring queries of all query heads of a KV head. It reads the blocks that any of them has
chosen, from a list, and each row counts only its own. For few queries, the list is cut into parts,
so that one sequence keeps the whole device busy.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from razor_dist.kernels.chosen import BLOCK, Shard, first_recent
from razor_dist.kernels.codes_triton import TINY, bits_of, whole
from razor_dist.kernels.many_cpu import data_of
from razor_dist.kernels.partial import Partial, joined, merge_stacked, multiprocessors
from razor_dist.kernels.quantized import Codes, KeysOrValues, quantize
from razor_dist.kernels.softmax_triton import (
    INTERPRETED,
    LEAST,
    LOG2E,
    ROWS,
    TILES,
    WARPS,
    ended,
    softmax_tile,
)

# Estimates: rows of queries in a tile, and in a program, which rounds its keys once.
_ESTIMATED, _ESTIMATED_ROWS = 64, 1024
# Rows of queries in a program that attends: more rows share keys, but choose more blocks together.
# With more stages, a multiprocessor with 100 KB of shared memory would hold one program only.
_ATTENDING_ROWS, _STAGES = 64, 2
# Blocks that are listed at a time; and the most entries of all lists, above which queries are cut.
_LISTED, _LISTS = 256, 1 << 24
# Programs for every multiprocessor where there are few queries; parts of a list at most.
_PROGRAMS, _PARTS = 4, 64


@triton.jit(do_not_specialize=["rows", "tokens", "blocks"])
def largest_kernel(
    q, q_scale, k, k_head, k_token, k_scale, k_scale_head, k_scale_token, slow, edges, recent,
    out, rows, tokens, blocks,
    W: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, M: tl.constexpr,
    SPAN: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """Estimate one block for ``SPAN`` rows of queries; -inf stays where it is always read."""
    # The first block is always read.
    block, head, part = tl.program_id(0) + 1, tl.program_id(1).to(tl.int64), tl.program_id(2)
    low, high = tl.load(edges + block), tl.load(edges + block + 1)
    # Positions ascend: if the last query always reads the block, all do.
    if (low >= high) | (tl.load(recent + tokens - 1) <= block):
        return
    i, w = low + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    there = i < high
    at = tl.load(slow + w, mask=w < W, other=0)
    read = there[:, None] & (w < W)[None, :]
    keys = tl.load(k + head * k_head + i[:, None] * k_token + at[None, :], mask=read, other=0)
    if BITS:
        codes = keys
        scales = k_scale + head * k_scale_head + i * k_scale_token
        factors = tl.load(scales, mask=there, other=0.0)
    else:
        keys = keys.to(tl.float32)
        factors = tl.div_rn(tl.max(tl.abs(keys), 1), 127.0)
        codes = whole(tl.div_rn(keys, tl.maximum(factors, TINY)[:, None])).to(tl.int8)
    codes = tl.trans(codes.to(tl.float32) if FLOATS else codes)
    for begin in range(part * SPAN, tl.minimum(part * SPAN + SPAN, rows), M):
        row = begin + tl.arange(0, M)
        chooses = row < rows
        chooses &= tl.load(recent + row % tokens, mask=chooses, other=0) > block
        of = head * rows + row
        if tl.max(chooses.to(tl.int32), 0) > 0:
            numbers = of[:, None] * W + w[None, :]
            queries = tl.load(q + numbers, mask=chooses[:, None] & (w < W)[None, :], other=0)
            scale = tl.load(q_scale + of, mask=chooses, other=0.0)
            if FLOATS:
                queries = queries.to(tl.float32)
            scores = tl.dot(queries, codes, input_precision="ieee").to(tl.float32)
            scores = scores * scale[:, None] * factors[None, :]
            found = tl.max(tl.where(there[None, :], scores, float("-inf")), 1)
            tl.store(out + (head * blocks + block) * rows + row, found, mask=chooses)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def list_kernel(
    chosen, edges, listed, count, tokens, blocks, T: tl.constexpr, BLOCKS: tl.constexpr
):
    """List the blocks that any of ``T`` queries has chosen and this shard has keys of."""
    tile, head = tl.program_id(0), tl.program_id(1)
    of = (head * tl.num_programs(0) + tile).to(tl.int64)
    t = tile * T + tl.arange(0, T)
    done = 0
    for begin in range(0, blocks, BLOCKS):
        b = begin + tl.arange(0, BLOCKS)
        at = (head.to(tl.int64) * blocks + b)[:, None] * tokens + t[None, :]
        read = (b < blocks)[:, None] & (t < tokens)[None, :]
        any_of = tl.max(tl.load(chosen + at, mask=read, other=0).to(tl.int32), 1)
        low = tl.load(edges + b, mask=b < blocks, other=0)
        high = tl.load(edges + b + 1, mask=b < blocks, other=0)
        any_of = tl.where((any_of > 0) & (low < high), 1, 0)
        place = done + tl.cumsum(any_of, 0) - 1
        tl.store(listed + of * blocks + place, b, mask=any_of > 0)
        done += tl.sum(any_of, 0)
    tl.store(count + of, done)


@triton.jit(do_not_specialize=["tokens", "blocks", "parts"])
def chosen_kernel(
    q, q_head, q_group, q_token, k, v, k_head, k_token, k_scale, v_scale, scale_head,
    chosen, listed, count, edges, place, position, scale, out, lse, tokens, blocks, parts,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    TILE: tl.constexpr, PIECES: tl.constexpr, BITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend to a part of the listed blocks, for ``T`` queries of all heads of a KV head."""
    tile, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    of = head * tl.num_programs(0) + tile
    row, d = tl.arange(0, M), tl.arange(0, WIDTH)
    g, t = row // T, tile * T + row % T
    there = (g < G) & (t < tokens)
    wide = there[:, None] & (d < D)[None, :]
    q_at = q + head * q_head + g * q_group + t.to(tl.int64) * q_token
    queries = tl.load(q_at[:, None] + d[None, :], mask=wide, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    stands = tl.load(position + t, mask=there, other=-1).to(tl.int32)
    top = tl.full([M], LEAST, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, WIDTH], tl.float32)
    length = tl.cdiv(tl.load(count + of), parts)
    last = tl.minimum(part * length + length, tl.load(count + of))
    i = tl.arange(0, TILE)
    k, v = k + head * k_head, v + head * k_head
    k_scale, v_scale = k_scale + head * scale_head, v_scale + head * scale_head
    if D % 16 == 0:
        # A hint for the compiler: rows are aligned, and can be read 16 bytes at once.
        k, v = tl.multiple_of(k, 16), tl.multiple_of(v, 16)
        k_token = tl.multiple_of(k_token, 16)
    for n in range(part * length * PIECES, last * PIECES):
        block = tl.load(listed + of * blocks + n // PIECES)
        own = tl.load(chosen + (head * blocks + block) * tokens + t, mask=there, other=0) != 0
        at = tl.load(edges + block) + n % PIECES * TILE
        seen = i < tl.load(edges + block + 1) - at
        places = tl.load(place + at + i, mask=seen, other=0).to(tl.int32)
        sees = own[:, None] & (places[None, :] <= stands[:, None])
        numbers = i[:, None] * k_token + d[None, :]
        top, total, sums, _ = softmax_tile(
            top, total, sums, sums, queries, queries, scale * LOG2E,
            tl.where(sees, 0.0, float("-inf")), seen,
            k + at * k_token + numbers, v + at * k_token + numbers,
            seen[:, None] & (d < D)[None, :], k_scale + at + i, v_scale + at + i,
            True, True, True, BITS,
        )  # fmt: skip
    found, natural = ended(top, total, sums)
    to = ((part * tl.num_programs(1) + head) * G + g) * tokens + t
    tl.store(lse + to, natural, mask=there)
    tl.store(out + to[:, None] * D + d[None, :], found, mask=wide)


def largest(q: Tensor, k: KeysOrValues, slow: Tensor, shard: Shard, positions: Tensor) -> Tensor:
    """See `razor_dist.kernels.chosen.largest`."""
    heads, group, tokens, dim = q.shape
    blocks, rows = len(shard.edges) - 1, group * tokens
    out = q.new_full((heads, blocks, group, tokens), -torch.inf, dtype=torch.float32)
    if blocks < 2 or not rows or not k.shape[1]:
        return out
    own = quantize(q.contiguous())
    keys, scale = (k.codes, k.scale) if isinstance(k, Codes) else (k, own.scale)
    assert keys.stride(2) == 1
    constants = estimating(dim, keys.dtype, floats=_multiplies_floats(q.device))
    span = constants["SPAN"]
    largest_kernel[(blocks - 1, heads, -(-rows // span))](
        own.codes, own.scale, keys, *keys.stride()[:2], scale, *scale.stride()[:2], slow,
        shard.edges, first_recent(positions), out, rows, tokens, blocks, **constants,
    )  # fmt: skip
    return out


def _multiplies_floats(device: torch.device) -> bool:
    """True if a GPU has no tensor cores for integers: those before Ampere."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def estimating(dim: int, keys: torch.dtype, *, floats: bool) -> dict[str, int]:
    """Return the estimating kernel's constants, for ``dim`` dimensions that are compared."""
    # Tensor cores take no fewer than 32 numbers of 8 bits.
    width = max(32, triton.next_power_of_2(dim))
    return {
        "W": dim, "WIDTH": width, "KEYS": BLOCK, "M": ROWS if floats else _ESTIMATED,
        "SPAN": _ESTIMATED_ROWS, "BITS": bits_of(keys), "FLOATS": floats,
        "num_warps": 8 if width <= 64 else 16,
    }  # fmt: skip


def attend_chosen(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    chosen: Tensor,
    shard: Shard,
    positions: Tensor,
    scale: float,
) -> Partial:
    """See `razor_dist.kernels.chosen.attend_chosen`."""
    heads, group, tokens, dim = q.shape
    blocks = chosen.shape[1]
    (keys, k_scale), (values, v_scale) = data_of(k), data_of(v)
    constants = attending(group, dim, q.dtype, keys.dtype)
    most = constants["T"] * max(1, _LISTS // (heads * blocks))
    if tokens > most:
        each = [
            attend_chosen(q[:, :, at], k, v, chosen[:, :, at], shard, positions[at], scale)
            for at in (slice(begin, begin + most) for begin in range(0, tokens, most))
        ]
        return joined(each)
    chosen = chosen.contiguous().view(torch.uint8)
    if k_scale is None or v_scale is None:
        k_scale, v_scale = keys, values  # pointers that are not read
    assert q.stride(3) == keys.stride(2) == 1 and keys.stride() == values.stride()
    tiles = -(-tokens // constants["T"])
    listed = torch.empty(heads, tiles, blocks, dtype=torch.int32, device=q.device)
    count = listed.new_empty(heads, tiles)
    list_kernel[(tiles, heads)](
        chosen, shard.edges, listed, count, tokens, blocks,
        T=constants["T"], BLOCKS=_LISTED, num_warps=WARPS,
    )  # fmt: skip
    wanted = _PROGRAMS * multiprocessors(q.device) // (heads * tiles)
    parts = min(_PARTS, blocks, triton.next_power_of_2(max(1, wanted)))
    out = q.new_empty(parts, heads, group, tokens, dim, dtype=torch.float32)
    lse = out.new_empty(out.shape[:-1])
    chosen_kernel[(tiles, heads, parts)](
        q, *q.stride()[:3], keys, values, *keys.stride()[:2], k_scale, v_scale, k_scale.stride(0),
        chosen, listed, count, shard.edges, shard.places, positions, scale, out, lse,
        tokens, blocks, parts, UPCAST=INTERPRETED, **constants,
    )  # fmt: skip
    return Partial(out[0], lse[0]) if parts == 1 else merge_stacked(out, lse)


def attending(group: int, dim: int, queries: torch.dtype, keys: torch.dtype) -> dict[str, int]:
    """Return the attending kernel's constants for a shape."""
    width, heads = max(ROWS, triton.next_power_of_2(dim)), triton.next_power_of_2(group)
    rows = max(ROWS, heads, _ATTENDING_ROWS * 128 // max(128, width))
    tile = max(16, TILES[max(queries.itemsize, keys.itemsize)] * 128 // max(128, width))
    return {
        "G": group, "D": dim, "WIDTH": width, "M": rows, "T": rows // heads,
        "TILE": tile, "PIECES": BLOCK // tile, "BITS": bits_of(keys),
        "num_warps": WARPS, "num_stages": _STAGES,
    }  # fmt: skip
