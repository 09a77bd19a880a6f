"""Baichuan with ALiBi (Baichuan-13B, Baichuan2-13B), which transformers does not have.

A Llama-like decoder with RMSNorm and a gated MLP. Queries, keys and values come from one packed
projection, ``W_pack``. Baichuan 2 normalises the rows of its output projection: a token's logit
does not depend on the length of its row (arXiv 2309.10305, section 3.2.2).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm

from razor_dist.models.alibi import Biased, CausalLM, LayerWeights, packed, press_slopes

# Sizes that tell the kinds of Baichuan apart: they share a model type, and no field names the kind.
_ROTARY_HIDDEN_SIZE = 4096
_VOCAB_1, _VOCAB_2 = 64000, 125696


@strict
class BaichuanConfig(PretrainedConfig):
    """Fields of a Baichuan's ``config.json``; the defaults are Baichuan2-13B's."""

    model_type = "baichuan"
    attribute_map: ClassVar[dict[str, str]] = {"max_position_embeddings": "model_max_length"}

    vocab_size: int = _VOCAB_2
    hidden_size: int = 5120
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_attention_heads: int = 40
    hidden_act: str = "silu"
    model_max_length: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    # Of training; in Baichuan 2's files only.
    z_loss_weight: float | int | None = None

    @property
    def normalised_head(self) -> bool:
        """True if the rows of the output projection are normalised."""
        return self.z_loss_weight is not None or self.vocab_size == _VOCAB_2


class _Attention(nn.Module):
    def __init__(self, config: BaichuanConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads, self.layer = config.num_attention_heads, layer
        self.scale = (size // self.heads) ** -0.5
        self.W_pack = nn.Linear(size, 3 * size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, hidden: Tensor, biased: Biased) -> Tensor:
        q, k, v = self.W_pack(hidden)[0].unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        out: Tensor = self.o_proj(biased.attend(self.layer, q, k, v, self.scale))
        return out


class _Layer(nn.Module):
    def __init__(self, config: BaichuanConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index)
        self.mlp: nn.Module = MistralMLP(config)
        self.input_layernorm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, biased: Biased) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), biased)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class _PreTrained(PreTrainedModel):
    config_class = BaichuanConfig
    base_model_prefix = "model"


class _Body(_PreTrained):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids: Tensor, biased: Biased) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, biased)
        out: Tensor = self.norm(hidden)
        return out


class _Head(nn.Linear):
    """The output projection; normalised in Baichuan 2, whose logits are float32."""

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.normalised = config.normalised_head
        self._norms: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        if not self.normalised:
            return logits
        # The rows' norms rather than a normalised copy: the weights stay shared by a host's ranks.
        if self._norms is None or self._norms.device != hidden.device:
            norms = torch.linalg.vector_norm(self.weight, dim=1, dtype=torch.float32)
            self._norms = norms.clamp(min=1e-12)
        return logits.float() / self._norms


class Model(CausalLM, _PreTrained):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = _Body(config)
        self.lm_head = _Head(config)
        self.post_init()

    @staticmethod
    def reason(config: PretrainedConfig) -> str | None:
        c: Any = config
        if c.hidden_size == _ROTARY_HIDDEN_SIZE:
            return "Baichuan-7B has rotary embeddings in its own layout; Baichuan-13B is supported"
        if not c.normalised_head and c.vocab_size != _VOCAB_1:
            return (
                "it is not clear whether its output projection is normalised: Baichuan 2 has "
                f"z_loss_weight in its config.json, Baichuan 1 a vocabulary of {_VOCAB_1}"
            )
        if c.tie_word_embeddings:
            return "its embeddings are tied (tie_word_embeddings)"
        if c.hidden_size % c.num_attention_heads:
            return f"hidden_size {c.hidden_size} is not a multiple of {c.num_attention_heads} heads"
        return None

    @staticmethod
    def slopes_of(config: PretrainedConfig) -> list[float]:
        return press_slopes(config.num_attention_heads)

    def layer_weights(self, layer: int) -> LayerWeights:
        block: Any = self.model.layers[layer]
        attention, gain = block.self_attn, block.input_layernorm.weight
        query, key = packed(attention.W_pack.weight, attention.heads)
        return LayerWeights(query, None, key, gain, torch.zeros_like(gain), attention.scale)
