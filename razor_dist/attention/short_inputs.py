"""One token of each of several sequences: what a short step reads, is given and leaves of it.

`ReadExtent` says which memory a step touches: plain numbers and slices, fixed once a CUDA graph is
captured. `StepInputs` holds everything else as one tensor, so that a graph is told of the next step
by writing to that tensor (`razor_dist.engine.graph`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.attention.prefill import Caches
from razor_dist.cache.pages import Span
from razor_dist.cache.sequence import Sequence, owner_of, shard_sizes
from razor_dist.cache.streaming import StreamingSlot
from razor_dist.parallel.comm import Communicator


@dataclass(frozen=True)
class ReadExtent:
    """The memory that a step touches for one sequence on this rank."""

    streaming: tuple[tuple[StreamingSlot, int], ...]  # by cache: what is read of which slot
    segments: tuple[Span, ...]  # of the page pool, in order
    # True if segments end with the newest token; else a bias hides what no token has filled yet.
    exact: bool


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
        exact=True,
    )


def padded_extent(
    caches: Caches, sequence: Sequence, widths: tuple[int, ...], stored: int
) -> ReadExtent:
    """The memory that every step needs until the sequence outgrows these bounds."""
    table, pages = sequence.table, caches.pages
    # What lies beyond the sequence's own pages is another's, and may change and hold anything.
    within = min(stored, len(table.pages) * pages.page_size)
    return ReadExtent(
        streaming=tuple(zip(sequence.streaming, widths, strict=True)),
        segments=tuple(pages.spans(table, 0, within)),
        exact=False,
    )


class StepInputs(NamedTuple):
    """Values that change from one step to the next; int64, a number per sequence: ``[n]``."""

    token: Tensor  # the new token's id
    position: Tensor
    model_position: Tensor  # as the model is told of it (`Sequence.position_mark`)
    # Slot of the page pool for the new token's retrieval keys and values; the pool's dummy slot on
    # ranks that do not keep them.
    at: Tensor
    stored: Tensor  # tokens of this rank's shard, the new one included where it is kept
    # [windows, n]: ``s`` of the query (`razor_dist.heads.policy`), for each streaming cache.
    start: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> StepInputs:
        """Read the rows that `step_inputs` writes."""
        return cls(rows[0], rows[1], rows[2], rows[3], rows[4], rows[5:])


def step_inputs(comm: Communicator, caches: Caches, tokens: Seq[tuple[Sequence, int]]) -> Tensor:
    """`StepInputs` as rows of one tensor ``[5 + windows, n]``, in the host's memory."""
    columns = []
    for sequence, token in tokens:
        position, table = sequence.length, sequence.table
        own = owner_of(position, comm.size) == comm.rank
        at = caches.pages.slot(table, table.tokens) if own else caches.pages.dummy_slot
        starts = [cache.policy.start(position) for cache in caches.streaming]
        marked = position + sequence.position_mark
        columns.append((token, position, marked, at, table.tokens + own, *starts))
    rows = torch.tensor(columns, dtype=torch.int64).view(len(columns), 5 + len(caches.streaming))
    return rows.T.contiguous()


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
