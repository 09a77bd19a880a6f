"""Tiny random ALiBi models, and what they compute written out from their files.

`literal_alibi` reads the safetensors by name and shares no code with the package, nor with
transformers: it is the reference for Baichuan, which transformers does not have, for MPT's
settings that transformers' class ignores, and for streaming heads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu
from transformers import AutoModelForCausalLM, BloomConfig, MptConfig, PretrainedConfig

from tests.literal import literal_head

FAMILIES = ("bloom", "bloom6", "mpt", "mpt6", "baichuan")
"""Six heads are no power of two; ``mpt6`` clips and scales as well."""

LAYERS, HIDDEN, VOCABULARY = 3, 48, 192


def make_alibi(family: str, path: Path, *, seed: int = 0, wide: float = 0.25) -> Path:
    """Write a random model of one of `FAMILIES`; ``wide`` scales its projections."""
    generator = torch.Generator().manual_seed(seed)
    if family == "baichuan":
        return _make_baichuan(path, generator, wide)
    model = AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise, wide))
    model.save_pretrained(path)
    return path


def _scaled(name: str, noise: Tensor, wide: float) -> Tensor:
    norm = any(part in name for part in ("norm", "ln_f"))
    if norm and name.endswith("weight"):
        return 1.0 + 0.1 * noise
    if "embed" in name or "wte" in name:
        return noise
    return (0.1 if name.endswith("bias") else wide) * noise


def _config(family: str) -> PretrainedConfig:
    if family.startswith("bloom"):
        return BloomConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            n_layer=LAYERS,
            n_head=6 if family == "bloom6" else 8,
            seq_length=4096,
        )
    odd: dict[str, Any] = {"clip_qkv": 1.5, "softmax_scale": 0.5} if family == "mpt6" else {}
    return MptConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        n_layers=LAYERS,
        n_heads=6 if family == "mpt6" else 8,
        max_seq_len=4096,
        attn_config={"alibi": True, **odd},
    )


def _make_baichuan(path: Path, generator: torch.Generator, wide: float) -> Path:
    """The layout of Baichuan2-13B's folder: its config.json, its weights' names."""
    inner = 96
    config = {
        "architectures": ["BaichuanForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_baichuan.BaichuanConfig",
            "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
        },
        "model_type": "baichuan",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "initializer_range": 0.02,
        "model_max_length": 4096,
        "num_attention_heads": 6,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.29.2",
        "use_cache": True,
        "vocab_size": VOCABULARY,
        "z_loss_weight": 0,
    }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}.self_attn.W_pack.weight"] = (3 * HIDDEN, HIDDEN)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (inner, HIDDEN)
        shapes[f"{layer}.mlp.up_proj.weight"] = (inner, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, inner)
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    weights = {
        name: _scaled(name, torch.randn(shape, generator=generator), wide)
        for name, shape in shapes.items()
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def literal_slopes(kind: str, heads: int, most: float = 8.0) -> list[float]:
    """Slopes by head: MPT's, or the paper's for the others."""
    power = 2 ** math.ceil(math.log2(heads))
    if kind == "mpt":
        every = [2 ** (-most * (k + 1) / power) for k in range(power)]
        return every if power == heads else (every[1::2] + every[0::2])[:heads]
    if power == heads:
        return [2 ** (-8 * (k + 1) / heads) for k in range(heads)]
    half = power // 2
    return literal_slopes(kind, half) + literal_slopes(kind, power)[0::2][: heads - half]


Local = list[list[dict[str, Any] | None]]
"""By layer and head, a streaming head's settings (see `literal.literal_head`); None reads all."""


def literal_alibi(folder: Path, tokens: list[int], local: Local | None = None) -> Tensor:
    """float64 ``[N, V]``: logits of every position."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}
    kind = config["model_type"]
    run = {"bloom": _bloom, "mpt": _mpt, "baichuan": _baichuan}[kind]
    return run(config, weights, torch.tensor(tokens), local)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slopes: list[float], streaming: list[Any] | None
) -> Tensor:
    """``[N, H D]`` from ``[N, H, D]`` each."""
    n, heads, _ = q.shape
    everything = {"sinks": 0, "block": 1, "window_ratio": None, "window_min": n, "window_max": None}
    out = torch.empty_like(q)
    for h in range(heads):
        own = (streaming[h] if streaming else None) or everything
        out[:, h] = literal_head(q[:, h], k[:, h], v[:, h], scale, own, slopes[h])
    return out.flatten(1)


def _bloom(c: dict[str, Any], w: dict[str, Tensor], ids: Tensor, local: Local | None) -> Tensor:
    heads, eps = c["n_head"], c["layer_norm_epsilon"]

    def norm(x: Tensor, name: str) -> Tensor:
        name = f"transformer.{name}"
        return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def project(x: Tensor, name: str) -> Tensor:
        name = f"transformer.{name}"
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    embedding = w["transformer.word_embeddings.weight"]
    x = norm(embedding[ids], "word_embeddings_layernorm")
    for i in range(c["n_layer"]):
        h = f"h.{i}"
        mixed = project(norm(x, f"{h}.input_layernorm"), f"{h}.self_attention.query_key_value")
        q, k, v = mixed.unflatten(-1, (heads, 3, -1)).unbind(2)
        slopes = literal_slopes("bloom", heads)
        own = local[i] if local else None
        seen = _attention(q, k, v, q.shape[-1] ** -0.5, slopes, own)
        x = x + project(seen, f"{h}.self_attention.dense")
        inner = project(norm(x, f"{h}.post_attention_layernorm"), f"{h}.mlp.dense_h_to_4h")
        x = x + project(gelu(inner, approximate="tanh"), f"{h}.mlp.dense_4h_to_h")
    return norm(x, "ln_f") @ embedding.T


def _mpt(c: dict[str, Any], w: dict[str, Tensor], ids: Tensor, local: Local | None) -> Tensor:
    heads, eps, a = c["n_heads"], c["layer_norm_epsilon"], c["attn_config"]

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], w[f"transformer.{name}.weight"], None, eps)

    def project(x: Tensor, name: str) -> Tensor:
        return x @ w[f"transformer.{name}.weight"].T

    embedding = w["transformer.wte.weight"]
    x = embedding[ids]
    for i in range(c["n_layers"]):
        b = f"blocks.{i}"
        mixed = project(norm(x, f"{b}.norm_1"), f"{b}.attn.Wqkv")
        if a.get("clip_qkv"):
            mixed = mixed.clamp(-a["clip_qkv"], a["clip_qkv"])
        q, k, v = mixed.unflatten(-1, (3, heads, -1)).unbind(1)
        slopes = literal_slopes("mpt", heads, a.get("alibi_bias_max", 8))
        scale = a.get("softmax_scale") or q.shape[-1] ** -0.5
        own = local[i] if local else None
        x = x + project(_attention(q, k, v, scale, slopes, own), f"{b}.attn.out_proj")
        inner = gelu(project(norm(x, f"{b}.norm_2"), f"{b}.ffn.up_proj"))
        x = x + project(inner, f"{b}.ffn.down_proj")
    return norm(x, "norm_f") @ embedding.T


def _baichuan(c: dict[str, Any], w: dict[str, Tensor], ids: Tensor, local: Local | None) -> Tensor:
    heads, eps = c["num_attention_heads"], c["rms_norm_eps"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        hidden = norm(x, f"{layer}.input_layernorm")
        mixed = hidden @ w[f"{layer}.self_attn.W_pack.weight"].T
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in mixed.chunk(3, dim=-1))
        slopes = literal_slopes("baichuan", heads)
        own = local[i] if local else None
        seen = _attention(q, k, v, q.shape[-1] ** -0.5, slopes, own)
        x = x + seen @ w[f"{layer}.self_attn.o_proj.weight"].T
        hidden = norm(x, f"{layer}.post_attention_layernorm")
        gate = silu(hidden @ w[f"{layer}.mlp.gate_proj.weight"].T)
        inner = gate * (hidden @ w[f"{layer}.mlp.up_proj.weight"].T)
        x = x + inner @ w[f"{layer}.mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    return norm(x, "model.norm") @ (head / head.norm(dim=1, keepdim=True)).T
