"""One token of each of several sequences: what a short step reads, is given and leaves of it.

Which memory a step reads is said in one of two ways: by a `ReadExtent` for each sequence, plain
numbers and slices for `razor_dist.attention.short`; or by `BlockTables`, in tensors, for
`razor_dist.attention.decode`, which computes all sequences at once. `StepInputs` holds everything
else as one tensor. So a CUDA graph of the second way gets the next step, with any sequences, by
writing to two tensors (`razor_dist.engine.graph`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.cache.caches import Caches
from razor_dist.cache.pages import Span
from razor_dist.cache.sequence import Sequence
from razor_dist.cache.streaming import StreamingSlot
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.sharding import owner_of, shard_sizes


@dataclass(frozen=True)
class ReadExtent:
    """The memory that a step touches for one sequence on this rank."""

    streaming: tuple[tuple[StreamingSlot, int], ...]  # by cache: what is read of which slot
    segments: tuple[Span, ...]  # of the page pool, in order; they end with the newest token


def streaming_widths(caches: Caches, sequence: Sequence, tokens: int) -> tuple[int, ...]:
    """Places that ``tokens`` tokens of a sequence can have touched, by streaming cache."""
    return tuple(
        cache.width(slot, tokens)
        for cache, slot in zip(caches.streaming, sequence.streaming, strict=True)
    )


def exact_extent(comm: Communicator, caches: Caches, sequence: Sequence) -> ReadExtent:
    """The memory that the next step needs, and no more."""
    table = sequence.table
    own = owner_of(sequence.length, comm.size) == comm.rank
    widths = streaming_widths(caches, sequence, sequence.length + 1)
    return ReadExtent(
        streaming=tuple(zip(sequence.streaming, widths, strict=True)),
        segments=tuple(caches.pages.spans(table, 0, table.tokens + own)),
    )


class BlockTables(NamedTuple):
    """The memory that a step touches for n sequences on this rank, or more than that."""

    pages: Tensor  # int32 [n, pages], of each sequence's shard; zeros where it has no more
    widths: tuple[int, ...]  # by streaming cache: places of a slot that are read at most


def block_tables(caches: Caches, sequences: Seq[Sequence], rows: int, pages: int) -> Tensor:
    """`BlockTables.pages` of some sequences and further rows, in the host's memory."""
    table = torch.zeros(rows, pages, dtype=torch.int32)
    for row, sequence in zip(table, sequences, strict=False):
        own = torch.tensor(sequence.table.pages[:pages], dtype=torch.int32)
        row[: len(own)] = own
    return table


def exact_tables(
    comm: Communicator, caches: Caches, sequences: Seq[Sequence], rows: int
) -> BlockTables:
    """`BlockTables` of ``rows`` rows that the next step of some sequences needs, and no more."""
    stored, widths = 0, [0] * len(caches.streaming)
    for sequence in sequences:
        own = owner_of(sequence.length, comm.size) == comm.rank
        stored = max(stored, sequence.table.tokens + own)
        found = streaming_widths(caches, sequence, sequence.length + 1)
        widths = [max(pair) for pair in zip(widths, found, strict=True)]
    pages = block_tables(caches, sequences, rows, caches.pages.pages_for(stored))
    return BlockTables(pages.to(caches.pages.k.device), tuple(widths))


class StepInputs(NamedTuple):
    """Values that change from one step to the next; int64, a number per sequence: ``[n]``."""

    token: Tensor  # the new token's id
    position: Tensor
    model_position: Tensor  # as the model gets it (`Sequence.position_mark`)
    # Slot of the page pool for the new token's retrieval keys and values; the pool's dummy slot on
    # ranks that do not keep them.
    at: Tensor
    stored: Tensor  # tokens of this rank's shard, the new one included where it is kept
    # [windows, n], for each streaming cache: ``s`` of the query (`razor_dist.cache.policy`), the
    # slot's first place, and the tokens that its ring holds.
    start: Tensor
    offset: Tensor
    capacity: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> StepInputs:
        """Read the rows that `step_inputs` writes."""
        return cls(*rows[:5], *rows[5:].chunk(3))

    def tokens(self, count: int) -> StepInputs:
        """Return those of the first ``count`` sequences."""
        return StepInputs(*(values[..., :count] for values in self))


def step_inputs(comm: Communicator, caches: Caches, tokens: Seq[tuple[Sequence, int]]) -> Tensor:
    """`StepInputs` as rows of one tensor ``[5 + 3 windows, n]``, in the host's memory."""
    columns = []
    for sequence, token in tokens:
        position, table = sequence.length, sequence.table
        own = owner_of(position, comm.size) == comm.rank
        at = caches.pages.slot(table, table.tokens) if own else caches.pages.dummy_slot
        starts = [cache.policy.start(position) for cache in caches.streaming]
        marked = position + sequence.position_mark
        slots = sequence.streaming
        places = [*(slot.offset for slot in slots), *(slot.capacity for slot in slots)]
        columns.append((token, position, marked, at, table.tokens + own, *starts, *places))
    rows = torch.tensor(columns, dtype=torch.int64)
    return rows.view(len(columns), 5 + 3 * len(caches.streaming)).T.contiguous()


def padded_inputs(caches: Caches, inputs: Tensor, rows: int) -> Tensor:
    """`step_inputs` with further columns, which no sequence has: they keep and see nothing."""
    padded = torch.nn.functional.pad(inputs, (0, rows - inputs.shape[1]))
    padded[3, inputs.shape[1] :] = caches.pages.dummy_slot
    return padded


def drop_outdated(caches: Caches, sequences: Seq[Sequence]) -> None:
    """Move what the next query no longer sees into the compensation sums, for all layers at once.

    Call it before the new token takes the place of a dropped one. Something is dropped once in
    ``block`` steps, so it is never part of a CUDA graph.
    """
    for sequence in sequences:
        for cache, slot in zip(caches.streaming, sequence.streaming, strict=True):
            start = max(cache.policy.sinks, cache.policy.start(sequence.length))
            if start > slot.start:
                cache.drop(slot, start)


def advance_lengths(comm: Communicator, sequences: Seq[Sequence]) -> None:
    """Count the step's tokens in the sequences; once, after the forward pass."""
    for sequence in sequences:
        at = sequence.length
        sequence.grow(shard_sizes(at, at, at + 1, comm.size), comm.rank)
