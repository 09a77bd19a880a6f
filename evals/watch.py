"""Attention mass of every head: on given places of the prompt, and on what a window drops.

The engine's tracer names a few positions of retrieval heads. Here each head's weights are whole, of
full attention, so that it can be said of a streaming head how much of its mass its window loses.

Letters: K KV heads, G query heads of each, T queries, n keys, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.evals.selection import turned
from razor_dist.kernels.query import Query

# Maps a layer and its query positions to the first token after the sinks, ``[K]``, and the first
# token of the window, ``[K, T]``. Tokens between them are dropped.
Dropped = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class Mass(NamedTuple):
    """Parts of softmax weights, float32 ``[positions, layers, query heads]``."""

    places: Tensor  # on the tokens that state the answer
    dropped: Tensor  # on tokens between sinks and window


class Watch:
    """Records attention masses while full attention reads one sequence, from ``begin`` on."""

    def __init__(self, begin: int, places: Tensor, dropped: Dropped) -> None:
        self._begin, self._places, self._dropped = begin, places, dropped  # places: bool [tokens]
        self._keys: dict[int, list[Tensor]] = {}
        self._found: dict[int, list[Tensor]] = {}  # by layer, [T, 2, K * G]

    @property
    def mass(self) -> Mass:
        """The masses of all queries so far; the first position is ``begin``."""
        layers = [torch.cat(self._found[layer]) for layer in sorted(self._found)]
        places, dropped = torch.stack(layers, 1).unbind(2)
        return Mass(places, dropped)

    def look(self, layer: int, query: Query, k: Tensor, positions: Tensor) -> None:
        """Note the keys of a pass ``[K, T, D]``, and where its queries look."""
        q, k = turned(query, k)
        if int(positions[0]) == 0:
            self._keys[layer] = []
        self._keys[layer].append(k.clone())
        late = positions >= self._begin
        if not late.any():
            return
        own, keys = positions[late], torch.cat(self._keys[layer], 1)
        at = torch.arange(keys.shape[1], device=keys.device)
        scores = query.scale * (q[:, :, late].float() @ keys.float().mT.unsqueeze(1))
        ahead = at - own.unsqueeze(-1)  # [T, n]
        if query.slopes is not None:
            scores += query.slopes[:, :, None, None] * ahead
        weights = scores.masked_fill(ahead > 0, -torch.inf).softmax(-1)
        sinks, starts = self._dropped(layer, own)
        between = (at >= sinks[:, None, None]) & (at < starts[:, :, None])  # [K, T, n]
        on_places = weights[..., self._places[: len(at)].to(at.device)].sum(-1)
        dropped = (weights * between.unsqueeze(1)).sum(-1)  # [K, G, T]
        both = torch.stack([on_places, dropped]).flatten(1, 2)
        self._found.setdefault(layer, []).append(both.permute(2, 0, 1).cpu())
