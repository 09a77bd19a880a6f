"""Indexes of n-grams, in which `razor_dist.engine.drafts` finds what a text repeats."""

from __future__ import annotations

import copy
from collections.abc import Hashable

import numpy as np

from razor_dist.engine.request import Request
from razor_dist.protocol.messages import Tokens

# Earlier places of the last tokens that are compared, the latest ones.
_CANDIDATES = 16
# Multiplier of the hash of tokens: the fraction of the golden ratio, as Knuth proposes.
_KNUTH = 2654435761
# Prompts of fewer tokens are indexed anew, in about a millisecond.
_LEAST_KEPT = 4096
# Indexes of the others that are kept, and their tokens together at most (15 to 20 bytes each).
_MOST_KEPT = 16
_MOST_KEPT_TOKENS = 1 << 22


class NgramIndex:
    """Earlier places of a sequence's last tokens: hash chains, as in LZ77 compressors.

    ``_last[h]`` is the end of the last ``n`` tokens with hash h, and ``_before[i]`` the end before
    position i in its chain; both are −1 where there is none. A token is added in constant time.

    Parameters
    ----------
    tokens : int32 ``[N]``
        The sequence so far.
    n : int
        Tokens that must be alike.
    """

    def __init__(self, tokens: Tokens, n: int) -> None:
        self._n, self._count = n, 0
        room = max(1024, len(tokens) + len(tokens) // 4)
        self._tokens, self._before = np.empty(room, np.int32), np.full(room, -1, np.int32)
        self._mask = (1 << room.bit_length()) - 1
        self._last = np.full(self._mask + 1, -1, np.int32)
        self._extend(tokens)

    def _extend(self, tokens: Tokens) -> None:
        """Append tokens, for which there is room, as `add` does one by one."""
        first, self._count = self._count, self._count + len(tokens)
        self._tokens[first : self._count] = tokens
        ends, slots = self._slots(first)
        if not len(ends):
            return
        order = np.argsort(slots, kind="stable")
        of, at = slots[order], ends[order]
        same = of[1:] == of[:-1]
        oldest, newest = np.append(True, ~same), np.append(~same, True)
        self._before[at[oldest]] = self._last[of[oldest]]
        self._before[at[1:][same]] = at[:-1][same]
        self._last[of[newest]] = at[newest]

    def _cut(self, count: int) -> None:
        """Forget all but the first ``count`` tokens."""
        ends, slots = self._slots(count)
        # Of several in a chain the first one, which comes last here, says what was before.
        self._last[slots[::-1]] = self._before[ends[::-1]]
        self._count = count

    def _slots(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of ``n`` tokens from a position on, and the slots of their hashes."""
        begin = max(0, first - self._n + 1)
        count = max(0, self._count - self._n + 1 - begin)
        hashed = np.zeros(count, np.uint64)
        for at in range(begin, begin + self._n):
            hashed = hashed * np.uint64(_KNUTH) + self._tokens[at : at + count].astype("u8")
        return np.arange(count) + begin + self._n - 1, self._slot(hashed)

    def shared(self, tokens: Tokens) -> int:
        """Return how many of its first tokens are the first of these."""
        n = min(self._count, len(tokens))
        other = self._tokens[:n] != tokens[:n]
        return int(other.argmax()) if other.any() else n

    def has_room(self, tokens: Tokens) -> bool:
        """True if its table is large enough for as many tokens."""
        return len(tokens) <= len(self._tokens) and len(tokens) <= self._mask

    def begun(self, tokens: Tokens, shared: int) -> NgramIndex:
        """Return an index of tokens of which the first ``shared`` are this one's."""
        own = self.copy()
        own._cut(shared)
        own._extend(tokens[shared:])
        return own

    def __len__(self) -> int:
        return self._count

    def copy(self) -> NgramIndex:
        """Return an index that goes on by itself; sorting the tokens takes ten times as long."""
        own = copy.copy(self)
        own._tokens, own._before, own._last = (
            a.copy() for a in (self._tokens, self._before, self._last)
        )
        return own

    def _slot(self, hashed: np.ndarray) -> np.ndarray:
        return ((hashed * np.uint64(_KNUTH)) >> np.uint64(20)) & np.uint64(self._mask)

    def add(self, token: int) -> None:
        """Append a token."""
        end = self._count
        if end == len(self._tokens):
            # The chains stay as they are, though the table is smaller than a new one would be.
            self._tokens = np.resize(self._tokens, 2 * end)
            self._before = np.append(self._before, np.full(end, -1, np.int32))
        self._tokens[end] = token
        self._count += 1
        if self._count < self._n:
            return
        hashed = 0
        for last in self._tokens[self._count - self._n : self._count].tolist():
            hashed = (hashed * _KNUTH + last) & 0xFFFFFFFFFFFFFFFF
        slot = (hashed * _KNUTH & 0xFFFFFFFFFFFFFFFF) >> 20 & self._mask
        self._before[end] = self._last[slot]
        self._last[slot] = end

    def find(self, longest: int) -> tuple[int, int]:
        """Return the position after the best earlier match of the last tokens, and its length.

        The longest match is best, and the latest of those. It has ``longest`` tokens at most, and
        0 if fewer than ``n`` are alike anywhere.
        """
        end = self._count - 1
        ends: list[int] = []
        at = int(self._before[end]) if self._count > self._n else -1
        while at >= 0 and len(ends) < _CANDIDATES:
            ends.append(at)
            at = int(self._before[at])
        if not ends:
            return -1, 0
        span = np.arange(min(longest, self._count))
        # What stands before the beginning is position -1, ..., and equals nothing.
        places = np.array(ends)[:, None] - span
        alike = (self._tokens[places] == self._tokens[end - span]) & (places >= 0)
        lengths = np.logical_and.accumulate(alike, axis=1).sum(1)
        best = int(lengths.argmax())
        if lengths[best] < self._n:  # others with the same hash
            return -1, 0
        return ends[best] + 1, int(lengths[best])

    def token(self, at: int) -> int:
        return int(self._tokens[at])

    def following(self, at: int, count: int) -> list[int]:
        """Return ``count`` tokens from a position on; behind the end comes a copy of these."""
        found: list[int] = self._tokens[at : min(at + count, self._count)].tolist()
        while len(found) < count:
            found += found[: count - len(found)]
        return found


class PromptIndexes:
    """Indexes of prompts. A new one begins as a copy of the kept one with which it shares most.

    Its tokens need no sorting then, which takes 0.3 s for a million, in which all answers wait.
    Only within one namespace: time must not tell what others have read.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        # With their namespaces; the last one used is at the end. They go on as their answers do.
        self._kept: list[tuple[Hashable, NgramIndex]] = []

    def of(self, request: Request) -> NgramIndex:
        """Return an index of a prompt for one of its answers."""
        tokens = request.tokens
        if len(tokens) < _LEAST_KEPT:
            return NgramIndex(tokens, self._n)
        space: Hashable = request.namespace if request.cache_prompt else request.key
        shared = [
            (at, len(index), index.shared(tokens))
            for at, (own, index) in enumerate(self._kept)
            if own == space and index.has_room(tokens)
        ]
        # The tokens of a copy that need not be sorted, less those that it has to forget.
        saved = [2 * count - length for _, length, count in shared]
        if max(saved, default=0) > len(tokens) / 2:
            at, _, count = shared[saved.index(max(saved))]
            index = self._kept.pop(at)[1].begun(tokens, count)
        else:
            index = NgramIndex(tokens, self._n)
        self._kept.append((space, index))
        while (
            len(self._kept) > _MOST_KEPT
            or sum(len(own) for _, own in self._kept) > _MOST_KEPT_TOKENS
        ):
            self._kept.pop(0)
        return index
