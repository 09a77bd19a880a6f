"""The common part of adapters for models biased by distance (ALiBi).

BLOOM and MPT bypass transformers' attention interface, and Baichuan is not in transformers at all.
Each has a small adapter (`bloom`, `mpt`, `baichuan`): a model class whose attention is the call's
`AttentionContext`, which gets the slopes. No tensor as wide as the context is ever built.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from razor_dist.kernels.query import Query
from razor_dist.models.bridge import AttentionContext


class LayerWeights(NamedTuple):
    """The weights behind a layer's scores, for `razor_dist.identify.scope`.

    With ``z`` the normalised hidden state, the attention's input is ``x = gain * z + shift``, and
    its scores are ``scale * (query x + query_bias) . (key x + ...) - slope * distance``. The keys'
    bias is left out, since it adds the same to every score of a query.
    """

    query: Tensor  # [H, D, E]
    query_bias: Tensor | None  # [H, D]
    key: Tensor  # [K, D, E]
    gain: Tensor  # [E], of the norm before attention, as is shift
    shift: Tensor  # 0 if the norm has none
    scale: float
    clip: float | None = None  # bound on the coordinates of queries and keys


class AlibiModel(Protocol):
    """The methods of a model with an adapter beside those of transformers' models."""

    config: Any

    @property
    def dtype(self) -> torch.dtype: ...

    def slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slopes by head, float32 ``[H]``, the same in every layer."""

    def layer_weights(self, layer: int) -> LayerWeights: ...


class Biased(NamedTuple):
    """A model passes this to its layers in place of transformers' ALiBi tensor."""

    context: AttentionContext
    slopes: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """A layer's attention ``[1, T, H * D]`` from ``q``, ``k`` and ``v`` ``[H, T, D]``."""
        out = self.context.attend(layer, Query.grouped(q, scale, self.slopes, k.shape[0]), k, v)
        return out.flatten(1).unsqueeze(0)


class CausalLM:
    """The forward of a causal language model with an adapter; a mixin before its other bases."""

    lm_head: torch.nn.Module
    _slopes: Tensor | None = None
    # Attention goes to the call's context: `razor_dist.models.support.check_class`.
    _supports_attention_backend = True

    def slopes(self: Any, device: torch.device) -> Tensor:
        # Made when first needed: while weights load, a model's buffers are on no device.
        if self._slopes is None or self._slopes.device != device:
            self._slopes = torch.tensor(
                self.slopes_of(self.config), dtype=torch.float32, device=device
            )
        slopes: Tensor = self._slopes
        return slopes

    def forward(
        self: Any,
        input_ids: Tensor,
        *,
        attention_context: AttentionContext,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutput:
        """Logits of one sequence's tokens ``input_ids``, int64 ``[1, T]``.

        ``logits_to_keep`` are the indices of the tokens whose logits are wanted, or their number at
        the end; 0 means all. ``position_ids`` and ``use_cache`` are accepted as by every model and
        ignored: the context has positions and cache.
        """
        hidden = self.base_model(
            input_ids=input_ids, biased=Biased(attention_context, self.slopes(input_ids.device))
        )
        keep = logits_to_keep
        rows = slice(-keep, None) if isinstance(keep, int) else keep
        return CausalLMOutput(logits=self.lm_head(hidden[:, rows]))


def press_slopes(heads: int) -> list[float]:
    """Slopes by head, as in ALiBi's paper (arXiv 2108.12409, section 3) and code.

    For a power of two n they are ``2 ** (-8 k / n)``, k = 1..n. Otherwise they are the slopes for
    the power of two below, then every other slope for the power of two above.
    """
    power: int = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * k / power) for k in range(1, power + 1)]
    between = [2.0 ** (-8 * k / (2 * power)) for k in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


def packed(weight: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Weights of queries and keys, ``[H, D, E]``, from a projection ``[3 H D, E]`` to q, k, v."""
    query, key, _ = weight.unflatten(0, (3, heads, -1))
    return query, key
