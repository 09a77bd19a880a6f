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
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

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


def _glm() -> PretrainedConfig:
    # Rotary embedding on half of the head dimension, interleaved; biases; a list of EOS tokens.
    return GlmConfig(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        attention_bias=True,
        eos_token_id=[2, 3],
    )


_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "mistral": _mistral,
    "glm": _glm,
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
    config = _CONFIGS[family]()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))
    model.save_pretrained(path)
    return Path(path)


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    # Normed inputs have norm sqrt(hidden) = 8, so 0.2 gives queries and keys of 1.6 per
    # coordinate and scores of standard deviation 2.5: peaked, not one-hot.
    return 0.2 * noise
