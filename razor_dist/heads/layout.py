"""The place of each KV head's keys and values, from a head map's decision.

With tensor-parallel decode the ranks share the heads of short steps. Each streaming head belongs to
one rank, which alone keeps its window and computes it. Retrieval heads are computed by all ranks,
each over its own shard; after the merge, every rank projects the outputs of some of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.heads.decision import Windows


@dataclass(frozen=True)
class StreamingGroup:
    """Streaming heads of one layer that share a window, and so a cache."""

    index: int  # in `HeadLayout.windows`
    part: slice  # of `LayerHeads.streaming`
    rows: slice  # among that window's heads of all layers; in its cache, unless ranks share heads
    # With tensor-parallel decode: the part of the group that each rank keeps, by rank, and the rows
    # of this rank's part in its cache.
    shares: tuple[slice, ...] = ()
    kept: slice | None = None


@dataclass(frozen=True)
class LayerHeads:
    """The split of one layer's KV heads; index tensors are int64."""

    retrieval: Tensor  # the layer's retrieval heads, ascending
    streaming: Tensor  # the layer's streaming heads, group by group, and within a group by rank
    groups: tuple[StreamingGroup, ...]  # by window
    inverse: Tensor  # index that puts results of [*retrieval, *streaming] into the model's order
    retrieval_rows: slice  # in the page pool
    streaming_rows: slice  # in the scratch pool: among the streaming heads of all layers
    all_stream: bool  # all heads stream, and are in the model's order

    @property
    def retrieval_index(self) -> Tensor | slice:
        """Index of the retrieval heads; a slice, which copies nothing, if all heads are."""
        return self.retrieval if len(self.streaming) else slice(None)

    @property
    def streaming_index(self) -> Tensor | slice:
        """Index of the streaming heads, by group; a slice, which copies nothing, if all stream."""
        return slice(None) if self.all_stream else self.streaming


@dataclass(frozen=True)
class ShortHeads:
    """The part of one layer that this rank computes in a short step."""

    # KV heads of the model, and their indices among the heads that the model hands to attention.
    retrieval: list[int]
    streaming: list[int]  # this rank's, group by group
    retrieval_index: Tensor | slice
    streaming_index: Tensor | slice
    order: Tensor  # both indices, one after the other
    groups: tuple[StreamingGroup, ...]  # `part` is of ``streaming``, `rows` in this rank's caches
    retrieval_rows: slice  # in the page pool
    inverse: Tensor | None  # as `LayerHeads.inverse`; None if results are in the model's order
    # With tensor-parallel decode: the retrieval heads' results that this rank projects, by query
    # head. It also projects those of its streaming heads.
    taken: slice | None
    # int64, for each query head that is handed to attention: the row of its result among those that
    # this rank projects, or -1. None if the rank projects all in their order.
    places: Tensor | None
    outputs: list[int]  # the model's query heads that this rank projects, in the order of results


@dataclass(frozen=True)
class HeadShare:
    """A rank's share of the heads with tensor-parallel decode.

    ``group`` is the number of query heads for each KV head. With ``compact``, the model hands only
    the rank's own heads to attention, as [*retrieval, *streaming].
    """

    rank: int
    size: int
    group: int
    compact: bool


@dataclass(frozen=True)
class HeadLayout:
    """The split of every layer's KV heads, and the row counts of the caches."""

    layers: tuple[LayerHeads, ...]
    short: tuple[ShortHeads, ...]  # for short steps
    # The streaming heads' windows, each once, ascending; None, the last, is the settings' window.
    windows: tuple[int | None, ...]
    # By window and rank: the rows that the rank keeps, among the window's heads of all layers. If
    # every rank keeps all, there is one list per window.
    kept: tuple[tuple[list[int], ...], ...]
    share: HeadShare | None  # with tensor-parallel decode

    @property
    def retrieval_rows(self) -> int:
        return self.layers[-1].retrieval_rows.stop

    @property
    def streaming_rows(self) -> int:
        return self.layers[-1].streaming_rows.stop

    def streaming_in_layers(self, index: int) -> tuple[int, ...]:
        """The number of streaming heads of ``windows[index]``, by layer."""
        return tuple(
            sum(g.rows.stop - g.rows.start for g in heads.groups if g.index == index)
            for heads in self.layers
        )

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of this rank's streaming caches, by window."""
        rank = 0 if self.share is None else self.share.rank
        return tuple(len(by_rank[rank]) for by_rank in self.kept)

    @property
    def most_rows(self) -> tuple[int, ...]:
        """The most rows that any rank has, by window."""
        return tuple(max(map(len, by_rank)) for by_rank in self.kept)

    @classmethod
    def from_decision(
        cls,
        retrieval: Sequence[Sequence[bool]],
        device: torch.device,
        windows: Windows | None = None,
        share: HeadShare | None = None,
    ) -> HeadLayout:
        """Build the layout, with index tensors on ``device``; tables are ``[layers][KV heads]``.

        A streaming head without a window in ``windows`` has the settings' window. With a ``share``
        the layout is one rank's, for tensor-parallel decode.
        """
        if windows is None:
            windows = tuple((None,) * len(decision) for decision in retrieval)
        kinds = {
            window
            for decision, row in zip(retrieval, windows, strict=True)
            for yes, window in zip(decision, row, strict=True)
            if not yes
        }
        ordered = sorted(kinds, key=lambda window: (window is None, window))
        size = 1 if share is None else share.size
        # Rows of each window's heads, by rank.
        kept: list[tuple[list[int], ...]] = [tuple([] for _ in range(size)) for _ in ordered]
        layers, short, r_row, l_row = [], [], 0, 0

        def indices(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        for decision, row in zip(retrieval, windows, strict=True):
            chosen = [h for h, yes in enumerate(decision) if yes]
            by_window = [
                [h for h, yes in enumerate(decision) if not yes and row[h] == window]
                for window in ordered
            ]
            owners = _deal(by_window, kept)
            rest: list[int] = []
            groups = []
            for index, found in enumerate(by_window):
                if found:
                    heads = sorted(found, key=lambda h: (owners[h], h))
                    counts = [sum(owners[h] == rank for h in heads) for rank in range(size)]
                    groups.append(_group(index, len(rest), counts, kept[index], share))
                    rest += heads
            layer = LayerHeads(
                indices(chosen),
                indices(rest),
                tuple(groups),
                indices(chosen + rest).argsort(),
                slice(r_row, r_row + len(chosen)),
                slice(l_row, l_row + len(rest)),
                rest == list(range(len(decision))),
            )
            layers.append(layer)
            if share is None:
                short.append(_whole(layer, chosen, rest))
            else:
                short.append(_shared(layer, chosen, rest, share, owners))
            r_row, l_row = r_row + len(chosen), l_row + len(rest)
        return cls(tuple(layers), tuple(short), tuple(ordered), tuple(kept), share)


def _deal(
    by_window: Sequence[Sequence[int]], kept: Sequence[Sequence[list[int]]]
) -> dict[int, int]:
    """Choose the rank of each streaming head of a layer: {head: rank}.

    It is the rank with the fewest heads of the layer so far, since all ranks wait for the slowest;
    of several, the one with the fewest heads of this window in the layers before, then of all.
    """
    size = len(kept[0]) if kept else 1
    owners: dict[int, int] = {}
    in_layer = [0] * size
    before = [sum(len(rows[rank]) for rows in kept) for rank in range(size)]
    for index, heads in enumerate(by_window):
        of_window = [len(rows) for rows in kept[index]]
        for head in heads:
            rank = min(
                range(size),
                key=lambda r: (in_layer[r], of_window[r], before[r] + in_layer[r], r),
            )
            owners[head] = rank
            in_layer[rank] += 1
            of_window[rank] += 1
    return owners


def _group(
    index: int,
    begin: int,
    counts: Sequence[int],
    kept: Sequence[list[int]],
    share: HeadShare | None,
) -> StreamingGroup:
    """Make a layer's group of one window, and add its rows to ``kept``, by rank.

    ``begin`` is the group's first index among the layer's streaming heads, ``counts`` are its heads
    by rank.
    """
    first, total = sum(map(len, kept)), sum(counts)
    ends = list(itertools.accumulate(counts))
    shares = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    for rows, mine in zip(kept, shares, strict=True):
        rows += range(first + mine.start, first + mine.stop)
    part, rows_of_all = slice(begin, begin + total), slice(first, first + total)
    if share is None:
        return StreamingGroup(index, part, rows_of_all)
    end = len(kept[share.rank])
    own = slice(end - counts[share.rank], end)
    return StreamingGroup(index, part, rows_of_all, tuple(shares), own)


def _whole(layer: LayerHeads, retrieval: list[int], streaming: list[int]) -> ShortHeads:
    """All heads, which every rank computes in replicated mode."""
    in_order = layer.all_stream or not streaming
    return ShortHeads(
        retrieval,
        streaming,
        layer.retrieval_index,
        layer.streaming_index,
        torch.cat([layer.retrieval, layer.streaming]),
        layer.groups,
        layer.retrieval_rows,
        None if in_order else layer.inverse,
        None,
        None,
        [],
    )


def _shared(
    layer: LayerHeads,
    retrieval: list[int],
    rest: list[int],
    share: HeadShare,
    owners: dict[int, int],
) -> ShortHeads:
    """The share of a rank with tensor-parallel decode; ``rest`` are all ranks' streaming heads."""
    device = layer.retrieval.device
    streaming: list[int] = []
    groups = []
    for group in layer.groups:
        mine = group.shares[share.rank]
        of_group = rest[group.part][mine]
        assert group.kept is not None
        part = slice(len(streaming), len(streaming) + len(of_group))
        if of_group:
            groups.append(StreamingGroup(group.index, part, group.kept))
            streaming += of_group
    # The retrieval heads' outputs go to the ranks with the fewest outputs to project.
    counts = [
        share.group * sum(owner == rank for owner in owners.values()) for rank in range(share.size)
    ]
    queries = [0] * share.size
    for _ in range(share.group * len(retrieval)):
        rank = min(range(share.size), key=lambda r: (counts[r] + queries[r], r))
        queries[rank] += 1
    begin = sum(queries[: share.rank])
    taken = slice(begin, begin + queries[share.rank])
    of_retrieval = [h * share.group + g for h in retrieval for g in range(share.group)]
    of_streaming = [h * share.group + g for h in streaming for g in range(share.group)]
    retrieval_index: Tensor | slice = slice(0, len(retrieval))
    streaming_index: Tensor | slice = slice(len(retrieval), len(retrieval) + len(streaming))
    handed = list(range(len(retrieval) + len(streaming)))
    if not share.compact:
        handed = retrieval + streaming
        retrieval_index = layer.retrieval if rest else slice(None)
        streaming_index = torch.tensor(streaming, dtype=torch.int64, device=device)
    results = [h * share.group + g for h in handed for g in range(share.group)]
    split = share.group * len(retrieval)
    projected = results[:split][taken] + results[split:]
    kv_heads = len(handed) if share.compact else len(retrieval) + len(rest)
    places = torch.full((kv_heads * share.group,), -1)
    places[projected] = torch.arange(len(projected))
    return ShortHeads(
        retrieval,
        streaming,
        retrieval_index,
        streaming_index,
        torch.tensor(handed, dtype=torch.int64, device=device),
        tuple(groups),
        layer.retrieval_rows,
        None,
        taken,
        places.to(device),
        of_retrieval[taken] + of_streaming,
    )
