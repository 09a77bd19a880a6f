"""The small replicated cache of the local heads.

A slot holds, for every local KV head of every layer, ``1 + N0 + capacity`` keys and values::

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
    start : int
        s of the newest query seen: tokens in ``[N0, start)`` are in the compensation sums.
    """

    index: int
    start: int = 0


class LocalCache:
    """Slots for sinks, window and compensation sums of every local KV head.

    Parameters
    ----------
    rows : int
        Local KV heads of all layers together; layer by layer.
    slots : int
        Sequences held at once.
    max_tokens : int
        Longest sequence, which sizes the window's ring.
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
        self.capacity = policy.capacity(max_tokens)
        self.device = device
        width = 1 + policy.sinks + self.capacity
        shape = (rows, slots, width, head_dim)
        # torch.empty: a slot that no sequence has used yet is not resident on CPU.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.sums = torch.empty(2, rows, slots, head_dim, dtype=torch.float32, device=device)
        self._free = list(range(slots - 1, -1, -1))
        self.num_slots = slots

    @property
    def free_slots(self) -> int:
        """Slots that no sequence holds."""
        return len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, read off the tensors."""
        if self.num_slots == 0:
            return 0
        return (self.k.nbytes + self.v.nbytes + self.sums.nbytes) // self.num_slots

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        return (self.num_slots - len(self._free)) * self.slot_bytes

    def allocate(self) -> LocalSlot:
        """Take a slot, cleared: a hidden key must be finite, for NaN survives a bias of -inf."""
        index = self._free.pop()
        self.k[:, index] = 0
        self.v[:, index] = 0
        self.sums[:, :, index] = 0
        return LocalSlot(index)

    def release(self, slot: LocalSlot) -> None:
        """Give a slot back."""
        self._free.append(slot.index)

    def fork(self, slot: LocalSlot) -> LocalSlot:
        """A copy of a slot in a new one."""
        copy = self.allocate()
        copy.start = slot.start
        for store in (self.k, self.v):
            store[:, copy.index] = store[:, slot.index]
        self.sums[:, :, copy.index] = self.sums[:, :, slot.index]
        return copy

    def indices(self, begin: int, end: int) -> Tensor:
        """Where the slot keeps positions ``[begin, end)``: int64 indices, on the cache's device."""
        position = torch.arange(begin, end, device=self.device)
        ring = 1 + self.policy.sinks + position % max(1, self.capacity)
        return torch.where(position < self.policy.sinks, 1 + position, ring)

    def write(self, rows: slice, slot: LocalSlot, at: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k``, ``v`` ``[K, n, D]`` of one layer at ``at = indices(...)``."""
        self.k[rows, slot.index].index_copy_(1, at, k)
        self.v[rows, slot.index].index_copy_(1, at, v)

    def read(self, rows: slice, slot: LocalSlot, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, n, D]`` of positions ``[begin, end)``, in order."""
        at = self.indices(begin, end)
        return (
            self.k[rows, slot.index].index_select(1, at),
            self.v[rows, slot.index].index_select(1, at),
        )

    def drop(self, rows: slice, slot: LocalSlot, begin: int, end: int) -> None:
        """Move the window's positions ``[begin, end)`` of one layer into the compensation sums."""
        begin = max(begin, self.policy.sinks)
        if begin < end:
            k, v = self.read(rows, slot, begin, end)
            self.sums[0, rows, slot.index] += k.float().sum(1)
            self.sums[1, rows, slot.index] += v.float().sum(1)
            self.refresh(rows, slot, end - self.policy.sinks)

    def refresh(self, rows: slice, slot: LocalSlot, count: int) -> None:
        """Set one layer's compensation tokens to the mean of the ``count`` dropped tokens."""
        mean = self.sums[:, rows, slot.index] / count
        self.k[rows, slot.index, 0] = mean[0].to(self.k.dtype)
        self.v[rows, slot.index, 0] = mean[1].to(self.v.dtype)

    def visibility(self, position: int) -> Tensor:
        """Additive bias float32 ``[1 + N0 + n]`` over a slot for the query at ``position``.

        Only as much of the slot is covered as has ever been written: the ring's unused tail
        is not read.
        """
        policy, sinks = self.policy, self.policy.sinks
        start, length = policy.start(position), position + 1
        width = 1 + sinks + max(0, min(self.capacity, length))
        bias = torch.full((width,), -math.inf)
        dropped = start - sinks
        if dropped > 0 and policy.compensation:
            bias[0] = math.log(dropped)
        bias[1 : 1 + min(sinks, length)] = 0.0
        first = max(start, sinks)
        if first < length:
            at = (torch.arange(first, length) % self.capacity) + 1 + sinks
            bias[at] = 0.0
        return bias.to(self.device)
