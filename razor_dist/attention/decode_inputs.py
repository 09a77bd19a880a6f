"""A decode step apart from its attention: what it reads, what it is given, what it leaves.

What a step needs is kept in two parts. `ReadExtent` says which memory it touches: plain numbers and
slices, fixed once a CUDA graph is captured. `StepInputs` holds everything else as one tensor, so
that a graph is told of the next step by writing to that tensor (`razor_dist.engine.graph`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.attention.prefill import Caches
from razor_dist.cache.sequence import Sequence, owner_of
from razor_dist.cache.streaming import StreamingSlot
from razor_dist.parallel.comm import Communicator


@dataclass(frozen=True)
class ReadExtent:
    """The memory that a step touches for one sequence on this rank.

    Attributes
    ----------
    streaming : tuple of (StreamingSlot, int)
        For each streaming cache, the slot and how much of it is read.
    segments : tuple of (int, int)
        Extents of the page pool that are read.
    exact : bool
        Whether ``segments`` end with the newest token. Otherwise they go further, and a bias
        hides what no token has filled yet.
    writes : bool
        Whether this rank writes the new token's retrieval keys and values.
    """

    streaming: tuple[tuple[StreamingSlot, int], ...]
    segments: tuple[tuple[int, int], ...]
    exact: bool
    writes: bool


def streaming_widths(caches: Caches, sequence: Sequence, tokens: int) -> tuple[int, ...]:
    """Places that ``tokens`` tokens of a sequence can have touched, by streaming cache."""
    return tuple(
        cache.width(slot, tokens)
        for cache, slot in zip(caches.streaming, sequence.streaming, strict=True)
    )


def exact_extent(comm: Communicator, caches: Caches, sequence: Sequence) -> ReadExtent:
    """What the next step needs, and no more."""
    table = sequence.table
    own = owner_of(sequence.length, comm.size) == comm.rank
    return ReadExtent(
        streaming=tuple(
            zip(
                sequence.streaming,
                streaming_widths(caches, sequence, sequence.length + 1),
                strict=True,
            )
        ),
        segments=tuple(caches.pages.extents(table, 0, table.tokens + own)),
        exact=True,
        writes=own,
    )


def padded_extent(
    caches: Caches, sequence: Sequence, widths: tuple[int, ...], stored: int
) -> ReadExtent:
    """What every step needs until the sequence outgrows ``widths`` and ``stored``.

    Parameters
    ----------
    widths : tuple of int
        Of its slot in each streaming cache.
    stored : int
        Tokens of the shard. The sequence's own pages bound it too: what lies beyond them is
        another's, and may change and hold anything.
    """
    table, pages = sequence.table, caches.pages
    within = min(stored, len(table.pages) * pages.page_size)
    return ReadExtent(
        streaming=tuple(zip(sequence.streaming, widths, strict=True)),
        segments=tuple(pages.extents(table, 0, within)),
        exact=False,
        writes=True,
    )


class StepInputs(NamedTuple):
    """What changes from one step to the next; int64, a number per sequence: ``[n]``.

    Attributes
    ----------
    token, position : Tensor
        The new token's id and place.
    model_position : Tensor
        The place as the model is told of it (`Sequence.position_mark`).
    at : Tensor
        Slot of the page pool for its retrieval keys and values; the pool's dummy slot on ranks
        that do not keep them.
    stored : Tensor
        Tokens of this rank's shard, the new one included where it is kept.
    start : Tensor
        ``[windows, n]``: ``s`` of its query (`razor_dist.heads.policy`), for each streaming cache.
    """

    token: Tensor
    position: Tensor
    model_position: Tensor
    at: Tensor
    stored: Tensor
    start: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> StepInputs:
        """The fields in `step_inputs`."""
        return cls(rows[0], rows[1], rows[2], rows[3], rows[4], rows[5:])


def step_inputs(
    comm: Communicator, caches: Caches, sequences: Seq[Sequence], tokens: Seq[int]
) -> Tensor:
    """`StepInputs` as rows of one tensor ``[5 + windows, n]``, in the host's memory."""
    columns = []
    for sequence, token in zip(sequences, tokens, strict=True):
        position, table = sequence.length, sequence.table
        own = owner_of(position, comm.size) == comm.rank
        at = caches.pages.slot(table, table.tokens) if own else caches.pages.dummy_slot
        starts = [cache.policy.start(position) for cache in caches.streaming]
        marked = position + sequence.position_mark
        columns.append((token, position, marked, at, table.tokens + own, *starts))
    return torch.tensor(columns, dtype=torch.int64).T.contiguous()


def drop_outdated(caches: Caches, sequences: Seq[Sequence]) -> None:
    """Move what the next query no longer sees into the compensation sums.

    For all layers at once, and before the new token takes the place of a dropped one. It happens
    once in ``block`` steps, so it is never part of a CUDA graph.
    """
    for sequence in sequences:
        for cache, slot in zip(caches.streaming, sequence.streaming, strict=True):
            start = max(cache.policy.sinks, cache.policy.start(sequence.length))
            if start > slot.start:
                cache.drop(cache.rows, slot, slot.start, start)
                slot.start = start


def advance_lengths(comm: Communicator, sequences: Seq[Sequence]) -> None:
    """Count the step's tokens in the sequences; once, after the forward pass."""
    for sequence in sequences:
        owner = owner_of(sequence.length, comm.size)
        sequence.table.tokens += owner == comm.rank
        sequence.shard_tokens[owner] += 1
        sequence.length += 1
