"""DuoAttention's criterion without training: the change of the output if one KV head is cut.

A retrieval head significantly alters the model's output when it sees only the sinks and the recent
tokens (papers/duoattention.txt, section 2.2). Training finds these heads jointly, in hours. This is
the first-order approximation, in one forward pass per sample: every head runs in full, and each
group's output is also computed without the middle of the context.

**The score** of KV head j of layer i is, over the tokens t of the recall (see `passkeys`)::

    || W_O,j (full_j - streaming_j) ||  /  || sum over all heads h of W_O,h full_h ||

where W_O,j are the columns of the output projection for the query heads of group j: a distance in
the hidden state, where heads can be compared, relative to all that the layer's attention adds
there. Norms are over tokens and hidden dimensions, with squares summed over samples.

It does not see that heads may replace one another, or what later layers make of a change.

Letters: H query heads, K key-value heads, G = H / K, T tokens, R recall tokens, D head dimension,
E hidden size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from razor_dist.config.errors import ModelError
from razor_dist.identify.criterion import Criterion
from razor_dist.identify.duo.attention import full_attention, streaming_attention
from razor_dist.identify.settings import OnTheFlySettings
from razor_dist.kernels.query import Query
from razor_dist.models.shape import ModelShape

KIND: Final = "change"  # of score, in `HeadMap.kv_scores`

# The names that transformers' models give to an attention's output projection.
_PROJECTIONS: Final = ("o_proj", "dense", "out_proj", "wo")


class Change(Criterion):
    """Sums squares of each KV head's change, and of the whole output of its layer."""

    def __init__(self, model: PreTrainedModel, settings: OnTheFlySettings) -> None:
        shape = ModelShape.from_config(model.config)
        self._projections = output_projections(model, shape)
        self._sinks, self._recent = settings.sinks, settings.recent
        self._moved = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.float64)
        self._whole = torch.zeros(shape.layers, 1, dtype=torch.float64)

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        q, scale = query.q.flatten(0, 1), query.scale
        full = full_attention(q, k, v, scale)
        cut = streaming_attention(q, k, v, scale, self._sinks, self._recent)
        kv_heads, recall = k.shape[0], self.sample.mask.to(q.device)
        weight_EX = self._projections[layer].float()
        # The model's own reshape: query heads side by side, a group's next to each other.
        full_RX = full[:, recall].transpose(0, 1).flatten(1).float()
        lost_RX = full_RX - cut[:, recall].transpose(0, 1).flatten(1).float()
        moved = [
            _squared(lost @ weight.T)
            for lost, weight in zip(
                lost_RX.chunk(kv_heads, 1), weight_EX.chunk(kv_heads, 1), strict=True
            )
        ]
        self._moved[layer] += torch.stack(moved)
        self._whole[layer] += _squared(full_RX @ weight_EX.T)
        return full.transpose(0, 1)

    def scores(self) -> Tensor:
        # A layer whose attention adds nothing loses nothing.
        return (self._moved / self._whole.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def _squared(x: Tensor) -> Tensor:
    return x.square().sum(dtype=torch.float64).cpu()


def output_projections(model: PreTrainedModel, shape: ModelShape) -> list[Tensor]:
    """Return the weight of each layer's output projection, ``[E, H D]``, or raise `ModelError`."""
    found: dict[int, Tensor] = {}
    for module in model.base_model.modules():
        layer = getattr(module, "layer_idx", None)
        for name in _PROJECTIONS:
            projection = getattr(module, name, None)
            if isinstance(layer, int) and isinstance(projection, nn.Linear):
                found[layer] = projection.weight
    missing = sorted(set(range(shape.layers)) - set(found))
    if missing:
        raise ModelError(
            f"models of type {model.config.model_type!r} have no output projection by the name of "
            f"{', '.join(_PROJECTIONS)} in layer {missing[0]}, so heads cannot be compared"
        )
    return [found[layer] for layer in range(shape.layers)]
