"""Apply a step to its sequences, after it has run."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from razor_dist.attention.step import ChunkTokens, Step, WindowPart
from razor_dist.cache.caches import Caches
from razor_dist.cache.sequence import Sequence
from razor_dist.parallel.sharding import shard_sizes


def commit(rank: int, caches: Caches, step: Step, sequences: Mapping[int, Sequence]) -> None:
    """Count a step's tokens in this rank's sequences.

    Runs of several tokens wait for `commit_run` until the next plan, which brings what rank 0 has
    drawn: to send it before would cost every step a broadcast.
    """
    for key, sizes in step.growth:
        sequences[key].grow(sizes, rank)
    for key, count in step.runs:
        if count == 1:
            commit_run(rank, caches, sequences[key], 1)
    for part in step.passes:
        for tokens in part.replicated:
            if caches.pages.positions is not None:
                caches.pages.place(tokens.extents, tokens.positions[tokens.own])
            _commit_windows(sequences[tokens.sequence], tokens.windows)
        for chunk in part.chunks:
            _commit_chunk(rank, caches, sequences[chunk.sequence], chunk)


def commit_run(rank: int, caches: Caches, sequence: Sequence, tokens: int) -> None:
    """Count the first ``tokens`` of a sequence's run.

    The run's other tokens leave no trace. They stand in pages behind the shard's end, and in a ring
    at places of tokens that the window has left, since the window begins at the same position for
    all of a run (`razor_dist.cache.policy.StreamingPolicy.run`): nothing reads these places before
    they are written again.
    """
    begin, size = sequence.length, len(sequence.shard_tokens)
    sequence.grow(shard_sizes(begin, begin, begin + tokens, size), rank)
    for cache, slot in zip(caches.streaming, sequence.streaming, strict=True):
        # Tokens that the next token does not see go to the sums, in all layers at once, before it
        # takes the place of a dropped token in the ring: once in ``block`` tokens.
        slot.length = sequence.length
        start = max(cache.policy.sinks, cache.policy.start(sequence.length))
        if start > slot.start:
            cache.drop(slot, start)


def _commit_chunk(rank: int, caches: Caches, sequence: Sequence, tokens: ChunkTokens) -> None:
    prefill, chunk = sequence.prefill, tokens.chunk
    assert prefill is not None
    if caches.pages.positions is not None:
        caches.pages.place(tokens.pages.extents, tokens.positions)
    sequence.chunks.append(chunk)
    prefill.done.append(chunk)
    if prefill.scratch is not None:
        prefill.scratch.tokens += chunk.tokens(rank)
    _commit_windows(sequence, tokens.windows)
    if not tokens.last:
        return
    for cache, slot in zip(caches.streaming, sequence.streaming, strict=True):
        del cache.chunked[slot.index]
    if prefill.scratch is not None:
        assert caches.scratch is not None
        caches.scratch.release(prefill.scratch)
    sequence.prefill = None


def _commit_windows(sequence: Sequence, parts: Seq[WindowPart]) -> None:
    for slot, part in zip(sequence.streaming, parts, strict=True):
        if part.plan is not None and part.plan.window is not None:
            slot.length = part.plan.window.end
            slot.advance(part.plan.keep)
        elif part.plan is not None:
            slot.read_to(part.plan.keep)
