"""The place of each KV head's keys and values, from a head map's decision."""

from __future__ import annotations

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
    rows: slice  # in that window's cache


@dataclass(frozen=True)
class LayerHeads:
    """The split of one layer's KV heads; index tensors are int64."""

    retrieval: Tensor  # the layer's retrieval heads, ascending
    streaming: Tensor  # its streaming heads, group by group
    groups: tuple[StreamingGroup, ...]  # by window
    order: Tensor  # [*retrieval, *streaming]
    inverse: Tensor  # the model's order of what is computed in that one
    retrieval_rows: slice  # in the page pool
    streaming_rows: slice  # among those of all layers and windows (the scratch pool's)

    @property
    def retrieval_index(self) -> Tensor | slice:
        """Index of the retrieval heads; where those are all it copies nothing."""
        return self.retrieval if len(self.streaming) else slice(None)

    @property
    def streaming_index(self) -> Tensor | slice:
        """Index of the streaming heads, by group; where it is one whole group it copies nothing."""
        whole = not len(self.retrieval) and len(self.groups) == 1
        return slice(None) if whole else self.streaming


@dataclass(frozen=True)
class HeadLayout:
    """The split of every layer's KV heads, and the row counts of the caches."""

    layers: tuple[LayerHeads, ...]
    # The streaming heads' windows, each once, ascending; None, the last, is what the settings say.
    windows: tuple[int | None, ...]
    rows: tuple[int, ...]  # for each of them, its heads in all layers together

    @property
    def retrieval_rows(self) -> int:
        return self.layers[-1].retrieval_rows.stop

    @property
    def streaming_rows(self) -> int:
        return self.layers[-1].streaming_rows.stop

    @classmethod
    def from_decision(
        cls,
        retrieval: Sequence[Sequence[bool]],
        device: torch.device,
        windows: Windows | None = None,
    ) -> HeadLayout:
        """Build the layout, with index tensors on ``device``; tables are ``[layers][KV heads]``.

        A streaming head without a window of its own in ``windows`` has that of the settings.
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
        rows = dict.fromkeys(ordered, 0)
        layers, r_row, l_row = [], 0, 0
        for decision, row in zip(retrieval, windows, strict=True):
            chosen = [h for h, yes in enumerate(decision) if yes]
            rest: list[int] = []
            groups = []
            for index, window in enumerate(ordered):
                heads = [h for h, yes in enumerate(decision) if not yes and row[h] == window]
                if heads:
                    part = slice(len(rest), len(rest) + len(heads))
                    first = rows[window]
                    rows[window] += len(heads)
                    groups.append(StreamingGroup(index, part, slice(first, rows[window])))
                    rest += heads
            order = torch.tensor(chosen + rest, dtype=torch.int64, device=device)
            layers.append(
                LayerHeads(
                    torch.tensor(chosen, dtype=torch.int64, device=device),
                    torch.tensor(rest, dtype=torch.int64, device=device),
                    tuple(groups),
                    order,
                    order.argsort(),
                    slice(r_row, r_row + len(chosen)),
                    slice(l_row, l_row + len(rest)),
                )
            )
            r_row, l_row = r_row + len(chosen), l_row + len(rest)
        return cls(tuple(layers), tuple(ordered), tuple(rows.values()))
