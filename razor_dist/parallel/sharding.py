"""The rank that holds each token of a sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from razor_dist.parallel.zigzag import Chunk, Interval


def owner_of(position: int, world_size: int) -> int:
    """The rank that stores retrieval heads' keys and values of a token that all ranks compute."""
    return position % world_size


def owned_tokens(at: Interval, rank: int, world_size: int) -> range:
    """The tokens that a rank stores of consecutive ones that all ranks compute (`owner_of`)."""
    return range(at.begin + (rank - at.begin) % world_size, at.end, world_size)


def is_even(chunk: Chunk) -> bool:
    """True if each rank stores as many of a chunk's tokens as if all ranks computed all of them."""
    size = chunk.world_size
    return all(len(owned_tokens(chunk.span, r, size)) == chunk.tokens(r) for r in range(size))


def shard_positions(done: Seq[Chunk], end: int, rank: int, world_size: int) -> list[range]:
    """Positions of a rank's shard of the first ``end`` tokens, in the shard's order.

    Tokens outside the chunks ``done``, which are in order, were computed by all ranks.
    """
    found: list[range] = []
    begin = 0
    for chunk in done:
        found += [owned_tokens(Interval(begin, chunk.begin), rank, world_size), *chunk.ranges(rank)]
        begin = chunk.end
    return [run for run in (*found, owned_tokens(Interval(begin, end), rank, world_size)) if run]


def held_positions(
    chunks: Seq[Chunk], begin: int, end: int, rank: int, world_size: int
) -> npt.NDArray[np.int64]:
    """Positions of a rank's tokens in ``[begin, end)`` of a sequence of these chunks, in order."""
    runs = shard_positions(chunks, end, rank, world_size)
    found = np.concatenate([np.arange(0), *(np.arange(r.start, r.stop, r.step) for r in runs)])
    return found[found >= begin]


def cut_chunks(chunks: Seq[Chunk], end: int, begin: int = 0) -> list[Chunk]:
    """The chunks of a sequence, or parts of them, that lie in ``[begin, end)``."""
    return [
        chunk.cut(end, begin) if chunk.end > end or chunk.begin < begin else chunk
        for chunk in chunks
        if chunk.begin < end and begin < chunk.end
    ]


def shard_lengths(chunks: Seq[Chunk], end: int, world_size: int) -> list[int]:
    """The length of every rank's shard of a sequence of these chunks that is cut at ``end``.

    A shard is in order of position, so the cut leaves its first tokens.
    """
    cut = cut_chunks(chunks, end)
    return [
        sum(map(len, shard_positions(cut, end, rank, world_size))) for rank in range(world_size)
    ]


def shard_sizes(begin: int, chunks_end: int, total: int, world_size: int) -> list[int]:
    """Tokens ``[begin, total)`` of a sequence that each rank will hold.

    ``[begin, chunks_end)`` is prefilled in chunks of any length (`razor_dist.parallel.zigzag`), or
    in parts that are even (`is_even`); the rest is computed by all ranks.
    """
    sizes = [
        len(owned_tokens(Interval(chunks_end, total), rank, world_size))
        for rank in range(world_size)
    ]
    if chunks_end > begin:
        chunk = Chunk(begin, chunks_end, world_size)
        sizes = [size + chunk.tokens(rank) for rank, size in enumerate(sizes)]
    return sizes
