"""The small replicated cache of the local heads that share a window.

A slot holds, for each of these KV heads, of every layer, ``1 + N0 + capacity`` keys and values,
where ``capacity`` covers the longest window that the sequence can come to have::

    [ compensation token | sinks 0..N0-1 | ring of the window ]

The window's token at position p lies at ring index ``p mod capacity``; with rotated keys order
does not matter. `visibility` turns a position into one additive bias over the slot (0 for what
the query sees, ``log N_d`` for the compensation token, ``-inf`` for the rest), which is all that
decode needs: one attention call per layer, nothing moved, nothing concatenated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.policy import LocalPolicy


@dataclass
class LocalSlot:
    """One sequence's share of the local cache.

    Attributes
    ----------
    index : int
        Which slot.
    capacity : int
        Tokens that its ring holds; what the slot has beyond them is neither touched nor read.
    start : int
        s of the newest query seen: tokens in ``[N0, start)`` are in the compensation sums.
    """

    index: int
    capacity: int
    start: int = 0


class LocalCache:
    """Slots for sinks, window and compensation sums of the local KV heads of one window.

    Parameters
    ----------
    rows : int
        These KV heads of all layers together; layer by layer.
    slots : int
        Sequences held at once.
    max_tokens : int
        Longest sequence, which sizes the slots.
    policy : LocalPolicy
    head_dim : int
    dtype, device
        Of keys and values; the sums are float32.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        max_tokens: int,
        policy: LocalPolicy,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.policy = policy
        self.rows = slice(0, rows)
        self.device = device
        shape = (rows, slots, self._width(policy.capacity(max_tokens)), head_dim)
        # torch.empty: what no sequence has used yet is not resident on CPU.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.sums = torch.empty(2, rows, slots, head_dim, dtype=torch.float32, device=device)
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[int, LocalSlot] = {}
        self.num_slots = slots

    def _width(self, capacity: int) -> int:
        return 1 + self.policy.sinks + capacity

    def width(self, slot: LocalSlot, tokens: int) -> int:
        """How much of a slot ``tokens`` tokens can have touched: the ring's tail is not read."""
        return self._width(min(slot.capacity, tokens))

    def _bytes(self, capacity: int) -> int:
        """Bytes of a slot of this capacity, by the tensors' own strides and item sizes."""
        rows, _, _, head_dim = self.k.shape
        stored = self._width(capacity) * (self.k.itemsize + self.v.itemsize)
        return rows * head_dim * (stored + 2 * self.sums.itemsize)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slots."""
        return self.k.nbytes + self.v.nbytes + self.sums.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes that the slots in use occupy."""
        return sum(self._bytes(slot.capacity) for slot in self._held.values())

    def allocate(self, total: int) -> LocalSlot:
        """Take a slot for a sequence of up to ``total`` tokens.

        It is cleared: a hidden key must be finite, for NaN survives a bias of -inf.
        """
        slot = LocalSlot(self._free.pop(), self.policy.capacity(total))
        self._held[slot.index] = slot
        width = self._width(slot.capacity)
        self.k[:, slot.index, :width] = 0
        self.v[:, slot.index, :width] = 0
        self.sums[:, :, slot.index] = 0
        return slot

    def release(self, slot: LocalSlot) -> None:
        """Give a slot back."""
        del self._held[slot.index]
        self._free.append(slot.index)

    def fork(self, slot: LocalSlot, length: int, total: int) -> LocalSlot:
        """A second slot with the state of one that has seen ``length`` tokens.

        Parameters
        ----------
        slot : LocalSlot
        length : int
        total : int
            Up to how many tokens the copy will come to have.
        """
        copy = self.allocate(total)
        copy.start = slot.start
        self.sums[:, :, copy.index] = self.sums[:, :, slot.index]
        sinks = self.policy.sinks
        for store in (self.k, self.v):
            store[:, copy.index, : 1 + sinks] = store[:, slot.index, : 1 + sinks]
        # The rings differ in length, so the window's tokens move.
        begin, end = max(slot.start, sinks), max(length, sinks)
        window = self.read(self.rows, slot, begin, end)
        self.write(self.rows, copy, self.indices(copy, begin, end), *window)
        return copy

    def indices(self, slot: LocalSlot, begin: int, end: int) -> Tensor:
        """Where a slot keeps positions ``[begin, end)``: int64 indices, on the cache's device."""
        return self.places(slot, torch.arange(begin, end, device=self.device))

    def places(self, slot: LocalSlot, position: Tensor) -> Tensor:
        """Where a slot keeps the given positions: int64 indices of the same shape."""
        ring = 1 + self.policy.sinks + position % max(1, slot.capacity)
        return torch.where(position < self.policy.sinks, 1 + position, ring)

    def write(self, rows: slice, slot: LocalSlot, at: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k``, ``v`` ``[K, n, D]`` at ``at = indices(slot, ...)``."""
        self.k[rows, slot.index].index_copy_(1, at, k)
        self.v[rows, slot.index].index_copy_(1, at, v)

    def read(self, rows: slice, slot: LocalSlot, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, n, D]`` of positions ``[begin, end)``, in order."""
        at = self.indices(slot, begin, end)
        return (
            self.k[rows, slot.index].index_select(1, at),
            self.v[rows, slot.index].index_select(1, at),
        )

    def drop(self, rows: slice, slot: LocalSlot, begin: int, end: int) -> None:
        """Move the window's positions ``[begin, end)`` into the compensation sums, if kept."""
        begin = max(begin, self.policy.sinks)
        if begin < end and self.policy.compensation:
            k, v = self.read(rows, slot, begin, end)
            self.sums[0, rows, slot.index] += k.float().sum(1)
            self.sums[1, rows, slot.index] += v.float().sum(1)
            self.refresh(rows, slot, end - self.policy.sinks)

    def refresh(self, rows: slice, slot: LocalSlot, count: int) -> None:
        """Set the compensation tokens to the mean of the ``count`` dropped tokens."""
        mean = self.sums[:, rows, slot.index] / count
        self.k[rows, slot.index, 0] = mean[0].to(self.k.dtype)
        self.v[rows, slot.index, 0] = mean[1].to(self.v.dtype)

    def visibility(self, slot: LocalSlot, width: int, position: Tensor, start: Tensor) -> Tensor:
        """Additive bias float32 ``[width]`` over the slot's first places for one query.

        Parameters
        ----------
        slot : LocalSlot
        width : int
            At least `width` of the tokens up to the query; what is beyond has never been written.
        position, start : Tensor
            int64 of no dimensions, on the cache's device: the query's position and its ``s``
            (`LocalPolicy.start`). They are never read on the host, so that a CUDA graph of this
            gives the bias of whatever they hold when it is replayed.
        """
        sinks = self.policy.sinks
        first = start.clamp(min=sinks)
        bias = torch.full((width,), -math.inf, device=self.device)
        if self.policy.compensation:
            bias[0] = torch.log(first - sinks)  # -inf for no dropped token
        bias[1 : 1 + sinks].masked_fill_(torch.arange(sinks, device=self.device) <= position, 0.0)
        bias[1 + sinks :].masked_fill_(self._in_ring(slot, width, position) >= first, 0.0)
        return bias

    def distance(self, slot: LocalSlot, width: int, position: Tensor, start: Tensor) -> Tensor:
        """How far the slot's first places are from one query: ``j - i``, float32 ``[width]``.

        The compensation token stands where the dropped tokens do on average, as its key and value
        are theirs on average. The parameters are those of `visibility`, whose hidden places have
        any finite distance here.
        """
        sinks = self.policy.sinks
        middle = (start.clamp(min=sinks) + sinks - 1) / 2
        first = torch.arange(sinks, device=self.device)
        held = self._in_ring(slot, width, position)
        return torch.cat([(middle - position).view(1), first - position, held - position]).float()

    def _in_ring(self, slot: LocalSlot, width: int, position: Tensor) -> Tensor:
        """The position that each place of the ring holds: the newest one of its remainder."""
        ring = torch.arange(width - 1 - self.policy.sinks, device=self.device)
        return position - (position - ring) % slot.capacity
