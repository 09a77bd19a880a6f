"""Tiny random models of every supported family, for parity tests.

Weights are drawn here, not by transformers' initialisers, so that they do not change with its
releases, and wide enough that attention is far from uniform: a test that passes because every
softmax is flat would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

Tiny = Callable[[str], Path]  # the fixture ``tiny``

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": 0,
    "use_cache": False,
}


def _llama() -> PretrainedConfig:
    return LlamaConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=2,
    )


def _llama_wide() -> PretrainedConfig:
    # The head dimension of the large models, and groups of eight.
    return LlamaConfig(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        eos_token_id=2,
    )


def _llama2() -> PretrainedConfig:
    # As many KV heads as query heads; head_dim follows from hidden_size.
    return LlamaConfig(**_COMMON, num_hidden_layers=3, num_attention_heads=4, eos_token_id=2)


def _llama3() -> PretrainedConfig:
    # Rotary frequencies scaled by wavelength: tests of more than 64 tokens are beyond the original
    # context. Input and output embeddings are one, as in Llama 3.2. All linear layers but the head
    # have biases.
    return LlamaConfig(
        **{**_COMMON, "tie_word_embeddings": True},
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        attention_bias=True,
        mlp_bias=True,
        eos_token_id=[2, 3],
    )


def _qwen2() -> PretrainedConfig:
    # Biases on queries, keys and values; head_dim follows from hidden_size.
    return Qwen2Config(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=False,
        eos_token_id=2,
    )


def _qwen2_1m() -> PretrainedConfig:
    # Groups of seven; a sliding window that no layer uses; dual chunk attention, which is ordinary
    # attention for as long as a text is one chunk.
    return Qwen2Config(
        **{**_COMMON, "hidden_size": 112, "max_position_embeddings": 16384},
        num_hidden_layers=3,
        num_attention_heads=14,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        sliding_window=512,
        use_sliding_window=False,
        dual_chunk_attention_config={
            "chunk_size": 4096,
            "local_size": 128,
            "original_max_position_embeddings": 4096,
        },
        eos_token_id=2,
    )


def _qwen3() -> PretrainedConfig:
    # Queries and keys are normed before they are rotated.
    return Qwen3Config(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=2,
    )


def _qwen3_moe() -> PretrainedConfig:
    # As Qwen3-30B-A3B-2507: groups of eight, small experts of which a token has several, whose
    # weights are normed. The last layer's MLP is dense, as the architecture allows.
    return Qwen3MoeConfig(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[2],
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        eos_token_id=2,
    )


def _mistral() -> PretrainedConfig:
    return MistralConfig(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        sliding_window=None,
        eos_token_id=2,
    )


def _mixtral() -> PretrainedConfig:
    return MixtralConfig(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        eos_token_id=2,
    )


def _phi3() -> PretrainedConfig:
    # LongRoPE with its limit at 96 tokens, on three quarters of a head (as Phi-4-mini's); queries,
    # keys and values in one matrix; a sliding window that is longer than the context.
    return Phi3Config(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        original_max_position_embeddings=96,
        partial_rotary_factor=0.75,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.0, 1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.1, 1.5, 2.0, 4.0, 16.0, 40.0],
        },
        sliding_window=8192,
        eos_token_id=2,
    )


def _glm(
    kind: type[GlmConfig | Glm4Config] = GlmConfig, *, kv_heads: int = 2, base: float = 1e4
) -> PretrainedConfig:
    # Rotary embedding on half of the head dimension, interleaved; biases; a list of EOS tokens.
    return kind(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": base,
            "partial_rotary_factor": 0.5,
        },
        attention_bias=True,
        eos_token_id=[2, 3],
    )


def _glm_1m() -> PretrainedConfig:
    # As glm-4-9b-chat-1m, whose KV heads and base set it apart from the 128K model.
    return _glm(kv_heads=4, base=1e8)


def _glm4() -> PretrainedConfig:
    # GLM with norms behind attention and MLP as well.
    return _glm(Glm4Config)


_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "llama_wide": _llama_wide,
    "llama2": _llama2,
    "llama3": _llama3,
    "qwen2": _qwen2,
    "qwen2_1m": _qwen2_1m,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "glm": _glm,
    "glm_1m": _glm_1m,
    "glm4": _glm4,
}
FAMILIES = tuple(_CONFIGS)


def make_tiny(family: str, path: str | Path, *, seed: int = 0) -> Path:
    """Write a random model of ``family`` to ``path`` as float32 safetensors, without tokenizer.

    Parameters
    ----------
    family : str
        One of `FAMILIES`.
    path : str or Path
        Folder to write; made if missing.
    seed : int
        Of the weights.

    Returns
    -------
    Path
        ``path``.
    """
    return write_random(_CONFIGS[family](), path, seed=seed)


def write_random(config: PretrainedConfig, path: str | Path, *, seed: int = 0) -> Path:
    """The same of any configuration."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))
    model.save_pretrained(path)
    return Path(path)


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if "q_norm" in name or "k_norm" in name:
        return 1.6 + 0.1 * noise  # what the projections below give where nothing norms them
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    # Normed inputs have norm sqrt(hidden) = 8, so 0.2 gives queries and keys of 1.6 per
    # coordinate and scores of standard deviation 2.5: peaked, not one-hot.
    return 0.2 * noise
