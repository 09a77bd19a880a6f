"""Streaming heads' keys between ranks: who needs which positions, by interval arithmetic.

A shard's first query needs the keys of its window, which other ranks hold: the shard's *halo*. With
a window of W tokens and two ranks::

    shard         |   0   |   1   |   2   |   3   |
    held by         rank 0  rank 1  rank 1  rank 0
    halo of 3                 |<---- W --->|          rank 0 wants it of rank 1, parts of 1 and 2
    halo of 2         |<---- W --->|                  rank 1 wants of rank 0 what lies in shard 0

The intervals that ranks hold and want follow from the chunk and the policy alone. So every rank
computes the same `Exchange` once for all layers, without requests, and a rank sends another at most
one message per layer, with all intervals that it wants. Sinks, and the window that every rank keeps
at a prompt's end, travel the same way.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator, Pending, Purpose
from razor_dist.parallel.zigzag import Interval


@dataclass(frozen=True)
class KVPiece:
    """Keys and values ``[K, n, D]`` of consecutive positions."""

    at: Interval
    k: Tensor
    v: Tensor

    def heads(self, index: slice) -> KVPiece:
        return KVPiece(self.at, self.k[index], self.v[index])

    def part(self, interval: Interval) -> KVPiece:
        both = self.at & interval
        span = slice(both.begin - self.at.begin, both.end - self.at.begin)
        return KVPiece(both, self.k[:, span], self.v[:, span])


def assemble(pieces: Sequence[KVPiece], interval: Interval) -> tuple[Tensor, Tensor]:
    """Keys and values ``[K, n, D]`` of ``interval``, in order, from pieces that cover it."""
    # Plain numbers, for speed: every layer does this with every piece of a window.
    position, end = interval.begin, interval.end
    touched = [p for p in pieces if p.at.begin < end and p.at.end > position]
    touched.sort(key=lambda p: p.at.begin)
    ks, vs = [], []
    for piece in touched:
        begin, stop = piece.at.begin, min(piece.at.end, end)
        if stop > position:  # pieces may overlap: what is already covered is skipped
            assert begin <= position, "pieces leave a gap"
            ks.append(piece.k[:, position - begin : stop - begin])
            vs.append(piece.v[:, position - begin : stop - begin])
            position = stop
    assert position >= end, "pieces do not cover the interval"
    if not ks:
        return pieces[0].k[:, :0], pieces[0].v[:, :0]
    if len(ks) == 1:
        return ks[0], vs[0]
    return torch.cat(ks, 1), torch.cat(vs, 1)


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Disjoint, sorted intervals that cover the same positions."""
    merged: list[Interval] = []
    for interval in sorted((i for i in intervals if len(i)), key=lambda i: i.begin):
        if merged and interval.begin <= merged[-1].end:
            merged[-1] = Interval(merged[-1].begin, max(merged[-1].end, interval.end))
        else:
            merged.append(interval)
    return merged


class Exchange:
    """A plan of the positions that each rank sends to each other, the same for every layer.

    ``holdings`` are disjoint intervals, each with the rank that holds it. ``wants`` are, by rank,
    the positions that it needs; those that it does not hold are sent to it. ``rank`` is this rank.
    """

    def __init__(
        self,
        holdings: Sequence[tuple[Interval, int]],
        wants: Sequence[Sequence[Interval]],
        rank: int,
    ) -> None:
        # Intervals by peer, in the order of positions: a message carries no positions, so both ends
        # must list its intervals alike.
        self._sends: dict[int, list[Interval]] = {}
        self._receives: dict[int, list[Interval]] = {}
        in_order = sorted(holdings, key=lambda h: h[0].begin)
        own = [(held, holder) for held, holder in in_order if holder == rank]
        for receiver, wanted in enumerate(wants):
            for want in union(wanted):
                for held, holder in in_order if receiver == rank else own:
                    both = held & want
                    if not len(both) or holder == receiver:
                        continue
                    if holder == rank:
                        self._sends.setdefault(receiver, []).append(both)
                    else:
                        self._receives.setdefault(holder, []).append(both)

    @property
    def sent_tokens(self) -> int:
        return sum(self.tokens_to.values())

    @property
    def tokens_to(self) -> dict[int, int]:
        """Tokens that this rank sends, by receiver."""
        return {rank: sum(map(len, sent)) for rank, sent in self._sends.items()}

    def start(
        self,
        comm: Communicator,
        pieces: Sequence[KVPiece],
        purpose: Purpose,
        heads: Sequence[slice] = (),
    ) -> Arriving:
        """Start one layer's transfers.

        ``pieces`` are this rank's: disjoint, and one at least, which may be empty. ``heads`` are,
        by rank, the pieces' heads that it is sent, by default all.
        """
        sends = []
        ordered = sorted(pieces, key=lambda p: p.at.begin)
        begins = [p.at.begin for p in ordered]

        def touched(interval: Interval) -> Sequence[KVPiece]:
            first = max(0, bisect.bisect_right(begins, interval.begin) - 1)
            return ordered[first : bisect.bisect_left(begins, interval.end)]

        for receiver, intervals in self._sends.items():
            pairs = [assemble(touched(interval), interval) for interval in intervals]
            if heads:
                pairs = [(k[heads[receiver]], v[heads[receiver]]) for k, v in pairs]
            packed = torch.stack([torch.cat(parts, 1) for parts in zip(*pairs, strict=True)])
            sends.append((receiver, packed))
        like = pieces[0].k[heads[comm.rank]] if heads else pieces[0].k
        receives = []
        for holder, intervals in self._receives.items():
            shape = (2, like.shape[0], sum(map(len, intervals)), like.shape[2])
            receives.append((holder, like.new_empty(shape)))
        return Arriving(comm.exchange(sends, receives, purpose), list(self._receives.values()))


@dataclass
class Arriving:
    pending: Pending
    intervals: list[list[Interval]]

    def wait(self) -> list[KVPiece]:
        return [
            KVPiece(interval, *part)
            for packed, intervals in zip(self.pending.wait(), self.intervals, strict=True)
            for interval, part in zip(
                intervals, packed.split(list(map(len, intervals)), 2), strict=True
            )
        ]
