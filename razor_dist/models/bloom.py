"""BLOOM: transformers' model, its attention replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    BloomModel,
    BloomPreTrainedModel,
    PretrainedConfig,
)
from transformers.models.bloom.modeling_bloom import BloomAttention

from razor_dist.models.alibi import Biased, CausalLM, LayerWeights, press_slopes


class _Attention(BloomAttention):
    """BLOOM's layers pass ``alibi`` on unchanged; here it is no tensor but computes attention."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, residual: Tensor, alibi: Biased, **unused: Any
    ) -> tuple[Tensor, None]:
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        assert self.layer_idx is not None
        out = alibi.attend(self.layer_idx, q[0], k[0], v[0], self.inv_norm_factor)
        return self.dense(out) + residual, None


class _Body(BloomModel):
    def __init__(self, config: BloomConfig) -> None:
        super().__init__(config)
        block: Any
        for index, block in enumerate(self.h):
            block.self_attention = _Attention(config, index)

    def forward(self, input_ids: Tensor, biased: Biased) -> Tensor:
        hidden: Tensor = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        for block in self.h:
            hidden, _ = block(hidden, alibi=biased, attention_mask=None)
        out: Tensor = self.ln_f(hidden)
        return out


class Model(CausalLM, BloomForCausalLM):
    def __init__(self, config: BloomConfig) -> None:
        BloomPreTrainedModel.__init__(self, config)
        self.transformer = _Body(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def reason(config: PretrainedConfig) -> str | None:
        c: Any = config
        if c.slow_but_exact and c.pretraining_tp > 1:
            return "slow_but_exact sums its projections in slices; set it to false in config.json"
        return None

    @staticmethod
    def slopes_of(config: BloomConfig) -> list[float]:
        return press_slopes(config.n_head)

    def layer_weights(self, layer: int) -> LayerWeights:
        block: Any = self.transformer.h[layer]
        attention, norm = block.self_attention, block.input_layernorm
        heads = attention.num_heads
        weight = attention.query_key_value.weight.unflatten(0, (heads, 3, -1))
        bias = attention.query_key_value.bias.unflatten(0, (heads, 3, -1))
        scale = attention.inv_norm_factor
        return LayerWeights(weight[:, 0], bias[:, 0], weight[:, 1], norm.weight, norm.bias, scale)
