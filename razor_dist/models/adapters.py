"""Adapters: our own classes for models biased by distance (ALiBi)."""

from __future__ import annotations

import importlib
from typing import Any

from transformers import AutoConfig, PretrainedConfig

# Model types with an adapter, and the module of its class `Model`.
_ADAPTERS = {
    "bloom": "razor_dist.models.bloom",
    "mpt": "razor_dist.models.mpt",
    "baichuan": "razor_dist.models.baichuan",
}


def adapter(config: PretrainedConfig) -> Any:
    """The `CausalLM` class that replaces transformers' own for a configuration, or None."""
    name = _ADAPTERS.get(config.model_type)
    return name and importlib.import_module(name).Model


def is_alibi(config: PretrainedConfig) -> bool:
    return config.model_type in _ADAPTERS


def register_configs() -> None:
    """Make `AutoConfig` read configurations that transformers does not know, or refuses."""
    from razor_dist.models.baichuan import BaichuanConfig
    from razor_dist.models.mpt import MptConfig

    for kind in (BaichuanConfig, MptConfig):
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
