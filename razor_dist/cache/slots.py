"""Places of sequences' slots in an arena: arithmetic alone, the same on every rank.

Slots lie one after the other, each as wide as its sequence needs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.errors import EngineError


@dataclass(frozen=True)
class Arena:
    """Room for the streaming heads of one window: a place has one token's keys and values."""

    policy: StreamingPolicy
    places: int
    tail: int = 0  # dropped tokens that a slot keeps at most

    @classmethod
    def of(
        cls,
        policy: StreamingPolicy,
        tokens: int,
        sequences: float,
        tail: int = 0,
    ) -> Arena:
        """Return room for ``sequences`` of up to ``tokens`` tokens, also for a part of one."""
        arena = cls(policy, 0, tail)
        return replace(arena, places=int(sequences * arena.width(tokens)))

    @property
    def ring(self) -> int:
        """Index in a slot at which the ring begins."""
        return 1 + self.policy.sinks

    def width(self, total: int) -> int:
        """Places that the slot of a sequence of up to ``total`` tokens takes."""
        return self.ring + self.policy.capacity(total) + self.tail_capacity(total)

    def tail_capacity(self, total: int) -> int:
        return min(self.tail, max(0, self.policy.start(total) - self.policy.sinks))

    def kept_total(self, total: int, length: int) -> int:
        """Tokens for which a cached slot has room, made for ``total``, that has seen ``length``.

        It shrinks to ``length`` where its tokens need not move, or where that is worth it.
        """
        if length <= self.policy.capacity(length) and not self.policy.start(length):
            return length
        return length if 2 * self.width(length) <= self.width(total) else total

    def tail_begin(self, length: int, source: int = 0) -> int:
        """The first token that the slot of a sequence of ``length`` tokens has in its tail.

        ``source`` is that of the slot that it is a copy of.
        """
        return max(source, self.policy.sinks, self.policy.start(length) - self.tail)

    def can_cut(self, slot: StreamingSlot, length: int) -> bool:
        """True if a slot has all that is seen after its first ``length`` tokens."""
        return max(self.policy.sinks, self.policy.start(length)) >= slot.tail_begin

    def least_cut(self, length: int, tail_begin: int) -> int:
        """The least n, at most ``length``, to which a slot with this ``tail_begin`` can be cut."""
        if tail_begin <= self.policy.sinks:
            return 0
        # `start` never decreases.
        return bisect.bisect_left(range(length), tail_begin, key=self.policy.start)


@dataclass(frozen=True)
class SlotAt:
    """The memory of a slot, where it stays until another slot is allocated."""

    index: int  # in the compensation sums
    offset: int  # of the slot's first place in the arena


@dataclass
class StreamingSlot:
    """One sequence's share of the streaming cache.

    Always ``tail_begin <= ring_begin <= start``, and none of the three ever decreases.
    """

    index: int  # in the compensation sums
    offset: int  # of its first place in the arena; changes when another slot is allocated
    capacity: int  # tokens that its ring holds
    tail_capacity: int  # tokens that its tail holds
    start: int = 0  # s of the newest query seen: tokens in [N0, start) are in the compensation sums
    # Where the window's tokens begin in the ring: ``start``, but for a prompt read in chunks,
    # whose window is outside the slot. The tail has the tokens from ``tail_begin`` to there.
    ring_begin: int = 0
    tail_begin: int = 0
    length: int = 0  # tokens whose keys and values have been written
    cached: bool = False  # not in use: it may be evicted

    def __post_init__(self) -> None:
        assert 0 <= self.tail_begin <= self.ring_begin <= self.start

    @property
    def at(self) -> SlotAt:
        return SlotAt(self.index, self.offset)

    def width(self, ring: int) -> int:
        """Places that it takes; its ring begins at index ``ring``."""
        return ring + self.capacity + self.tail_capacity

    def read_to(self, start: int) -> None:
        """Move ``start`` alone, after a chunk of a prompt that goes on."""
        assert self.start <= start
        self.start = start

    def advance(self, start: int, tail: int = 0) -> None:
        """Have the ring begin at ``start``, and the tail at ``tail`` at the earliest."""
        assert self.start <= start
        self.start = self.ring_begin = start
        self.tail_begin = min(start, max(self.tail_begin, tail, start - self.tail_capacity))


class SlotPool:
    """The slots of up to ``slots`` sequences in an arena.

    A slot takes a contiguous extent, the first that is long enough. Where none is, slots are moved
    together (`close_gaps`): whatever is no larger than the free places in sum can be allocated
    (`razor_dist.engine.scheduler` counts on that). The ranks allocate alike, so slots lie alike.
    """

    def __init__(self, arena: Arena, slots: int) -> None:
        self.arena = arena
        self._indices = list(range(slots - 1, -1, -1))  # that are free
        self._held: list[StreamingSlot] = []  # in the order of the arena

    def end(self, slot: StreamingSlot) -> int:
        """The place of the arena after a slot's last."""
        return slot.offset + slot.width(self.arena.ring)

    def places(self, *, cached: bool | None = None) -> int:
        """Places that slots take: all, or those that are or are not ``cached``."""
        return sum(slot.width(self.arena.ring) for slot in self.slots(cached=cached))

    def slots(self, *, cached: bool | None = None) -> list[StreamingSlot]:
        return [slot for slot in self._held if cached is None or slot.cached == cached]

    def capacities(self, total: int) -> tuple[int, int]:
        """Tokens that ring and tail hold of a sequence of up to ``total`` tokens."""
        return self.arena.policy.capacity(total), self.arena.tail_capacity(total)

    def fits(self, total: int) -> bool:
        """False if slots must be moved together first, or there is no room at all."""
        return self._first_gap(self.arena.width(total))[1] is not None

    def allocate(self, total: int) -> StreamingSlot:
        """Take a slot for a sequence of up to ``total`` tokens.

        `EngineError` if the arena is too small: a bug, for the scheduler admits only what fits.
        """
        need = self.arena.width(total)
        at, offset = self._first_gap(need)
        if offset is None:
            free = self.arena.places - self.places()
            raise EngineError(f"{need} places of a streaming cache needed, {free} free")
        slot = StreamingSlot(self._indices.pop(), offset, *self.capacities(total))
        self._held.insert(at, slot)
        return slot

    def _first_gap(self, need: int) -> tuple[int, int | None]:
        """Index in ``_held`` and offset for ``need`` places: in the first gap, or after all."""
        offset = 0
        for index, slot in enumerate(self._held):
            if slot.offset - offset >= need:
                return index, offset
            offset = self.end(slot)
        return len(self._held), offset if offset + need <= self.arena.places else None

    def close_gaps(self, total: int) -> Iterator[tuple[StreamingSlot, int]]:
        """Make a gap for a sequence of up to ``total`` tokens, if there is room for it at all.

        Slots move towards the arena's beginning, those between two gaps, of which the fewest places
        move. Yields each one and where it was, the first in the arena first.
        """
        need, first, run = self.arena.width(total), 0, slice(0, 0)
        begins = [*(slot.offset for slot in self._held), self.arena.places]
        ends = [0, *map(self.end, self._held)]
        gaps = [begin - end for begin, end in zip(begins, ends, strict=True)]
        widths = [end - begin for begin, end in zip(begins, ends[1:], strict=False)]
        # Places that are free from the gap `first` to the gap `last`, and that lie between these.
        free = between = 0
        least = self.arena.places
        for last, (gap, width) in enumerate(zip(gaps, [*widths, 0], strict=True)):
            free += gap
            while first < last and free - gaps[first] >= need:
                free, between = free - gaps[first], between - widths[first]
                first += 1
            if free >= need and between < least:
                least, run = between, slice(first, last)
            between += width
        at = ends[run.start]
        for slot in self._held[run]:
            old, slot.offset = slot.offset, at
            at = self.end(slot)
            yield slot, old

    def release(self, slot: StreamingSlot) -> None:
        self._held.remove(slot)
        self._indices.append(slot.index)
