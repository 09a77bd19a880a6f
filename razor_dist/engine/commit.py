"""After a pass: the one place where a step changes sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from razor_dist.attention.step import ChunkTokens, ReplicatedTokens, Step, WindowPart
from razor_dist.cache import sequence as state
from razor_dist.cache.caches import Caches
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import positions_of
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.sharding import shard_sizes

# By streaming cache and layer: what a rank holds of the next chunk's window.
Kept = Sequence[dict[int, list[KVPiece]]]


def commit(
    comm: Communicator,
    caches: Caches,
    step: Step,
    sequences: Mapping[int, state.Sequence],
    kept: Sequence[Kept],
) -> None:
    """Count a step's tokens in its sequences; ``kept`` is of its chunks, in order."""
    for key in step.decoded:
        _commit_token(comm, caches, sequences[key])
    for part in step.passes:
        for tokens in part.replicated:
            _commit_replicated(comm, caches, sequences[tokens.sequence], tokens)
    chunks = [chunk for part in step.passes for chunk in part.chunks]
    for chunk, windows in zip(chunks, kept, strict=True):
        _commit_chunk(comm, caches, sequences[chunk.sequence], chunk, windows)


def _commit_token(comm: Communicator, caches: Caches, sequence: state.Sequence) -> None:
    at = sequence.length
    sequence.grow(shard_sizes(at, at, at + 1, comm.size), comm.rank)
    for cache, slot in zip(caches.streaming, sequence.streaming, strict=True):
        # What the next token no longer sees goes to the sums, of all layers at once, before that
        # token takes the place of a dropped one in the ring. It happens once in ``block`` tokens.
        slot.length = sequence.length
        start = max(cache.policy.sinks, cache.policy.start(sequence.length))
        if start > slot.start:
            cache.drop(slot, start)


def _commit_replicated(
    comm: Communicator, caches: Caches, sequence: state.Sequence, tokens: ReplicatedTokens
) -> None:
    pages = caches.pages
    if pages.positions is not None:
        pages.place(tokens.extents, positions_of([tokens.owned], pages.k.device))
    begin, end = tokens.chunk.begin, tokens.chunk.end
    sequence.grow(shard_sizes(begin, begin, end, comm.size), comm.rank)
    _commit_windows(caches, tokens.windows)


def _commit_chunk(
    comm: Communicator,
    caches: Caches,
    sequence: state.Sequence,
    tokens: ChunkTokens,
    kept: Kept,
) -> None:
    prefill, chunk, pages = sequence.prefill, tokens.chunk, caches.pages
    assert prefill is not None
    if pages.positions is not None:
        pages.place(tokens.pages.extents, tokens.positions)
    sequence.grow([chunk.tokens(rank) for rank in range(comm.size)], comm.rank)
    sequence.chunks.append(chunk)
    prefill.done.append(chunk)
    if prefill.scratch is not None:
        prefill.scratch.tokens += chunk.tokens(comm.rank)
    _commit_windows(caches, tokens.windows)
    if not tokens.last:
        prefill.windows = list(kept)
        return
    if prefill.scratch is not None:
        assert caches.scratch is not None
        caches.scratch.release(prefill.scratch)
    sequence.prefill = None


def _commit_windows(caches: Caches, parts: Sequence[WindowPart]) -> None:
    for cache, part in zip(caches.streaming, parts, strict=True):
        if part.plan is not None and part.plan.window is not None:
            part.slot.length = part.plan.window.end
            cache.advance(part.slot, part.plan.keep)
        elif part.plan is not None:
            part.slot.start = part.plan.keep
