"""Models whose attention cannot be honoured are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from razor_dist.errors import ModelError
from razor_dist.models.alibi import register_configs
from razor_dist.models.support import check_supported, without_idle_window

register_configs()

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"max_position_embeddings": 32768, "sliding_window": 4096}, "4096 tokens"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 8}, "sliding window of 4096"),
    ("phi3", {"max_position_embeddings": 4096, "sliding_window": 2047}, "window of 2047"),
    ("gemma2", {}, "soft-capped"),
    ("gemma3_text", {}, "sliding window"),
    ("gpt_oss", {}, "learned sinks"),
    ("deepseek_v3", {}, "latent attention"),
    ("falcon", {}, "FalconForCausalLM does not use"),
    ("falcon", {"alibi": True}, "biased by distance .* as is known for BLOOM, MPT, Baichuan"),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi is False"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm is True"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln is True"),
    ("mpt", {"no_bias": False}, "no_bias is False, and only True"),
    ("baichuan", {"hidden_size": 4096}, "those of 7B have rotary embeddings"),
    ("baichuan", {"vocab_size": 1000}, "not clear whether its output projection is normalised"),
    ("t5", {}, "encoder-decoder"),
    ("bert", {}, "bidirectional"),
    ("lfm2", {"full_attn_idxs": [2]}, "layers of type conv"),
    ("minimax", {}, "layers of type linear_attention"),
    ("llava", {}, "multi-modal"),
    ("vit", {}, "no causal language model"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type dynamic",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), REFUSED, ids=lambda value: str(value)[:24])
def test_refused(kind: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_supported(AutoConfig.for_model(kind, **fields))


@pytest.mark.parametrize(
    "kind",
    ["llama", "qwen2", "qwen3", "glm", "glm4", "phi", "gpt_neox", "bloom", "mpt", "baichuan"],
)
def test_supported(kind: str) -> None:
    check_supported(AutoConfig.for_model(kind))


def test_window_of_no_layer_is_left_alone() -> None:
    # Qwen2-MoE says 0 where no layer slides, and its mask code needs a number.
    config = AutoConfig.for_model("qwen2_moe")
    check_supported(config)
    assert without_idle_window(config).sliding_window == 0


def test_window_that_cannot_be_turned_off() -> None:
    with pytest.raises(ModelError, match="'moshi' cannot be served: their sliding window"):
        without_idle_window(AutoConfig.for_model("moshi"))


def test_window_longer_than_the_context_is_dropped() -> None:
    config = AutoConfig.for_model("mistral", max_position_embeddings=2048, sliding_window=4096)
    check_supported(config)
    assert without_idle_window(config).sliding_window is None
