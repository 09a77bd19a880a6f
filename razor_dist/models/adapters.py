"""The adapters: classes of our own that serve models biased by distance (ALiBi)."""

from __future__ import annotations

import importlib

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

# Model types with an adapter, and where its class `Model` and its `reason` to refuse are.
_ADAPTERS = {
    "bloom": "razor_dist.models.bloom",
    "mpt": "razor_dist.models.mpt",
    "baichuan": "razor_dist.models.baichuan",
}


def adapter(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that serves models with this configuration in place of transformers' own."""
    if config.model_type not in _ADAPTERS:
        return None
    model: type[PreTrainedModel] = importlib.import_module(_ADAPTERS[config.model_type]).Model
    return model


def adapter_reason(config: PretrainedConfig) -> str | None:
    """Return why a model with an adapter cannot be served, as the end of a sentence."""
    reason: str | None = importlib.import_module(_ADAPTERS[config.model_type]).reason(config)
    return reason


def is_alibi(config: PretrainedConfig) -> bool:
    """Tell if a model that can be served is biased by distance."""
    return config.model_type in _ADAPTERS


def register_configs() -> None:
    """Make `AutoConfig` read the configurations that transformers does not know."""
    from razor_dist.models.baichuan import BaichuanConfig

    AutoConfig.register(BaichuanConfig.model_type, BaichuanConfig, exist_ok=True)
