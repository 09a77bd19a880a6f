"""Tiny random models of every supported family, for parity tests, and head maps of them.

Weights are drawn here, not by transformers' initialisers, so that they do not change with its
releases, and wide enough that attention is far from uniform: a test that passes because every
softmax is flat would prove nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from razor_dist.heads.decision import Flags
from razor_dist.heads.head_map import HeadMap
from razor_dist.models.loader import read_config

Tiny = Callable[[str], Path]  # the fixture ``tiny``

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}


def _rope(theta: float, kind: str = "default", **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **others}}


# Rotary embedding on half of the head dimension, interleaved; biases; a list of EOS tokens.
_GLM: dict[str, Any] = {
    "head_dim": 16,
    **_rope(1e4, partial_rotary_factor=0.5),
    "attention_bias": True,
    "eos_token_id": [2, 3],
}

# Class, layers, heads, KV heads, and what differs from `_COMMON` or is the family's own. Without
# head_dim, it follows from hidden_size.
_CONFIGS: dict[str, tuple[type[PretrainedConfig], int, int, int, dict[str, Any]]] = {
    "llama": (LlamaConfig, 4, 8, 2, {"head_dim": 16}),
    # The head dimension of the large models, and groups of eight.
    "llama_wide": (LlamaConfig, 3, 16, 2, {"head_dim": 128}),
    # As many KV heads as query heads.
    "llama2": (LlamaConfig, 3, 4, 4, {}),
    # Rotary frequencies scaled by wavelength: tests of more than 64 tokens are beyond the original
    # context. Input and output embeddings are one, as in Llama 3.2. All linear layers but the head
    # have biases.
    "llama3": (LlamaConfig, 3, 8, 2, {
        "head_dim": 16,
        **_rope(5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=64),
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "eos_token_id": [2, 3],
    }),
    # Biases on queries, keys and values.
    "qwen2": (Qwen2Config, 3, 4, 2, {"use_sliding_window": False}),
    # Groups of seven; a sliding window that no layer uses; dual chunk attention, which is ordinary
    # attention for as long as a text is one chunk.
    "qwen2_1m": (Qwen2Config, 3, 14, 2, {
        "hidden_size": 112,
        "max_position_embeddings": 16384,
        **_rope(1e7),
        "sliding_window": 512,
        "use_sliding_window": False,
        "dual_chunk_attention_config": {
            "chunk_size": 4096,
            "local_size": 128,
            "original_max_position_embeddings": 4096,
        },
    }),
    # Queries and keys are normed before they are rotated.
    "qwen3": (Qwen3Config, 3, 8, 2, {"head_dim": 16, **_rope(1e6)}),
    # As Qwen3-30B-A3B-2507: groups of eight, small experts of which a token has several, whose
    # weights are normed. The last layer's MLP is dense, as the architecture allows.
    "qwen3_moe": (Qwen3MoeConfig, 3, 16, 2, {
        "head_dim": 16,
        **_rope(1e7),
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
    }),
    "mistral": (MistralConfig, 3, 8, 4, {"head_dim": 16, "sliding_window": None}),
    "mixtral": (MixtralConfig, 3, 8, 2, {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }),
    # LongRoPE with its limit at 96 tokens, on three quarters of a head (as Phi-4-mini's); queries,
    # keys and values in one matrix; a sliding window that is longer than the context.
    "phi3": (Phi3Config, 3, 4, 2, {
        **_rope(1e4, "longrope", short_factor=[1.0, 1.0, 1.0, 1.1, 1.2, 1.3],
                long_factor=[1.1, 1.5, 2.0, 4.0, 16.0, 40.0]),
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 96,
        "sliding_window": 8192,
    }),
    "glm": (GlmConfig, 3, 8, 2, _GLM),
    # As glm-4-9b-chat-1m, whose KV heads and base set it apart from the 128K model.
    "glm_1m": (GlmConfig, 3, 8, 4, {**_GLM, **_rope(1e8, partial_rotary_factor=0.5)}),
    # GLM with norms behind attention and MLP as well.
    "glm4": (Glm4Config, 3, 8, 2, _GLM),
    # As Command R+: each head has weights of its own to norm its queries and keys by.
    "cohere": (CohereConfig, 3, 4, 2, {"logit_scale": 1.0, "use_qk_norm": True}),
    # Learned positions, which are added to the embeddings; queries, keys and values in one matrix.
    "gpt2": (GPT2Config, 3, 4, 4, {}),
    # The same, from the third row of its table on.
    "opt": (OPTConfig, 3, 4, 4, {}),
}  # fmt: skip
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
    kind, layers, heads, kv_heads, differences = _CONFIGS[family]
    config = kind(
        **{**_COMMON, **copy.deepcopy(differences)},  # transformers writes into rope_parameters
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    return write_random(config, path, seed=seed)


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


def save_head_map(model: Path, retrieval: Flags, path: Path, **fields: Any) -> Path:
    """Write a head map of the model in a folder to ``path``, and return that."""
    fields = {"method": "razor", "settings": {}, "retrieval": retrieval, **fields}
    HeadMap.of_model("tiny", read_config(model), **fields).save(path)
    return path


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if "q_norm" in name or "k_norm" in name:
        return 1.6 + 0.1 * noise  # what the projections below give where nothing norms them
    if "norm" in name or "ln_" in name:
        return 1.0 + 0.1 * noise
    if "embed_tokens" in name or "wte" in name:
        return noise
    # Normed inputs have norm sqrt(hidden) = 8, so 0.2 gives queries and keys of 1.6 per
    # coordinate and scores of standard deviation 2.5: peaked, not one-hot.
    return 0.2 * noise
