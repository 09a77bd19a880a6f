"""Streaming heads in a sequence-parallel chunk: what the ranks exchange.

`WindowPlan` says, from positions alone, what a chunk needs: the halo before every shard, the sinks,
the compensation sums at the edges where they change, and at the prompt's end the whole window on
every rank. What is computed with it is in `razor_dist.attention.streaming`.

Each shard's window begins where that of its first query does, at an *edge*; keys before it have
been dropped by then, and the shard's queries need their sum. For a chunk of four shards::

    dropped before | dropped during it |    window of the next query     |
    ...............+----+----+----+----+---------+-------+-------+-------+
                  e0   e1   e2   e3   e4   ...   shard 0   1   2   3
                 base  edges of shards 0 to 3, then of the query after the chunk

The sums up to ``base`` are known from the chunk before. Every rank adds up what it holds between
consecutive edges; one all-reduce of these few rows and a running sum then give every rank the sums
at every edge, though no rank has seen all the keys. Tokens between an edge and a later query's
window start are in the halo, so that the rank adds them up by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.cache.policy import StreamingPolicy, WindowRun
from razor_dist.parallel.halo import Exchange, KVPiece
from razor_dist.parallel.zigzag import Chunk, Interval, holdings


@dataclass(frozen=True)
class QuerySpan:
    """Adjacent queries of this rank."""

    at: Interval
    offset: int  # index of the first one among the rank's tokens of the chunk
    edge: int  # index in `WindowPlan.edges` of the first query's window start
    runs: list[WindowRun]  # the queries that are not sinks, by where their window starts


@dataclass(frozen=True)
class WindowPlan:
    """The exchanges of one chunk's streaming heads; the same for every layer."""

    # Ascending positions, none below N0; compensation sums are needed at each of them.
    edges: list[int]
    # This rank's queries; empty where streaming heads attend in full (exact prefill).
    spans: list[QuerySpan]
    halo: Exchange
    sinks: Exchange
    new_sinks: Interval  # sinks among the chunk's tokens
    # Positions to store in the streaming cache at the prompt's end, those of its tail before those
    # of the window.
    window: Interval | None
    keep: int  # where the window of the next query begins; earlier tokens are in the sums
    # With tensor-parallel decode: brings windows to the ranks that keep them, each for its heads.
    handover: Exchange | None = None

    @property
    def changes_sums(self) -> bool:
        """True if any token moves into the compensation sums in this chunk."""
        return self.edges[-1] > self.edges[0]


class Storage(NamedTuple):
    """A rank's part of the window at a prompt's end, stored so that decode needs no traffic."""

    tail: int = 0  # tokens before the window that are stored too
    shared: bool = False  # a rank stores some of the heads; else every rank all of them


def plan_window(
    policy: StreamingPolicy,
    chunk: Chunk,
    rank: int,
    *,
    base: int,
    held: Sequence[tuple[Interval, int]],
    stored: Storage | None,
) -> WindowPlan:
    """Plan one chunk with local prefill; ``stored`` is None unless the prompt ends with it.

    The compensation sums cover ``[N0, base)`` when the chunk begins. ``held`` names the ranks that
    hold parts of ``[base - tail, chunk.begin)``; it is empty if every rank holds all of it.
    """
    sinks = policy.sinks
    # Sinks are kept for good: a window, and what is dropped, begin after them.
    starts = [max(sinks, policy.start(c.begin)) for c in chunk.shards]
    next_start = max(sinks, policy.start(chunk.end))
    edges = [max(sinks, base), *starts, next_start]

    window = None if stored is None else _window(sinks, next_start, chunk.end, stored.tail)
    shared = stored is not None and stored.shared
    at_end = [[window] if window else [] for _ in range(chunk.world_size)]
    wants: list[list[Interval]] = [[] if shared else list(want) for want in at_end]
    for owner in range(chunk.world_size):
        for index in chunk.indices(owner):
            if len(chunk.shards[index]):
                wants[owner].append(Interval(starts[index], chunk.shards[index].begin))
    own = holdings([chunk], chunk.span)

    spans: list[QuerySpan] = []
    offset = 0
    for index in chunk.indices(rank):
        shard = chunk.shards[index]
        if spans and spans[-1].at.end == shard.begin:  # the last rank's shards are neighbours
            before = spans.pop()
            at, first, edge = Interval(before.at.begin, shard.end), before.offset, before.edge
        else:
            at, first, edge = shard, offset, 1 + index
        if len(at):
            spans.append(QuerySpan(at, first, edge, policy.runs(max(at.begin, sinks), at.end)))
        offset += len(shard)
    return WindowPlan(
        edges,
        spans,
        Exchange([*held, *own], wants, rank),
        *_plan_sinks(sinks, chunk, own, rank),
        window,
        next_start,
        Exchange([*held, *own], at_end, rank) if shared else None,
    )


def _window(sinks: int, start: int, end: int, tail: int) -> Interval:
    return Interval(max(sinks, start - tail), max(start, end))


def plan_compression(
    policy: StreamingPolicy,
    done: Sequence[Chunk],
    rank: int,
    stored: Storage,
) -> WindowPlan:
    """Plan the end of an exact prefill: sinks, sums and window of all chunks of the prompt."""
    world_size, end = done[-1].world_size, done[-1].end
    next_start = max(policy.sinks, policy.start(end))
    window = _window(policy.sinks, next_start, end, stored.tail)
    whole = Chunk(done[0].begin, end, world_size)
    held = holdings(done, whole.span)
    windows, nothing = Exchange(held, [[window]] * world_size, rank), Exchange([], [], rank)
    return WindowPlan(
        [policy.sinks, next_start],
        [],
        nothing if stored.shared else windows,
        *_plan_sinks(policy.sinks, whole, held, rank),
        window,
        next_start,
        windows if stored.shared else None,
    )


def _plan_sinks(
    sinks: int, chunk: Chunk, held: Sequence[tuple[Interval, int]], rank: int
) -> tuple[Exchange, Interval]:
    new = Interval(chunk.begin, max(chunk.begin, min(chunk.end, sinks)))
    return Exchange(held, [[new]] * chunk.world_size, rank), new


def edge_sums(edges: Sequence[int], pieces: Sequence[KVPiece]) -> Tensor:
    """Sums of what ``pieces`` hold between consecutive edges: float32 ``[edges - 1, 2, K, D]``."""
    like = pieces[0].k
    sums = torch.zeros(
        len(edges) - 1, 2, like.shape[0], like.shape[2], dtype=torch.float32, device=like.device
    )
    for index, (begin, end) in enumerate(itertools.pairwise(edges)):
        for piece in pieces:
            if len(piece.at & Interval(begin, end)):
                part = piece.part(Interval(begin, end))
                sums[index, 0] += part.k.float().sum(1)
                sums[index, 1] += part.v.float().sum(1)
    return sums
