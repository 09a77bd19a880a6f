"""Where each KV head's keys and values live, from a head map's decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerHeads:
    """The split of one layer's KV heads.

    Attributes
    ----------
    retrieval, local : Tensor
        int64 indices of the layer's KV heads of each kind, ascending.
    inverse : Tensor
        int64; the model's order of what is computed in the order ``[*retrieval, *local]``.
    retrieval_rows, local_rows : slice
        Their rows in the page pool and in the local cache.
    """

    retrieval: Tensor
    local: Tensor
    inverse: Tensor
    retrieval_rows: slice
    local_rows: slice

    @property
    def num_retrieval(self) -> int:
        """Retrieval KV heads of the layer."""
        return self.retrieval_rows.stop - self.retrieval_rows.start

    @property
    def num_local(self) -> int:
        """Local KV heads of the layer."""
        return self.local_rows.stop - self.local_rows.start


@dataclass(frozen=True)
class HeadLayout:
    """The split of every layer's KV heads, and the row counts of the two caches."""

    layers: tuple[LayerHeads, ...]

    @property
    def retrieval_rows(self) -> int:
        """Retrieval KV heads of all layers."""
        return self.layers[-1].retrieval_rows.stop

    @property
    def local_rows(self) -> int:
        """Local KV heads of all layers."""
        return self.layers[-1].local_rows.stop

    @classmethod
    def from_decision(cls, retrieval: Sequence[Sequence[bool]], device: torch.device) -> HeadLayout:
        """Build the layout.

        Parameters
        ----------
        retrieval : sequence of sequence of bool
            For each layer and KV head, whether it is a retrieval head.
        device : torch.device
            Where the index tensors live.
        """
        layers, r_row, l_row = [], 0, 0
        for decision in retrieval:
            chosen = [h for h, yes in enumerate(decision) if yes]
            rest = [h for h, yes in enumerate(decision) if not yes]
            layers.append(
                LayerHeads(
                    torch.tensor(chosen, dtype=torch.int64, device=device),
                    torch.tensor(rest, dtype=torch.int64, device=device),
                    torch.tensor(chosen + rest, dtype=torch.int64, device=device).argsort(),
                    slice(r_row, r_row + len(chosen)),
                    slice(l_row, l_row + len(rest)),
                )
            )
            r_row, l_row = r_row + len(chosen), l_row + len(rest)
        return cls(tuple(layers))
