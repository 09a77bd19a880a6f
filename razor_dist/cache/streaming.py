"""The small cache of the streaming heads that share a window: of all, or of those a rank keeps.

A sequence's slot holds, for each of these KV heads, of every layer, ``1 + N0 + capacity`` keys and
values, where ``capacity`` covers the longest window that the sequence can come to have::

    [ compensation token | sinks 0..N0-1 | ring of the window | tail ]

Slots lie one after the other in an arena, each as wide as its sequence needs (`StreamingCache`).
The window's token at position p lies at ring index ``p mod capacity``; with rotated keys order
does not matter. Nothing is moved and nothing concatenated: which places a query sees follows from
its position and ``s`` alone (`razor_dist.kernels.decode`), and no other place is ever read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from razor_dist.cache.slots import Arena, SlotAt, SlotPool, StreamingSlot
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.zigzag import Interval

# Bytes that are copied together from one slot to another.
_TOGETHER_BYTES = 64 << 20


@dataclass(frozen=True)
class SinksAndSums:
    """Keys and values that one sequence's heads see beside their windows, between chunks."""

    k: Tensor  # [K, N0, D]: the sinks; those not yet reached may hold anything
    v: Tensor
    sums: Tensor  # float32 [2, K, D]: of the dropped keys and values

    def heads(self, index: slice) -> SinksAndSums:
        return SinksAndSums(self.k[index], self.v[index], self.sums[:, index])


@dataclass
class ChunkedWindow:
    """A prompt's window between two chunks, which is outside its slot: this rank's part of it.

    Attention replaces it layer by layer: at a million tokens on one rank, the windows of all layers
    take gigabytes.
    """

    pieces: dict[int, list[KVPiece]] = field(default_factory=dict)  # by layer
    # With tensor-parallel decode, of all ranks' heads: their sinks and sums; and the positions of
    # the window before the prompt, with the rank that has them.
    fixed: SinksAndSums | None = None
    held: list[tuple[Interval, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(p.k.nbytes + p.v.nbytes for of in self.pieces.values() for p in of)


class StreamingCache:
    """Sinks, window and compensation sums of the streaming KV heads of one window.

    ``rows`` counts these KV heads of all layers together, layer by layer; ``slots`` the sequences
    held at once. Keys and values are of ``dtype``, the sums float32.

    Where a sequence's slot lies is `SlotPool`'s to say.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        arena: Arena,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.arena, self.policy = arena, arena.policy
        self.rows = slice(0, rows)
        self.device = device
        shape = (rows, arena.places, head_dim)
        # torch.empty: what no sequence has used yet is not resident on CPU.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.sums = torch.empty(2, rows, slots, head_dim, dtype=torch.float32, device=device)
        self._pool, self._ring = SlotPool(arena, slots), arena.ring
        # Of prompts that are read in chunks, by `StreamingSlot.index`.
        self.chunked: dict[int, ChunkedWindow] = {}

    def view(self, rows: slice, slot: SlotAt, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, width, D]`` of a slot's first ``width`` places."""
        at = slice(slot.offset, slot.offset + width)
        return self.k[rows, at], self.v[rows, at]

    @property
    def free_places(self) -> int:
        return self.arena.places - self._pool.places()

    @property
    def reserved_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + self.sums.nbytes

    @property
    def used_bytes(self) -> int:
        return self._bytes(cached=False) + sum(of.nbytes for of in self.chunked.values())

    @property
    def cached_bytes(self) -> int:
        return self._bytes(cached=True)

    def _bytes(self, *, cached: bool) -> int:
        rows, _, head_dim = self.k.shape
        keys_and_values = self._pool.places(cached=cached) * (self.k.itemsize + self.v.itemsize)
        sums = 2 * len(self._pool.slots(cached=cached)) * self.sums.itemsize
        return rows * head_dim * (keys_and_values + sums)

    def allocate(self, total: int) -> StreamingSlot:
        """Take a slot for a sequence of up to ``total`` tokens; see `SlotPool.allocate`."""
        if not self._pool.fits(total):
            self._close_gaps(total)
        slot = self._pool.allocate(total)
        self.sums[:, :, slot.index] = 0
        return slot

    def _close_gaps(self, total: int) -> None:
        for slot, old in self._pool.close_gaps(total):
            # What has been written, of ring and tail, row by row: the two may overlap, and a copy
            # of one row is small.
            tail, end = self._ring + slot.capacity, slot.width(self._ring)
            for a, b in ((0, self._ring + min(slot.capacity, slot.length)), (tail, end)):
                for row in (*self.k, *self.v):
                    row[slot.offset + a : slot.offset + b] = row[old + a : old + b].clone()

    def release(self, slot: StreamingSlot) -> None:
        self._pool.release(slot)
        self.chunked.pop(slot.index, None)

    def cache(self, slot: StreamingSlot, length: int, total: int) -> None:
        """Mark a slot of ``total`` tokens, of which it has seen ``length``, as cached: not in use.

        Places that it will not need are free then (`Arena.kept_total`).
        """
        slot.cached = True
        if self.arena.kept_total(total, length) == total:
            return
        old = replace(slot)
        slot.capacity, slot.tail_capacity = self._pool.capacities(length)
        if length <= slot.capacity and slot.start <= self.policy.sinks:
            return  # each token has its place already
        for rows in self.batches(length, most=1):  # a copy of one row is small
            self.restore(slot, rows, self.state(old, rows, length))

    def fork(
        self, slot: StreamingSlot, length: int, total: int, *, instead: bool = False
    ) -> StreamingSlot:
        """Return a slot with room for ``total`` tokens that has seen the first ``length``.

        The tail has what left the window after them (`Arena.least_cut`). With ``instead``, it takes
        the place of ``slot``, which is released: all of it is copied out first, to host memory,
        since on a device beside full caches there may be no room for it.
        """
        states: Iterable[tuple[slice, Mapping[str, Tensor]]]
        states = ((rows, self.state(slot, rows, length)) for rows in self.batches(length))
        if instead:
            kept = [(rows, _on(torch.device("cpu"), state)) for rows, state in states]
            states = ((rows, _on(self.k.device, state)) for rows, state in kept)
            self.release(slot)
        copy = self.allocate(total)
        for rows, state in states:
            self.restore(copy, rows, state)
        return copy

    def batches(self, length: int, most: int = _TOGETHER_BYTES) -> list[slice]:
        """Cut the rows into slices whose `state` of ``length`` tokens is about ``most`` bytes.

        A slice has one row at least, unless there is none: then there is one slice all the same.
        """
        row = max(1, self.arena.width(length)) * self.k.shape[-1] * self.k.itemsize * 2
        step = max(1, most // row)
        rows = self.rows.stop
        return [slice(a, min(a + step, rows)) for a in range(0, max(1, rows), step)]

    def state(
        self, slot: StreamingSlot, rows: slice, length: int, tail: int = 0
    ) -> dict[str, Tensor]:
        """Return copies of all that some rows of a slot need of their first ``length`` tokens.

        ``length`` is at least `Arena.least_cut`. The tail begins at ``tail`` at the earliest. ``k``
        and ``v`` ``[K, n, D]`` are of the sinks, the tail and the window, ``sums`` float32
        ``[2, K, D]``, and ``at`` the positions at which window and tail begin, and ``length``.
        """
        sinks = self.policy.sinks
        before = max(slot.start, sinks)
        begin = min(before, max(sinks, self.policy.start(length)))
        tail = max(slot.tail_begin, begin - self.arena.tail, sinks, min(tail, begin))
        first = self.read(rows, slot, 0, min(sinks, length))
        rest = self.read(rows, slot, tail, max(tail, length))
        k, v = (torch.cat(parts, dim=1) for parts in zip(first, rest, strict=True))
        sums = self.sums[:, rows, slot.index].clone()
        if self.policy.compensation and begin < before:
            stays, back = (sinks, begin), (begin, before)
            # A small difference of large sums would be their rounding.
            afresh = slot.tail_begin <= sinks and begin - sinks < before - begin
            parts = self.read(rows, slot, *(stays if afresh else back))
            for total, part in zip(sums, (x.float().sum(1) for x in parts), strict=True):
                total.copy_(part if afresh else total - part)
        at = torch.tensor([begin if slot.start else 0, tail, length])
        return {"k": k, "v": v, "sums": sums, "at": at}

    def restore(self, slot: StreamingSlot, rows: slice, state: Mapping[str, Tensor]) -> None:
        """Fill rows of a new slot, which has room for its tokens, with what `state` returned.

        The positions of the window and the tail are the slot's: all rows must have the same.
        """
        sinks = self.policy.sinks
        start, tail, length = state["at"].tolist()
        begin, first = max(start, sinks), min(sinks, length)
        slot.length = length
        slot.advance(start, tail)
        k, v = state["k"], state["v"]
        self.write(rows, self.places(slot, 0, first), k[:, :first], v[:, :first])
        window = slice(first + begin - tail, None)
        at = self.places(slot, begin, max(begin, length))
        # The rings differ in length, so the window's tokens move.
        self.write(rows, at, k[:, window], v[:, window])
        kept = max(tail, slot.tail_begin)
        if kept < begin:
            of_tail = slice(first + kept - tail, first + begin - tail)
            self.write(rows, self.tail_places(slot, kept, begin), k[:, of_tail], v[:, of_tail])
        if self.policy.compensation:
            self.sums[:, rows, slot.index] = state["sums"]
            if begin > sinks:
                self.refresh(rows, slot.at, begin - sinks)

    def places(self, slot: StreamingSlot, begin: int, end: int) -> Tensor:
        """Places in the arena of positions ``[begin, end)``: int64, on the cache's device."""
        position = torch.arange(begin, end, device=self.device)
        at = self._ring + position % max(1, slot.capacity)
        if begin < slot.ring_begin:
            at = torch.where(position < slot.ring_begin, self._tail_at(slot, position), at)
        return slot.offset + torch.where(position < self.policy.sinks, 1 + position, at)

    def tail_places(self, slot: StreamingSlot, begin: int, end: int) -> Tensor:
        """Like `places`, of positions that leave the ring for the tail, and fit there."""
        return slot.offset + self._tail_at(slot, torch.arange(begin, end, device=self.device))

    def _tail_at(self, slot: StreamingSlot, position: Tensor) -> Tensor:
        return self._ring + slot.capacity + position % max(1, slot.tail_capacity)

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return new keys and values as they are kept, and travel: attention sees no others."""
        return k.to(self.k.dtype), v.to(self.k.dtype)

    def write(self, rows: slice, at: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k``, ``v`` ``[K, n, D]`` at places of the arena."""
        self.k[rows].index_copy_(1, at, k)
        self.v[rows].index_copy_(1, at, v)

    def at(self, rows: slice, at: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, n, D]`` at places of the arena; copies."""
        return self.k[rows].index_select(1, at), self.v[rows].index_select(1, at)

    def read(self, rows: slice, slot: StreamingSlot, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, n, D]`` of positions ``[begin, end)``, in order; copies."""
        return self.at(rows, self.places(slot, begin, end))

    def sinks_and_sums(self, slot: SlotAt) -> SinksAndSums:
        """Sinks and sums of a slot, of all rows; views."""
        k, v = self.view(self.rows, slot, self._ring)
        return SinksAndSums(k[:, 1:], v[:, 1:], self.sums[:, :, slot.index])

    def load(self, rows: slice, slot: SlotAt, found: SinksAndSums) -> None:
        """Copy to a slot the sinks and sums that a prompt was read with elsewhere."""
        own = self.sinks_and_sums(slot).heads(rows)
        for store, new in ((own.k, found.k), (own.v, found.v), (own.sums, found.sums)):
            store.copy_(new)

    def drop(self, slot: StreamingSlot, end: int) -> None:
        """Move the window's tokens before position ``end`` to sums and tail, in all layers."""
        sinks, rows = self.policy.sinks, self.rows
        begin = max(slot.start, sinks)
        if begin < end and (self.policy.compensation or slot.tail_capacity):
            k, v = self.read(rows, slot, begin, end)
            if self.policy.compensation:
                self.sums[0, rows, slot.index] += k.float().sum(1)
                self.sums[1, rows, slot.index] += v.float().sum(1)
                self.refresh(rows, slot.at, end - sinks)
            kept = min(slot.tail_capacity, end - begin)
            if kept:
                at = self.tail_places(slot, end - kept, end)
                self.write(rows, at, k[:, -kept:], v[:, -kept:])
        slot.advance(end)

    def refresh(self, rows: slice, slot: SlotAt, count: int) -> None:
        """Set the compensation tokens to the mean of the ``count`` dropped tokens."""
        mean = self.sums[:, rows, slot.index].unsqueeze(2) / count
        for store, new in zip(self.view(rows, slot, 1), mean, strict=True):
            store.copy_(new)


def _on(device: torch.device, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in state.items()}
