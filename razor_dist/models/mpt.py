"""MPT: transformers' model, its attention replaced."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import MptForCausalLM, MptModel, MptPreTrainedModel, PretrainedConfig
from transformers.models.mpt.modeling_mpt import MptAttention

from razor_dist.models.alibi import Biased, CausalLM, LayerWeights, packed


@strict
class MptConfig(transformers.MptConfig):
    """transformers' class, which refuses StoryWriter's ``"clip_qkv": 6`` as an integer.

    It has the same name because `AutoModelForCausalLM` finds models by it.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.attn_config, dict):
            numbers = {name: self.attn_config.get(name) for name in ("clip_qkv", "softmax_scale")}
            floats = {name: float(value) for name, value in numbers.items() if value is not None}
            self.attn_config = {**self.attn_config, **floats}
        super().__post_init__(**kwargs)


class _Attention(MptAttention):
    """MPT's layers pass ``position_bias`` on unchanged; here it computes attention."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_bias: Biased, **unused: Any
    ) -> tuple[Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = mixed[0].unflatten(-1, (3, self.n_heads, -1)).permute(1, 2, 0, 3)
        assert self.layer_idx is not None and self.softmax_scale is not None
        out = position_bias.attend(self.layer_idx, q, k, v, self.softmax_scale)
        return self.out_proj(out), None


class _Body(MptModel):
    def __init__(self, config: MptConfig) -> None:
        super().__init__(config)
        block: Any
        for index, block in enumerate(self.blocks):
            block.attn = _Attention(config, index)

    def forward(self, input_ids: Tensor, biased: Biased) -> Tensor:
        hidden: Tensor = self.wte(input_ids)
        for block in self.blocks:
            hidden, _ = block(hidden, position_bias=biased, attention_mask=None)
        out: Tensor = self.norm_f(hidden)
        return out


class Model(CausalLM, MptForCausalLM):
    def __init__(self, config: MptConfig) -> None:
        MptPreTrainedModel.__init__(self, config)
        self.transformer = _Body(config)
        self.lm_head = torch.nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def reason(config: PretrainedConfig) -> str | None:
        """The reason why an MPT cannot be served, as the end of a sentence; None if it can.

        transformers' class ignores these fields, and computes what the model was not trained for.
        """
        c: Any = config
        a = c.attn_config
        wanted: dict[str, tuple[object, object]] = {
            "attn_config.alibi": (a.alibi, True),
            "attn_config.attn_type": (a.attn_type, "multihead_attention"),
            "attn_config.prefix_lm": (a.prefix_lm, False),
            "attn_config.qk_ln": (a.qk_ln, False),
            "attn_config.attn_uses_sequence_id": (a.attn_uses_sequence_id, False),
            "no_bias": (c.no_bias, True),
            "expansion_ratio": (c.expansion_ratio, 4),
            "logit_scale": (c.logit_scale, None),
        }
        for name, (value, supported) in wanted.items():
            if value != supported:
                return f"{name} is {value!r}, and only {supported!r} is supported"
        return None

    @staticmethod
    def slopes_of(config: Any) -> list[float]:
        """Slopes by head, as in MPT's own code.

        If the number of heads is not a power of two they are the slopes for the power above, every
        second one first. ``alibi_bias_max`` is 16 in MPT-7B-StoryWriter; transformers' class
        ignores it and takes 8.
        """
        heads: int = config.n_heads
        power: int = 2 ** math.ceil(math.log2(heads))
        most = config.attn_config.alibi_bias_max
        slopes = [2.0 ** (-most * k / power) for k in range(1, power + 1)]
        return slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads]

    def layer_weights(self, layer: int) -> LayerWeights:
        block: Any = self.transformer.blocks[layer]
        query, key = packed(block.attn.Wqkv.weight, block.attn.n_heads)
        gain = block.norm_1.weight
        clip = block.attn.clip_qkv or None
        shift = torch.zeros_like(gain)
        return LayerWeights(query, None, key, gain, shift, block.attn.softmax_scale, clip)
