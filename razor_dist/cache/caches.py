"""The caches of one rank, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from razor_dist.cache.pages import PagePool
from razor_dist.cache.slots import Arena
from razor_dist.cache.streaming import StreamingCache
from razor_dist.heads.layout import HeadLayout
from razor_dist.kernels.chosen import BlockChoice, chooses
from razor_dist.kernels.dual_chunk import DualChunk
from razor_dist.kernels.query import Query
from razor_dist.models.shape import ModelShape


@dataclass(frozen=True)
class CacheConfig:
    arenas: tuple[Arena, ...]  # of the streaming heads, one for each of `HeadLayout.windows`
    max_sequences: int
    max_tokens: int  # of the longest sequence
    num_pages: int
    page_size: int  # tokens
    scratch_pages: int  # for exact prefill; 0 with local prefill
    dtype: torch.dtype  # of retrieval heads' keys and values, in the caches and between ranks
    streaming_dtype: torch.dtype  # of streaming heads'
    # Sequences kept for later prompts, after their end or pinned; 0 without a prefix cache, where a
    # pinned one is one of ``max_sequences``.
    max_cached: int = 0
    page_bytes: int = 1
    place_bytes: tuple[int, ...] = ()  # of each arena

    @property
    def max_pinned(self) -> int:
        """Sequences pinned at most: half of those kept, so that others stay, too."""
        return self.max_cached // 2 or self.max_sequences


@dataclass
class Caches:
    """The stores of one rank."""

    layout: HeadLayout
    pages: PagePool  # retrieval heads
    streaming: tuple[StreamingCache, ...]  # streaming heads, one for each of layout.windows
    scratch: PagePool | None  # streaming heads' full keys and values while prefill is exact
    dual: DualChunk | None = None  # the model's dual chunk attention
    choice: BlockChoice | None = (
        None  # of the blocks that retrieval heads read; None: they read all
    )

    def placed(self, query: Query, end: int) -> Query:
        """The queries of tokens before position ``end``, with what scoring keys takes there."""
        return query._replace(dual=self.dual) if self.beyond_chunk(end) else query

    def beyond_chunk(self, end: int) -> bool:
        """True if a text of ``end`` tokens has more than one chunk of dual chunk attention."""
        return self.dual is not None and end > self.dual.length

    def chooses(self, end: int) -> bool:
        """True if retrieval heads leave out blocks of a text of ``end`` tokens."""
        return self.choice is not None and chooses(end)

    def by_distance(self, end: int) -> bool:
        """True if scores in a text of ``end`` tokens depend on where keys stand."""
        tracked = self.pages.positions is not None
        return tracked and (self.dual is None or self.beyond_chunk(end))

    @property
    def stores(self) -> list[PagePool | StreamingCache]:
        return [self.pages, *self.streaming, *([] if self.scratch is None else [self.scratch])]

    @property
    def reserved_bytes(self) -> int:
        return sum(store.reserved_bytes for store in self.stores)


def new_caches(
    layout: HeadLayout,
    shape: ModelShape,
    cache: CacheConfig,
    device: torch.device,
    *,
    rows: Sequence[int] | None = None,
) -> Caches:
    """A rank's empty caches on ``device``.

    ``rows``, by default the layout's, are the heads in each streaming cache.
    """
    size, dim = cache.page_size, shape.head_dim
    pages = PagePool(
        layout.retrieval_rows,
        cache.num_pages,
        size,
        dim,
        dtype=cache.dtype,
        device=device,
        track_positions=shape.alibi or shape.dual_chunk is not None,
    )
    scratch, dtype = None, cache.streaming_dtype
    if cache.scratch_pages and layout.streaming_rows:
        rows_kept, pages_kept = layout.streaming_rows, cache.scratch_pages
        scratch = PagePool(rows_kept, pages_kept, size, dim, dtype=dtype, device=device)
    streaming = tuple(
        # Three more: one that is saved stays, one is loaded, one is copied before another goes.
        StreamingCache(
            heads,
            cache.max_sequences + cache.max_cached + 3,
            arena,
            dim,
            dtype=dtype,
            device=device,
        )
        for heads, arena in zip(rows or layout.rows, cache.arenas, strict=True)
    )
    return Caches(layout, pages, streaming, scratch)
