"""One sequence's state on one rank."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from razor_dist.cache.pages import PageTable
from razor_dist.cache.slots import StreamingSlot
from razor_dist.kernels.chosen import Shard
from razor_dist.parallel.sharding import shard_positions
from razor_dist.parallel.zigzag import Chunk


@dataclass
class ChunkedPrefill:
    """State of a prompt that is read in chunks, until the last one.

    Its windows are not in its slots (`razor_dist.cache.streaming.ChunkedWindow`).
    """

    done: list[Chunk] = field(default_factory=list)  # of this prompt, in order
    scratch: PageTable | None = None  # exact prefill: the streaming heads' full keys and values


@dataclass
class Sequence:
    """One sequence's state on this rank.

    Between steps, unless `prefill` is set, each streaming slot begins where the next token's window
    does: ``slot.start = s(length)``, or where it can never have dropped anything.
    """

    total: int  # tokens, prompt and answer, that its caches were reserved for
    table: PageTable  # this rank's shard of the retrieval heads' keys and values
    shard_tokens: list[int]  # length of every rank's shard
    # The streaming heads' caches, one for each of `razor_dist.heads.layout.HeadLayout.windows`.
    streaming: tuple[StreamingSlot, ...]
    length: int = 0  # tokens in the caches
    # All chunks, of a prompt that it was forked from as well. What is in none of them was computed
    # whole by all ranks.
    chunks: list[Chunk] = field(default_factory=list)
    # Added to positions wherever the model gets them (`razor_dist.models.longrope`).
    position_mark: int = 0
    prefill: ChunkedPrefill | None = None  # until the last chunk of its prompt
    _shard: Shard | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        assert 0 <= self.length == sum(self.shard_tokens) <= self.total

    def grow(self, sizes: Seq[int], rank: int) -> None:
        """Count new tokens in the caches: ``sizes`` by rank; this rank is ``rank``."""
        self.shard_tokens = [n + new for n, new in zip(self.shard_tokens, sizes, strict=True)]
        self.table.tokens += sizes[rank]
        self.length += sum(sizes)
        assert self.length <= self.total and self.table.tokens == self.shard_tokens[rank]

    def shard(self, rank: int, device: torch.device) -> Shard:
        """This rank's shard, up to `total`.

        Found once, when prefill is over: an answer's tokens are stored by position.
        """
        if self._shard is None:
            runs = shard_positions(self.chunks, self.total, rank, len(self.shard_tokens))
            self._shard = Shard.of(runs, self.total, device)
        return self._shard

    def end_answer(self) -> None:
        """Let go of what its next tokens would need: there are none."""
        self._shard = None
