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
from razor_dist.cache.sequence import Sequence
from razor_dist.cache.streaming import ChunkedWindow, SinksAndSums
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.zigzag import Interval


def shared_windows(comm: Communicator, caches: Caches, sequence: Sequence) -> list[ChunkedWindow]:
    """By streaming cache, a sequence's window of all heads; all ranks call this together."""
    layout, windows = caches.layout, list[ChunkedWindow]()
    for index, (cache, slot) in enumerate(zip(caches.streaming, sequence.streaming, strict=True)):
        rows = layout.kept[index]
        begin = max(cache.policy.sinks, slot.start)
        whole = Interval(begin, max(begin, sequence.length))
        parts = _equal_parts(whole, comm.size)
        held = [(at, rank) for rank, at in enumerate(parts) if len(at)]
        fixed = cache.sinks_and_sums(slot.at)
        own = [torch.stack(cache.read(cache.rows, slot, at.begin, at.end)) for at in parts]
        both = _exchange(comm, own, rows) if held else None
        window = ChunkedWindow(fixed=_gather(comm, fixed, rows, sequence.length), held=held)
        for layer, heads in enumerate(layout.layers):
            for group in heads.groups:
                if both is not None and group.index == index:
                    k, v = both[:, group.rows].clone()  # freed layer by layer
                    window.pieces[layer] = [KVPiece(parts[comm.rank], k, v)]
        windows.append(window)
    return windows


def _equal_parts(whole: Interval, parts: int) -> list[Interval]:
    edges = [whole.begin + len(whole) * r // parts for r in range(parts + 1)]
    return [Interval(a, b) for a, b in itertools.pairwise(edges)]


def _exchange(comm: Communicator, own: Seq[Tensor], rows: Seq[list[int]]) -> Tensor:
    """Keys and values ``[2, K, n, D]`` of this rank's part, of all heads.

    ``own`` has those of this rank's heads, for each rank's part; ``rows`` each rank's heads.
    """
    mine = own[comm.rank]
    _, _, tokens, dim = mine.shape
    sends = [(rank, own[rank]) for rank in comm.others]
    receives = [(rank, mine.new_empty(2, len(rows[rank]), tokens, dim)) for rank in comm.others]
    comm.exchange(sends, receives, "halo").wait()
    whole = mine.new_empty(2, sum(map(len, rows)), tokens, dim)
    for rank, part in [(comm.rank, mine), *receives]:
        whole[:, rows[rank]] = part
    return whole


def _gather(
    comm: Communicator, own: SinksAndSums, rows: Seq[list[int]], length: int
) -> SinksAndSums:
    """Sinks and sums of all heads; zeros for a sequence without prefilled tokens."""
    total, (_, sinks, dim) = sum(map(len, rows)), own.k.shape
    k, v = own.k.new_zeros(2, total, sinks, dim)
    sums = own.sums.new_zeros(2, total, dim)
    if not length:
        return SinksAndSums(k, v, sums)
    # float32 holds what is of another dtype exactly.
    sent = torch.cat([own.k.float(), own.v.float(), own.sums.transpose(0, 1)], dim=1)
    padded = sent.new_zeros(max(map(len, rows)), *sent.shape[1:])
    padded[: len(sent)] = sent
    for rank, of_rank in enumerate(comm.all_gather(padded, "sinks")):
        at = rows[rank]
        part = of_rank[: len(at)]
        k[at], v[at] = part[:, :sinks].to(k.dtype), part[:, sinks : 2 * sinks].to(v.dtype)
        sums[:, at] = part[:, 2 * sinks :].transpose(0, 1)
    return SinksAndSums(k, v, sums)
