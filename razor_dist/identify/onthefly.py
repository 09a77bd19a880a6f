"""DuoAttention's criterion without its training: what each KV head loses if it alone is cut.

A retrieval head is one that significantly alters the model's output when it sees the sinks and
the recent tokens only (papers/duoattention.txt, section 2.2). Training finds these heads jointly,
in hours. This is the first-order answer, in one forward pass a sample: every head runs in full,
and beside it, for every KV head, what its group's output would have been without the middle of
the context.

**The score** of KV head j of layer i is, over the tokens t of the recall (see `passkeys`)::

    || W_O,j (full_j - streaming_j) ||  /  || sum over all heads h of W_O,h full_h ||

where W_O,j are the columns of the output projection that the query heads of group j own: a
distance in the hidden state, where heads can be compared, relative to all that the layer's
attention adds there. Norms are over tokens and hidden dimensions, squares summed over samples.

What it cannot see: heads that stand in for one another, and what later layers make of a change.

Letters: H query heads, K key-value heads, G = H / K, T tokens, R recall tokens, D head dimension,
E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from razor_dist.config.errors import ModelError
from razor_dist.heads.decision import Scores, by_sparsity, published_sparsity, rounded
from razor_dist.heads.head_map import HeadMap
from razor_dist.identify.duo.attention import full_attention, streaming_attention
from razor_dist.identify.passkeys import PasskeySample
from razor_dist.identify.settings import OnTheFlySettings, PasskeySettings
from razor_dist.kernels.query import Query
from razor_dist.models.bridge import run_body
from razor_dist.models.loader import dtype_name
from razor_dist.models.shape import ModelShape

KIND: Final = "change"  # of score, in `HeadMap.kv_scores`

# The names that transformers' models give to an attention's output projection.
_PROJECTIONS: Final = ("o_proj", "dense", "out_proj", "wo")


@dataclass(frozen=True)
class ChangeContext:
    """An `AttentionContext` of full attention that measures what each KV head would lose.

    To ``moved``, float64 ``[layers, K]``, it adds the squared distance of each KV head, to
    ``whole``, float64 ``[layers, 1]``, the square of all that a layer's attention adds.
    """

    projections: list[Tensor]  # of `output_projections`
    recall: Tensor  # tokens to look at, int64 [R]
    sinks: int
    recent: int
    moved: Tensor
    whole: Tensor

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        q, scale = query.q.flatten(0, 1), query.scale
        full = full_attention(q, k, v, scale)
        cut = streaming_attention(q, k, v, scale, self.sinks, self.recent)
        kv_heads = k.shape[0]
        weight_EX = self.projections[layer].float()
        # The model's own reshape: query heads side by side, a group's next to each other.
        full_RX = full[:, self.recall].transpose(0, 1).flatten(1).float()
        lost_RX = full_RX - cut[:, self.recall].transpose(0, 1).flatten(1).float()
        moved = [
            _squared(lost @ weight.T)
            for lost, weight in zip(
                lost_RX.chunk(kv_heads, 1), weight_EX.chunk(kv_heads, 1), strict=True
            )
        ]
        self.moved[layer] += torch.stack(moved)
        self.whole[layer] += _squared(full_RX @ weight_EX.T)
        return full.transpose(0, 1)


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


def measure(
    model: PreTrainedModel,
    sample: Callable[[int], PasskeySample],
    settings: OnTheFlySettings,
    on_sample: Callable[[int], None] | None = None,
) -> Scores:
    """Score every KV head, ``[layers][KV heads]``, on the samples of `Passkeys.sample`."""
    shape = ModelShape.from_config(model.config)
    projections = output_projections(model, shape)
    moved = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.float64)
    whole = torch.zeros(shape.layers, 1, dtype=torch.float64)
    for index in range(settings.samples):
        one = sample(index)
        recall = one.mask.nonzero()[:, 0].to(model.device)
        cut = settings.sinks, settings.recent
        run_body(model, one.ids, ChangeContext(projections, recall, *cut, moved, whole))
        if on_sample is not None:
            on_sample(index)
    # A layer whose attention adds nothing loses nothing.
    return rounded((moved / whole.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().tolist())


def head_map(
    name: str,
    model: PreTrainedModel,
    scores: Scores,
    settings: OnTheFlySettings,
    passkeys: PasskeySettings,
) -> HeadMap:
    """Build the head map that the scores of `measure` decide, with all settings recorded."""
    sparsity = settings.sparsity
    if sparsity is None:
        sparsity = published_sparsity(ModelShape.from_config(model.config).group)
    used = {"sparsity": sparsity, "passkeys": asdict(passkeys), "dtype": dtype_name(model.dtype)}
    return HeadMap.of_model(
        name,
        model.config,
        method="onthefly",
        settings=asdict(settings) | used,
        retrieval=by_sparsity(scores, sparsity),
        kv_scores={KIND: scores},
    )
