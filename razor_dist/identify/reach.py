"""Reach: how far back a head looks by position alone, in a few passes over ordinary text.

kvpress's "Duo on the fly" (NVIDIA/kvpress, ``duo_attention_press.py``): the mean query and the mean
key of a head over a text, before rotary embeddings, represent all of its tokens. With the mean key
at each of ``length`` positions, the mean query at the last one gives weights w_0 .. w_{L-1} that
depend on distance alone. **The score** is the area under the cumulated weights::

    mean over t of (w_0 + ... + w_t)  =  sum over distances d of w(d) (d + 1) / L

the mean distance that the head looks back, as a fraction of L: 1/L if it sees itself only, about
1/2 if position does not matter, 1 if it looks at the farthest position. A KV head's score is the
mean over its query heads and all texts.

**Limits.** It finds heads that are local by position. It does not tell whether another head looks
at all tokens alike, at the first ones, or by content: all of these score about 1/2.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.identify.criterion import Criterion, Sample
from razor_dist.identify.prose import Prose
from razor_dist.identify.settings import ReachSettings
from razor_dist.models.dual_chunk import check_one_chunk
from razor_dist.models.longrope import position_mark
from razor_dist.models.shape import ModelShape

if TYPE_CHECKING:
    from razor_dist.kernels.query import Query

KIND: Final = "reach"  # of score, in `HeadMap.kv_scores`

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From q ``[1, H, T, D]``, k, cosines and sines ``[1, T, R]`` to rotated q and k."""


class Reach(Criterion):
    """Sums, over texts, the reach of mean queries to mean keys."""

    def __init__(self, model: PreTrainedModel, settings: ReachSettings) -> None:
        shape = ModelShape.from_config(model.config)
        self._body: Any = model.base_model
        self._rotate = _rotary_function(model)
        self._turned = getattr(model.config, "no_rope_layers", None) or [1] * shape.layers
        self._length = settings.length
        self._reach = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.float64)
        self._texts = 0

    def begin(self, sample: Sample) -> None:
        super().begin(sample)
        check_one_chunk(self._body, max(len(sample.ids), self._length))
        self._texts += 1
        self._turns = self._turns_of(len(sample.ids))
        self._places = self._turns_of(self._length)

    def _turns_of(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first ``tokens`` positions, scaled for the sample's length."""
        mark = position_mark(self._body, len(self.sample.ids))
        device = self._body.device
        positions = torch.arange(tokens, device=device) + mark
        cos, sin = self._body.rotary_emb(torch.zeros(1, device=device), positions[None])
        return cos, sin

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        out, _ = query.attend(k, v, causal=True)
        turns, places = self._turns, self._places
        if not self._turned[layer]:  # a layer without rotary embeddings (SmolLM3)
            turns, places = _no_turns(*turns), _no_turns(*places)
        cos, sin = turns
        # Undo the rotation: rotate by the negative angle, then divide by the square of the
        # embeddings' scale, which is the cosine at position 0.
        q_1HTD, k_1KTD = query.q.flatten(0, 1)[None].float(), k[None].float()
        q_1HTD, k_1KTD = self._rotate(q_1HTD, k_1KTD, cos, -sin)
        scale = cos[0, 0, 0].square()
        q_mean, k_mean = (x.mean(2, keepdim=True) / scale for x in (q_1HTD, k_1KTD))
        every = (1, 1, self._length, 1)
        q_1HLD, k_1KLD = self._rotate(q_mean.repeat(every), k_mean.repeat(every), *places)
        q_KGD = q_1HLD[0, :, -1].unflatten(0, (len(k), -1))
        weights_KGL = (q_KGD @ k_1KLD[0].transpose(-1, -2) * query.scale).softmax(-1)
        self._reach[layer] += weights_KGL.double().cumsum(-1).mean((1, 2)).cpu()
        return out.to(query.q.dtype).flatten(0, 1).transpose(0, 1)

    def scores(self) -> Tensor:
        return self._reach / self._texts


def _no_turns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(cos), torch.zeros_like(sin)


def _rotated(
    rotate: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate as many leading dimensions as there are angles; partial rotary leaves the rest."""
    width = cos.shape[-1]
    turned = rotate(q[..., :width], k[..., :width], cos, sin)
    q, k = (torch.cat([x, of[..., width:]], -1) for x, of in zip(turned, (q, k), strict=True))
    return q, k


def _rotary_function(model: PreTrainedModel) -> Rotate:
    """Find the function by which a model's layers rotate queries and keys, or `ModelError`."""
    if any(hasattr(module, "query_layernorm") for module in model.base_model.modules()):
        raise ModelError(  # HunYuan's
            f"models of type {model.config.model_type!r} normalise queries and keys behind their "
            "rotation, which cannot be turned back then; use another method"
        )
    for module in model.base_model.modules():
        if hasattr(module, "layer_idx"):
            found = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
            if found is not None and getattr(model.base_model, "rotary_emb", None) is not None:
                return partial(_rotated, found)
    raise ModelError(
        f"models of type {model.config.model_type!r} have no rotary embeddings of transformers' "
        "form, so their queries and keys cannot be separated from their positions; use another "
        "method"
    )


def texts(
    prose: Prose, settings: ReachSettings, shape: ModelShape, start: Sequence[int] = ()
) -> Iterator[Sample]:
    """Make the samples: ``start`` and a text; raise `ConfigError` if it is beyond the context."""
    if settings.tokens + len(start) > shape.max_positions:
        raise ConfigError(
            f"tokens is {settings.tokens}, but the context of {shape.max_positions} positions "
            f"holds texts of up to {shape.max_positions - len(start)}"
        )

    def sample(index: int) -> Sample:
        parts = prose.take(settings.tokens, random.Random(f"{settings.seed}:{index}"))
        ids = torch.tensor([*start, *(token for part in parts for token in part)])
        return Sample(ids, torch.ones(len(ids), dtype=torch.bool))

    return map(sample, range(settings.samples))
