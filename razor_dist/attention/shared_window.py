"""Tensor-parallel decode: from windows by head to windows by token, before chunks are prefilled.

In short steps a rank keeps the windows of its own streaming heads. In chunks it has some of the
tokens, and needs all heads. So before a sequence is continued in chunks, the ranks exchange their
windows once; when the prompt ends, each layer hands them back (`WindowPlan.handover`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from razor_dist.cache.caches import Caches
from razor_dist.cache.sequence import Sequence, SharedWindow
from razor_dist.cache.slots import StreamingSlot
from razor_dist.cache.streaming import SinksAndSums, StreamingCache
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.zigzag import Interval


def shared_windows(
    comm: Communicator, caches: Caches, sequence: Sequence
) -> tuple[list[SharedWindow], list[dict[int, list[KVPiece]]]]:
    """By streaming cache, all heads' sinks and sums, and by layer this rank's part of the window.

    All ranks call this together.
    """
    layout = caches.layout
    shared: list[SharedWindow] = []
    windows: list[dict[int, list[KVPiece]]] = []
    for index, (cache, slot) in enumerate(zip(caches.streaming, sequence.streaming, strict=True)):
        rows = layout.kept[index]
        fixed = _gather_fixed(comm, cache, slot, rows, sequence.length)
        begin = max(cache.policy.sinks, slot.start)
        whole = Interval(begin, max(begin, sequence.length))
        parts = _equal_parts(whole, comm.size)
        held = [(at, rank) for rank, at in enumerate(parts) if len(at)]
        shared.append(SharedWindow(fixed, held))
        both = _exchange(comm, cache, slot, rows, parts) if held else None
        pieces: dict[int, list[KVPiece]] = {}
        for layer, heads in enumerate(layout.layers):
            for group in heads.groups:
                if both is not None and group.index == index:
                    k, v = both[:, group.rows].clone()  # freed layer by layer
                    pieces[layer] = [KVPiece(parts[comm.rank], k, v)]
        windows.append(pieces)
    return shared, windows


def _equal_parts(whole: Interval, parts: int) -> list[Interval]:
    edges = [whole.begin + len(whole) * r // parts for r in range(parts + 1)]
    return [Interval(a, b) for a, b in itertools.pairwise(edges)]


def _exchange(
    comm: Communicator,
    cache: StreamingCache,
    slot: StreamingSlot,
    rows: Seq[list[int]],
    parts: Seq[Interval],
) -> Tensor:
    """Keys and values of this rank's part, of all heads: ``[2, K, n, D]``."""
    mine, (_, _, dim) = parts[comm.rank], cache.k.shape

    def own(at: Interval) -> Tensor:
        return torch.stack(cache.read(cache.rows, slot, at.begin, at.end))

    sends = [(rank, own(parts[rank])) for rank in comm.others]
    receives = [(r, cache.k.new_empty(2, len(rows[r]), len(mine), dim)) for r in comm.others]
    found = [(comm.rank, own(mine)), *receives]
    comm.exchange(sends, receives, "halo").wait()
    whole = cache.k.new_empty(2, sum(map(len, rows)), len(mine), dim)
    for rank, part in found:
        whole[:, rows[rank]] = part
    return whole


def _gather_fixed(
    comm: Communicator,
    cache: StreamingCache,
    slot: StreamingSlot,
    rows: Seq[list[int]],
    length: int,
) -> SinksAndSums:
    """Sinks and sums of all heads; zeros for a sequence without prefilled tokens."""
    total, sinks, dim = sum(map(len, rows)), cache.policy.sinks, cache.k.shape[2]
    k, v = cache.k.new_zeros(2, total, sinks, dim)
    sums = cache.sums.new_zeros(2, total, dim)
    if not length:
        return SinksAndSums(k, v, sums)
    mine = cache.sinks_and_sums(slot)
    # float32 holds what is of another dtype exactly.
    own = torch.cat([mine.k.float(), mine.v.float(), mine.sums.transpose(0, 1)], dim=1)
    padded = own.new_zeros(max(map(len, rows)), *own.shape[1:])
    padded[: len(own)] = own
    for rank, of_rank in enumerate(comm.all_gather(padded, "sinks")):
        at = rows[rank]
        part = of_rank[: len(at)]
        k[at], v[at] = part[:, :sinks].to(k.dtype), part[:, sinks : 2 * sinks].to(v.dtype)
        sums[:, at] = part[:, 2 * sinks :].transpose(0, 1)
    return SinksAndSums(k, v, sums)
