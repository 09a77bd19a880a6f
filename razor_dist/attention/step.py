"""A step as data: prepared once, read by attention.

`razor_dist.engine.prepare` makes a `Step` of the sequences, the model and its attention read it,
and `razor_dist.engine.commit` changes the sequences, after the pass. The pass itself writes to the
caches alone. It replaces windows there (`razor_dist.cache.streaming.ChunkedWindow`), so that a step
with chunks can be run only once.

A step is one `Pass` of the model, or two in tensor-parallel decode, where chunks need the weights
whole. The tokens of a pass come in three kinds, in this order::

    [ decode: n tokens of answers | prompts: replicated | chunks: this rank's part ]

Each token of the first kind is a query of its own: usually one of each sequence, and with drafts
runs of consecutive tokens of one, of which a token sees those before it.

All ranks have the tokens of the first two kinds alike. Which memory decode reads is said by tensors
alone, so that a recording of it (`razor_dist.engine.graph`) serves every step of its shape.

Letters: n tokens of decode, T tokens, K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.attention.window_plan import WindowPlan
from razor_dist.cache.pages import Span
from razor_dist.cache.slots import SlotAt
from razor_dist.kernels.chosen import Shard, fixed
from razor_dist.parallel.zigzag import Chunk, Interval

Extents = list[tuple[int, int]]  # slots [a, b) of a page pool


class StepInputs(NamedTuple):
    """Numbers of a decode batch that change at every step: int64 ``[n]``, one a token."""

    token: Tensor  # its id
    position: Tensor
    model_position: Tensor  # as the model gets it (`Sequence.position_mark`)
    # Slot of the page pool for the token's retrieval keys and values; the pool's dummy slot on
    # ranks that do not store them.
    at: Tensor
    stored: Tensor  # tokens of this rank's shard up to it, itself included where it is stored
    # [windows, n], for each streaming cache: ``s`` of the query (`razor_dist.cache.policy`), the
    # slot's first place, and the tokens that its ring holds.
    start: Tensor
    offset: Tensor
    capacity: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> StepInputs:
        """Name the rows of `DecodeBatch.inputs`."""
        return cls(*rows[:5], *rows[5:].chunk(3))


_POSITION, _AT, _STORED = map(StepInputs._fields.index, ("position", "at", "stored"))


class BlockTables(NamedTuple):
    """The memory that the n tokens of a decode batch may read on this rank."""

    pages: Tensor  # int32 [n, pages], of each one's sequence; zeros where its shard has no more
    widths: tuple[int, ...]  # by streaming cache: places of a slot that are read at most


@dataclass(frozen=True)
class BlockReader:
    """Tokens of one sequence whose retrieval heads read chosen blocks, and this rank's keys."""

    at: slice  # of the tokens of their kind
    positions: Tensor  # int64 [T]
    queries: Tensor  # int64: `positions`; of a chunk, those of all ranks' tokens, by rank
    spans: list[Span]  # slots of this rank's shard, these tokens included
    shard: Shard  # where the keys of `spans` stand
    shards: tuple[Shard, ...] = ()  # of a chunk: every rank's `shard`

    @property
    def blocks(self) -> int:
        """Blocks of the text so far."""
        return len(self.shard.edges) - 1

    @cached_property
    def always(self) -> Tensor:
        """The blocks that `queries` always read, bool ``[B, T]``: the same for all layers."""
        return fixed(self.queries, self.blocks)

    @cached_property
    def parts(self) -> list[tuple[Span, Shard]]:
        """`spans`, and where the keys of each stand."""
        found, done = [], 0
        for span in self.spans:
            end = done + (span.stop - span.start if isinstance(span, slice) else len(span))
            found.append((span, self.shard.cut(done, end)))
            done = end
        return found


@dataclass(frozen=True)
class DecodeBatch:
    """The next n tokens of some sequences, in host memory."""

    inputs: Tensor  # int64 [5 + 3 windows, n]: `StepInputs`
    pages: tuple[list[int], ...]  # by token: its sequence's page table
    longest: int  # tokens of the longest shard on any rank, the new tokens included
    windows: tuple[int, ...]  # by streaming cache: tokens of the longest window
    page_size: int
    dummy_slot: int
    rings: tuple[int, ...]  # by streaming cache: places of a slot before its ring
    # One for each sequence, if any of them is long enough to choose from; else none.
    readers: tuple[BlockReader, ...] = ()

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def end(self) -> int:
        """One more than the largest position of a token."""
        return int(self.inputs[_POSITION].max()) + 1

    def padded(self, rows: int) -> Tensor:
        """`inputs` with further columns that are of no token: these store and see nothing."""
        padded = torch.nn.functional.pad(self.inputs, (0, rows - len(self)))
        padded[_AT, len(self) :] = self.dummy_slot
        return padded

    def table(self, rows: int, pages: int) -> Tensor:
        """`BlockTables.pages` of ``rows`` rows, in host memory."""
        table = torch.zeros(rows, pages, dtype=torch.int32)
        for row, own in zip(table, self.pages, strict=False):
            row[: len(own)] = torch.tensor(own[:pages], dtype=torch.int32)
        return table

    def widths(self, windows: Sequence[int]) -> tuple[int, ...]:
        """`BlockTables.widths` for windows of these lengths in tokens, by streaming cache."""
        return tuple(ring + tokens for ring, tokens in zip(self.rings, windows, strict=True))

    def on(self, device: torch.device, rows: int) -> tuple[StepInputs, BlockTables]:
        """Inputs and tables of ``rows`` rows on ``device``, no larger than this batch needs."""
        stored = int(self.inputs[_STORED].max()) if len(self) else 0
        pages = self.table(rows, -(-stored // self.page_size)).to(device)
        return StepInputs.of(self.padded(rows).to(device)), BlockTables(
            pages, self.widths(self.windows)
        )


@dataclass(frozen=True)
class WindowPart:
    """A prompt's tokens in the streaming heads of one window: what they read, and store where.

    Each interval of positions in the slot is followed by their places in the cache's arena, int64.
    """

    slot: SlotAt
    plan: WindowPlan | None  # None: with exact prefill, before the last chunk
    replicated: Interval  # positions that are read from the slot
    replicated_at: Tensor
    new: Interval  # positions that go to the slot's ring
    new_at: Tensor
    tail: Interval  # positions that go to the slot's tail
    tail_at: Tensor
    kept: Interval  # positions that the `ChunkedWindow` has after this chunk


@dataclass(frozen=True)
class ReplicatedTokens:
    """Consecutive tokens of one prompt that all ranks compute."""

    sequence: int
    at: slice  # of the replicated tokens of the pass
    chunk: Chunk  # as of one rank
    positions: Tensor  # int64 [T]
    owned: range  # positions of which this rank stores the retrieval keys and values
    extents: Extents  # slots for these
    seen: list[Span]  # slots of this rank's shard of the tokens before
    windows: tuple[WindowPart, ...]  # by streaming cache
    reader: BlockReader | None = None  # where retrieval heads choose blocks

    @property
    def own(self) -> slice:
        """Index of the `owned` tokens among these."""
        return slice(self.owned.start - self.chunk.begin, None, self.owned.step)


@dataclass(frozen=True)
class ShardPart:
    """A chunk's place in one page pool on this rank."""

    extents: Extents  # of the chunk's tokens
    seen: list[Span]  # of those before it
    lengths: list[int]  # by rank: tokens before it
    positions: list[Tensor]  # by rank: their positions, int64; empty where nothing asks for them


@dataclass(frozen=True)
class ChunkTokens:
    """A chunk of a prompt, of which each rank computes its shards."""

    sequence: int
    chunk: Chunk
    last: bool  # the prompt ends with it
    positions: Tensor  # int64 [T] of this rank's tokens
    pages: ShardPart
    scratch: ShardPart | None  # exact prefill: of the streaming heads' keys and values
    # Exact prefill, last chunk: what this rank's scratch pool has of the prompt, as positions and
    # slots.
    stored: list[tuple[Interval, slice]]
    windows: tuple[WindowPart, ...]  # by streaming cache
    reader: BlockReader | None = None  # where its end is far enough to choose blocks

    @property
    def exact(self) -> bool:
        return self.scratch is not None


@dataclass(frozen=True)
class SourceToken:
    """An answer's token that asks which positions the strongest retrieval heads attend to."""

    sequence: int
    index: int  # among the tokens of the pass
    position: int
    spans: list[Span]  # slots of this rank's shard, the new token's included
    places: Tensor  # int64 [S], the positions of this rank's shard


@dataclass(frozen=True)
class Pass:
    """One run of the model over this rank's tokens."""

    # Of the tokens after those of `decode`: ids and positions as the model gets them, int64 [T].
    ids: Tensor
    model_positions: Tensor
    logits: Tensor | None  # indices of the tokens whose logits are computed here, int64; None: all
    rows: list[int]  # the number of these tokens, of each entry of the step that is in this pass
    decode: DecodeBatch | None = None
    replicated: tuple[ReplicatedTokens, ...] = ()
    chunks: tuple[ChunkTokens, ...] = ()
    sources: tuple[SourceToken, ...] = ()
    tensor_parallel: bool = False  # heads and weights are dealt to the ranks

    @property
    def recordable(self) -> bool:
        """True for a decode batch alone, of which nothing else is asked, and that reads all."""
        alone = not (self.replicated or self.chunks or self.sources)
        return self.decode is not None and alone and not self.decode.readers


@dataclass(frozen=True)
class Step:
    """One scheduled step on this rank."""

    passes: tuple[Pass, ...]
    runs: list[tuple[int, int]]  # of each sequence of `Pass.decode`, in order: its tokens there
    growth: list[tuple[int, list[int]]]  # of each other entry: its sequence, new tokens by rank
