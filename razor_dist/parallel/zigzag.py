"""Which rank holds which positions of a wave, by arithmetic alone.

A wave ``[begin, end)`` is cut into 2P chunks; rank r holds chunks r and 2P-1-r. Early chunks see
few keys and late ones many, so every rank gets the same causal work. The last token is always in
chunk 2P-1 and so on rank 0, which samples.
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
class Wave:
    """Positions ``[begin, end)`` of one sequence, prefilled together by ``world_size`` ranks."""

    begin: int
    end: int
    world_size: int

    def __post_init__(self) -> None:
        assert self.end > self.begin and self.world_size >= 1

    @cached_property
    def chunks(self) -> tuple[Interval, ...]:
        """The 2P chunks in order; some are empty when the wave is shorter than 2P tokens."""
        n, parts = self.end - self.begin, 2 * self.world_size
        edges = [self.begin + n * j // parts for j in range(parts + 1)]
        return tuple(Interval(a, b) for a, b in itertools.pairwise(edges))

    def indices(self, rank: int) -> tuple[int, int]:
        """Indices of the early and the late chunk of ``rank``."""
        return rank, 2 * self.world_size - 1 - rank

    def owned(self, rank: int) -> tuple[Interval, Interval]:
        """The early and the late chunk of ``rank``."""
        early, late = self.indices(rank)
        return self.chunks[early], self.chunks[late]

    def tokens(self, rank: int) -> int:
        """How many tokens of the wave ``rank`` holds."""
        return sum(len(chunk) for chunk in self.owned(rank))


def waves(begin: int, end: int, wave_tokens: int, world_size: int) -> list[Wave]:
    """Cut ``[begin, end)`` into waves of at most ``wave_tokens`` tokens."""
    return [Wave(a, min(a + wave_tokens, end), world_size) for a in range(begin, end, wave_tokens)]


def holdings(done: Sequence[Wave], retained: Interval) -> list[tuple[Interval, int]]:
    """Which rank holds which part of ``retained`` after the waves ``done``, which are in order."""
    # From the newest wave back to where it begins: not all waves of a long prompt.
    recent = itertools.takewhile(lambda wave: wave.end > retained.begin, reversed(done))
    return [
        (chunk & retained, rank)
        for wave in recent
        for rank in range(wave.world_size)
        for chunk in wave.owned(rank)
        if len(chunk & retained)
    ]
