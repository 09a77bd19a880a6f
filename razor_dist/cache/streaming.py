"""The small replicated cache of the streaming heads that share a window.

A slot holds, for each of these KV heads, of every layer, ``E + N0 + capacity`` keys and values,
where ``capacity`` covers the longest window that the sequence can come to have::

    [ compensation token, E times | sinks 0..N0-1 | ring of the window ]

The window's token at position p lies at ring index ``p mod capacity``; with rotated keys order
does not matter. `visibility` turns a position into one additive bias over the slot (0 for what
the query sees, ``log N_d`` for the compensation token, `HIDDEN` for the rest), which is all that
decode needs: one attention call per layer, nothing moved, nothing concatenated.

E is 1, unless queries are in bfloat16. Then the fused ops may want the bias in bfloat16 too, which
would round ``log N_d`` by up to 1/32 and the token's weight by 3 %. So it stands in the slot four
times, with biases that bfloat16 holds exactly and whose weights add up to ``N_d`` (`_shares`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.heads.policy import StreamingPolicy
from razor_dist.kernels import HIDDEN

# E in bfloat16: each entry takes what it can of the weight that is left, all but a tenth at least.
_ENTRIES_BF16 = 4


@dataclass
class StreamingSlot:
    """One sequence's share of the streaming cache."""

    index: int
    # Tokens that its ring holds; what the slot has beyond them is neither touched nor read.
    capacity: int
    start: int = 0  # s of the newest query seen: tokens in [N0, start) are in the compensation sums


class StreamingCache:
    """Slots for sinks, window and compensation sums of the streaming KV heads of one window.

    ``rows`` counts these KV heads of all layers together, layer by layer; ``slots`` the sequences
    held at once, each sized for ``max_tokens``. Keys and values are of ``dtype``, the sums float32.
    ``queries`` is the queries' dtype (by default ``dtype``), to which their ops may round a bias;
    ``entries`` is E, the places of the compensation token.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        max_tokens: int,
        policy: StreamingPolicy,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        queries: torch.dtype | None = None,
    ) -> None:
        self.policy = policy
        self.entries = compensation_entries(policy, queries or dtype)
        self.rows = slice(0, rows)
        self.device = device
        shape = (rows, slots, self._width(policy.capacity(max_tokens)), head_dim)
        # torch.empty: what no sequence has used yet is not resident on CPU.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.sums = torch.empty(2, rows, slots, head_dim, dtype=torch.float32, device=device)
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[int, StreamingSlot] = {}

    def _width(self, capacity: int) -> int:
        return self._ring + capacity

    @property
    def _ring(self) -> int:
        """Index in a slot at which the ring begins."""
        return self.entries + self.policy.sinks

    def width(self, slot: StreamingSlot, tokens: int) -> int:
        """Places of a slot that ``tokens`` tokens can have touched: the ring's tail is not read."""
        return self._width(min(slot.capacity, tokens))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slots."""
        return self.k.nbytes + self.v.nbytes + self.sums.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes that the slots in use occupy."""
        rows, _, _, head_dim = self.k.shape
        widths = sum(self._width(slot.capacity) for slot in self._held.values())
        sums = 2 * len(self._held) * self.sums.itemsize
        return rows * head_dim * (widths * (self.k.itemsize + self.v.itemsize) + sums)

    def allocate(self, total: int) -> StreamingSlot:
        """Take a slot for a sequence of up to ``total`` tokens.

        It is cleared: a hidden key must be finite, for NaN survives a bias of -inf.
        """
        slot = StreamingSlot(self._free.pop(), self.policy.capacity(total))
        self._held[slot.index] = slot
        width = self._width(slot.capacity)
        self.k[:, slot.index, :width] = 0
        self.v[:, slot.index, :width] = 0
        self.sums[:, :, slot.index] = 0
        return slot

    def release(self, slot: StreamingSlot) -> None:
        """Give a slot back."""
        del self._held[slot.index]
        self._free.append(slot.index)

    def fork(self, slot: StreamingSlot, length: int, total: int) -> StreamingSlot:
        """Return a second slot, with the state of one that has seen ``length`` tokens.

        The copy has room for ``total`` tokens.
        """
        copy = self.allocate(total)
        copy.start = slot.start
        self.sums[:, :, copy.index] = self.sums[:, :, slot.index]
        sinks = self.policy.sinks
        for store in (self.k, self.v):
            store[:, copy.index, : self._ring] = store[:, slot.index, : self._ring]
        # The rings differ in length, so the window's tokens move.
        begin, end = max(slot.start, sinks), max(length, sinks)
        window = self.read(self.rows, slot, begin, end)
        self.write(self.rows, copy, self.indices(copy, begin, end), *window)
        return copy

    def indices(self, slot: StreamingSlot, begin: int, end: int) -> Tensor:
        """Indices in a slot of positions ``[begin, end)``: int64, on the cache's device."""
        return self.places(slot, torch.arange(begin, end, device=self.device))

    def places(self, slot: StreamingSlot, position: Tensor) -> Tensor:
        """Indices in a slot of the given positions: int64, of the same shape."""
        ring = self._ring + position % max(1, slot.capacity)
        return torch.where(position < self.policy.sinks, self.entries + position, ring)

    def write(self, rows: slice, slot: StreamingSlot, at: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k``, ``v`` ``[K, n, D]`` at ``at = indices(slot, ...)``."""
        self.k[rows, slot.index].index_copy_(1, at, k)
        self.v[rows, slot.index].index_copy_(1, at, v)

    def read(self, rows: slice, slot: StreamingSlot, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, n, D]`` of positions ``[begin, end)``, in order."""
        at = self.indices(slot, begin, end)
        return (
            self.k[rows, slot.index].index_select(1, at),
            self.v[rows, slot.index].index_select(1, at),
        )

    def sinks(self, rows: slice, slot: StreamingSlot) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, N0, D]`` of the first tokens; views."""
        at = slice(self.entries, self._ring)
        return self.k[rows, slot.index, at], self.v[rows, slot.index, at]

    def drop(self, rows: slice, slot: StreamingSlot, begin: int, end: int) -> None:
        """Move the window's positions ``[begin, end)`` into the compensation sums, if kept."""
        begin = max(begin, self.policy.sinks)
        if begin < end and self.policy.compensation:
            k, v = self.read(rows, slot, begin, end)
            self.sums[0, rows, slot.index] += k.float().sum(1)
            self.sums[1, rows, slot.index] += v.float().sum(1)
            self.refresh(rows, slot, end - self.policy.sinks)

    def refresh(self, rows: slice, slot: StreamingSlot, count: int) -> None:
        """Set the compensation tokens to the mean of the ``count`` dropped tokens."""
        mean = self.sums[:, rows, slot.index].unsqueeze(2) / count
        self.k[rows, slot.index, : self.entries] = mean[0].to(self.k.dtype)
        self.v[rows, slot.index, : self.entries] = mean[1].to(self.v.dtype)

    def visibility(
        self, slot: StreamingSlot, width: int, position: Tensor, start: Tensor
    ) -> Tensor:
        """Additive bias over the slot's first places for one query: float32 ``[width]``, finite.

        ``width`` is at least `width` of the tokens up to the query; what is beyond has never been
        written. ``position`` and ``start`` are int64 of no dimensions, on the cache's device: the
        query's position and its ``s`` (`StreamingPolicy.start`). They are never read on the host,
        so that a CUDA graph of this gives the bias of whatever they hold when it is replayed.
        """
        sinks, own, ring = self.policy.sinks, self.entries, self._ring
        first = start.clamp(min=sinks)
        bias = torch.full((width,), HIDDEN, device=self.device)
        if self.policy.compensation:
            bias[:own] = _shares(first - sinks, own)
        bias[own:ring].masked_fill_(torch.arange(sinks, device=self.device) <= position, 0.0)
        bias[ring:].masked_fill_(self._in_ring(slot, width, position) >= first, 0.0)
        return bias

    def distance(self, slot: StreamingSlot, width: int, position: Tensor, start: Tensor) -> Tensor:
        """Distance of the slot's first places from one query: ``j - i``, float32 ``[width]``.

        The compensation token stands where the dropped tokens do on average, as its key and value
        are theirs on average. The parameters are those of `visibility`, whose hidden places have
        any finite distance here.
        """
        sinks = self.policy.sinks
        middle = (start.clamp(min=sinks) + sinks - 1) / 2
        first = torch.arange(sinks, device=self.device)
        held = self._in_ring(slot, width, position)
        mean = (middle - position).expand(self.entries)
        return torch.cat([mean, first - position, held - position]).float()

    def _in_ring(self, slot: StreamingSlot, width: int, position: Tensor) -> Tensor:
        """The position that each place of the ring holds: the newest one of its remainder."""
        ring = torch.arange(width - self._ring, device=self.device)
        return position - (position - ring) % slot.capacity


def compensation_entries(policy: StreamingPolicy, queries: torch.dtype) -> int:
    """Places of the compensation token in a slot, for queries of a dtype."""
    return _ENTRIES_BF16 if policy.compensation and queries == torch.bfloat16 else 1


def _shares(count: Tensor, entries: int) -> Tensor:
    """Biases under which ``entries`` equal keys weigh as much as ``count``: ``log N_d``, or a sum.

    Several are numbers that bfloat16 holds: each but the last is the logarithm of what is left of
    the weight, rounded down, and the last is rounded to the nearest. For up to 2**24 tokens, four
    have the weight right to 3e-5. The result is float32 ``[entries]``, finite; with a ``count``
    (int64 of no dimensions) of 0, every entry is hidden.
    """
    if entries == 1:
        return torch.log(count).clamp(min=HIDDEN).view(1)
    left, shares = count.double(), []
    for _ in range(entries - 1):
        whole = torch.log(left)
        # Less than bfloat16 can round up by.
        share = (whole - whole.abs() / 256).to(torch.bfloat16).double()
        left = (left - torch.exp(share)).clamp(min=0)
        shares.append(share)
    shares.append(torch.log(left).to(torch.bfloat16).double())
    return torch.stack(shares).clamp(min=HIDDEN).float()
