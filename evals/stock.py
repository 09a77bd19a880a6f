"""transformers' own model, with its own attention: what we are compared with."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.device import torch_dtype
from razor_dist.models.loader import no_progress_bars
from razor_dist.models.registry import resolve_model


def load_stock(
    config: EngineConfig, device: torch.device, attention: str = "sdpa"
) -> PreTrainedModel:
    """Load the model that an engine of such settings would serve, in the same dtype."""
    trust = config.trust_remote_code
    with no_progress_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            resolve_model(config.model, trust_remote_code=trust),
            dtype=torch_dtype(config, device),
            attn_implementation=attention,
            trust_remote_code=trust,
            local_files_only=True,
        )
    moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    return moved.eval()
