"""The positions of a chunk that each rank holds, by arithmetic alone.

A chunk ``[begin, end)`` is cut into 2P shards; rank r holds shards r and 2P-1-r. Early shards see
few keys and late ones many, so every rank gets the same causal work. The last token is always in
shard 2P-1 and so on rank 0, which samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Interval:
    """Positions ``[begin, end)``."""

    begin: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def __and__(self, other: Interval) -> Interval:
        begin = max(self.begin, other.begin)
        return Interval(begin, max(begin, min(self.end, other.end)))


@dataclass(frozen=True)
class Chunk:
    """Positions ``[begin, end)`` of one sequence, prefilled together by ``world_size`` ranks.

    ``whole`` is where the chunk began and ended, if it has been cut since.
    """

    begin: int
    end: int
    world_size: int
    whole: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert self.end > self.begin and self.world_size >= 1

    def cut(self, end: int, begin: int = 0) -> Chunk:
        """The part of this chunk that lies in ``[begin, end)``."""
        whole = self.whole or (self.begin, self.end)
        return Chunk(max(begin, self.begin), min(end, self.end), self.world_size, whole)

    @property
    def span(self) -> Interval:
        return Interval(self.begin, self.end)

    @cached_property
    def shards(self) -> tuple[Interval, ...]:
        """The 2P shards in order; some are empty when the chunk is shorter than 2P tokens."""
        begin, end = self.whole or (self.begin, self.end)
        n, parts = end - begin, 2 * self.world_size
        edges = [begin + n * j // parts for j in range(parts + 1)]
        return tuple(Interval(a, b) & self.span for a, b in itertools.pairwise(edges))

    def indices(self, rank: int) -> tuple[int, int]:
        """Indices of the early and the late shard of ``rank``."""
        return rank, 2 * self.world_size - 1 - rank

    def owned(self, rank: int) -> tuple[Interval, Interval]:
        early, late = self.indices(rank)
        return self.shards[early], self.shards[late]

    def ranges(self, rank: int) -> list[range]:
        return [range(shard.begin, shard.end) for shard in self.owned(rank)]

    def tokens(self, rank: int) -> int:
        return sum(len(shard) for shard in self.owned(rank))


def whole_shards(tokens: float, world_size: int) -> int:
    """The largest multiple of 2P up to ``tokens``, but at least 2P: 2P shards of one length.

    All chunks of a prompt but the last have such a length. Then every rank holds as many of the
    prompt's tokens as if it were one chunk, since 2P more tokens make each shard one token longer.
    """
    parts = 2 * world_size
    return max(int(tokens) // parts, 1) * parts


def chunks(begin: int, end: int, chunked_prefill_size: int, world_size: int) -> list[Chunk]:
    """Cut ``[begin, end)`` into chunks of `whole_shards` of ``chunked_prefill_size`` tokens."""
    size = whole_shards(chunked_prefill_size, world_size)
    return [Chunk(a, min(a + size, end), world_size) for a in range(begin, end, size)]


def holdings(done: Sequence[Chunk], retained: Interval) -> list[tuple[Interval, int]]:
    """Parts of ``retained``, each with its rank, after the chunks ``done``, which are in order."""
    # From the newest chunk back to the one where ``retained`` begins, for speed in long prompts.
    recent = itertools.takewhile(lambda chunk: chunk.end > retained.begin, reversed(done))
    return [
        (shard & retained, rank)
        for chunk in recent
        for rank in range(chunk.world_size)
        for shard in chunk.owned(rank)
        if len(shard & retained)
    ]
