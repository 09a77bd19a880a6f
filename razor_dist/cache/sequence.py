"""One sequence's state on one rank, and the arithmetic of its shards."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from razor_dist.cache.pages import PageTable
from razor_dist.cache.streaming import StreamingSlot
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.zigzag import Chunk


@dataclass
class Sequence:
    """One sequence's state on this rank."""

    total: int  # tokens, prompt and answer, that its caches were reserved for
    table: PageTable  # this rank's shard of the retrieval heads' keys and values
    shard_tokens: list[int]  # length of every rank's shard
    # The streaming heads' caches, one for each of `razor_dist.heads.layout.HeadLayout.windows`,
    # the same on every rank once a prompt is prefilled.
    streaming: tuple[StreamingSlot, ...]
    # With exact prefill, the streaming heads' full keys and values until the prompt ends.
    scratch: PageTable | None = None
    # Between two chunks: for each cache of ``streaming``, by layer, this rank's own part of the
    # window. None when the window is replicated in ``streaming``.
    window: list[dict[int, list[KVPiece]]] | None = None
    done: list[Chunk] = field(default_factory=list)  # of the prompt that is being prefilled
    # All chunks, of a prompt that it was forked from as well. What lies between two of them, and
    # after the last, was decoded.
    chunks: list[Chunk] = field(default_factory=list)
    length: int = 0  # tokens in the caches
    # Added to positions wherever the model is told of them (`razor_dist.models.longrope`).
    position_mark: int = 0
    # Where its slots lie, and a number per rank for these and its pages, the same on every rank;
    # made when it is asked for (`razor_dist.engine.graph`).
    layout: tuple[tuple[tuple[int, ...], ...], tuple[int, ...]] | None = None


def owner_of(position: int, world_size: int) -> int:
    """The rank that stores the retrieval keys and values of a decoded token."""
    return position % world_size


def shard_positions(done: Seq[Chunk], end: int, rank: int, world_size: int) -> list[range]:
    """Positions of the tokens of a rank's shard, in its order.

    ``done`` is in order: tokens before its first chunk are not in the shard, others between chunks
    were decoded, and so were ``[done[-1].end, end)``.
    """
    found: list[range] = []

    def decoded(begin: int, end: int) -> None:
        found.append(range(begin + (rank - begin) % world_size, end, world_size))

    for before, chunk in zip([None, *done], done, strict=False):
        if before is not None:
            decoded(before.end, chunk.begin)
        found += chunk.ranges(rank)
    if done:
        decoded(done[-1].end, end)
    return [run for run in found if run]


def shard_sizes(begin: int, prompt_end: int, total: int, world_size: int) -> list[int]:
    """Tokens ``[begin, total)`` of a sequence that each rank will hold.

    ``[begin, prompt_end)`` is prefilled, in whatever chunks (`razor_dist.parallel.zigzag`), and the
    rest is decoded.
    """
    sizes = [0] * world_size
    if prompt_end > begin:
        prompt = Chunk(begin, prompt_end, world_size)
        sizes = [prompt.tokens(rank) for rank in range(world_size)]
    decoded = total - prompt_end
    for rank in range(world_size):
        first = (rank - prompt_end) % world_size
        sizes[rank] += max(0, -(-(decoded - first) // world_size))
    return sizes
