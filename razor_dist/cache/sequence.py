"""One sequence's state on one rank."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from razor_dist.cache.pages import PageTable
from razor_dist.cache.streaming import SinksAndSums, StreamingSlot
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.zigzag import Chunk, Interval


@dataclass(frozen=True)
class SharedWindow:
    """All heads' keys and values of one window, on every rank, during a prefill in tensor mode."""

    fixed: SinksAndSums
    held: list[tuple[Interval, int]]  # the window before the prompt, and the ranks that hold it


@dataclass
class Sequence:
    """One sequence's state on this rank."""

    total: int  # tokens, prompt and answer, that its caches were reserved for
    table: PageTable  # this rank's shard of the retrieval heads' keys and values
    shard_tokens: list[int]  # length of every rank's shard
    # The streaming heads' caches, one for each of `razor_dist.heads.layout.HeadLayout.windows`.
    # They have the window once a prompt is prefilled.
    streaming: tuple[StreamingSlot, ...]
    # With exact prefill, the streaming heads' full keys and values until the prompt ends.
    scratch: PageTable | None = None
    # Between two chunks: for each cache of ``streaming``, by layer, this rank's own part of the
    # window. None when the window is in ``streaming``.
    window: list[dict[int, list[KVPiece]]] | None = None
    # In tensor mode, and then only: for each cache of ``streaming``.
    shared: list[SharedWindow] | None = None
    done: list[Chunk] = field(default_factory=list)  # of the prompt that is being prefilled
    # All chunks, of a prompt that it was forked from as well. What is in none of them was computed
    # whole by all ranks.
    chunks: list[Chunk] = field(default_factory=list)
    length: int = 0  # tokens in the caches
    # Added to positions wherever the model gets them (`razor_dist.models.longrope`).
    position_mark: int = 0
    # Positions of this rank's shard, up to ``total``, and how many of its tokens are before each
    # run; made when they are asked for (`razor_dist.attention.sources`).
    runs: tuple[list[range], list[int]] | None = None

    def grow(self, sizes: Seq[int], rank: int) -> None:
        """Count new tokens in the caches: ``sizes`` by rank; this rank is ``rank``."""
        self.shard_tokens = [n + new for n, new in zip(self.shard_tokens, sizes, strict=True)]
        self.table.tokens += sizes[rank]
        self.length += sum(sizes)
