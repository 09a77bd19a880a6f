"""The view of a streaming head: the single definition, used by prefill, decode, cache and planner.

For a query at position ``i`` (0-based)::

    L(i) = min(max(S0, ceil((i + 1) / C)), W_max)
    s(i) = B * floor((i + 1 - L(i)) / B)

A streaming head attends to the sinks ``[0, N0)``, to the window ``[s(i), i]`` and, when
``s(i) > N0``, to one compensation token that stands for ``D(i) = [N0, s(i))``
(RazorAttention, Algorithm 1 and equations 4 and 5).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.validation import check_least

_SETTINGS = EngineConfig.model_fields
_NO_RATIO = 2**62  # of which any context is at most 1


class WindowRun(NamedTuple):
    """Consecutive queries ``[begin, end)`` whose window starts at the same ``start``."""

    begin: int
    end: int
    start: int


@dataclass(frozen=True)
class StreamingPolicy:
    """Settings of the streaming heads' cache.

    ``window_min``    S0, the least number of recent tokens kept
    ``window_ratio``  C: the window is at least 1/C of the context; None gives a constant window
    ``window_max``    W_max, a cap on the window; without it a window of N/C outgrows a shard of N/P
    ``sinks``         N0, the number of first tokens kept
    ``block``         B: the window starts at a multiple of B, so it holds L to L+B-1 tokens
    ``compensation``  represent the dropped tokens by their mean key and value
    """

    window_min: int = _SETTINGS["window_min"].default
    window_ratio: int | None = _SETTINGS["window_ratio"].default
    window_max: int | None = _SETTINGS["window_max"].default
    sinks: int = _SETTINGS["sink_tokens"].default
    block: int = _SETTINGS["block"].default
    compensation: bool = _SETTINGS["compensation"].default

    def __post_init__(self) -> None:
        check_least(self, window_min=1, window_ratio=1, window_max=1, sinks=0, block=1)
        if self.window_max is not None and self.window_max < self.window_min:
            raise ConfigError(
                f"window_max ({self.window_max}) must not be below window_min ({self.window_min})"
            )

    @classmethod
    def of(cls, config: EngineConfig) -> StreamingPolicy:
        same = {f.name: getattr(config, f.name) for f in fields(cls) if f.name != "sinks"}
        return cls(sinks=config.sink_tokens, **same)

    def with_window(self, tokens: int | None, *, alibi: bool) -> StreamingPolicy:
        """The policy of a head with a window of its own; ``tokens`` None gives this policy itself.

        With ``alibi`` it is a head whose scope the window covers (`razor_dist.identify.scope`):
        beyond it no key has a weight of note, so it needs no sinks and no compensation token.
        Other models' heads keep those of the settings. ``block`` is always the settings'.
        """
        if tokens is None:
            return self
        own = replace(self, window_min=tokens, window_ratio=None, window_max=None)
        return replace(own, sinks=0, compensation=False) if alibi else own

    def window(self, position: int) -> int:
        """L(i): the length in tokens that the window of query ``position`` must cover."""
        length = max(self.window_min, -(-(position + 1) // (self.window_ratio or _NO_RATIO)))
        return min(length, self.window_max or length)

    def start(self, position: int) -> int:
        """s(i): the first position in the window of query ``position``; never decreases."""
        return max(0, self.block * ((position + 1 - self.window(position)) // self.block))

    def run(self, position: int, most: int) -> int:
        """Consecutive queries from ``position`` on, ``most`` of them, that see one window start."""
        start = self.start(position)
        return next((n for n in range(1, most) if self.start(position + n) != start), most)

    def dropped(self, position: int) -> int:
        """|D(i)|: how many tokens the compensation token stands for."""
        return max(0, self.start(position) - self.sinks)

    def seen(self, position: int) -> int:
        """Keys that query ``position`` attends to, the compensation token among them."""
        first = max(self.sinks, self.start(position))
        sinks, window = min(self.sinks, position + 1), max(0, position + 1 - first)
        return sinks + window + (self.compensation and first > self.sinks)

    def capacity(self, max_tokens: int) -> int:
        """Upper bound of the window's live tokens in a sequence of ``max_tokens`` tokens."""
        if max_tokens <= 0:
            return 0
        return min(max_tokens, self.window(max_tokens - 1) + self.block - 1)

    def starts(self, begin: int, end: int) -> np.ndarray:
        """s(i) for every query in ``[begin, end)``, int64."""
        i = np.arange(begin, end, dtype=np.int64)
        share = -(-(i + 1) // (self.window_ratio or _NO_RATIO))
        length = np.clip(share, self.window_min, self.window_max)
        return np.maximum(0, self.block * ((i + 1 - length) // self.block))

    def runs(self, begin: int, end: int) -> list[WindowRun]:
        """Split the queries ``[begin, end)`` where their window start changes."""
        if begin >= end:
            return []
        starts = self.starts(begin, end)
        edges = np.flatnonzero(np.diff(starts)) + 1
        bounds = [0, *edges.tolist(), end - begin]
        return [
            WindowRun(begin + lo, begin + hi, int(starts[lo]))
            for lo, hi in itertools.pairwise(bounds)
        ]


def saves_from(heads: Mapping[StreamingPolicy, int], copies: int) -> int | None:
    """Return the longest context, in tokens, up to which windows save nothing.

    Up to it ``copies`` of each streaming head's window take as much as the heads' whole context.
    ``heads`` counts the streaming heads of each policy. None if windows never save anything, or no
    head streams.
    """

    def saves(tokens: int) -> bool:
        kept = sum(n * min(tokens, policy.window(tokens - 1)) for policy, n in heads.items())
        return copies * kept < tokens * sum(heads.values())

    first = bisect.bisect_left(range(_NO_RATIO), True, key=saves)
    return None if first == _NO_RATIO else first - 1
