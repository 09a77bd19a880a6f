"""Models of real sizes with random weights: time and memory depend on shapes alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.config.errors import ConfigError
from razor_dist.models.loader import model_from_config, read_config


def shape_config(folder: str) -> PretrainedConfig:
    """The configuration in a folder, which needs no weights.

    Raises
    ------
    ConfigError
        If there is no ``config.json``.
    ModelError
        If the model cannot be served.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"shape is {folder!r}; give a folder with a config.json")
    return read_config(folder)


def random_model(folder: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a ``config.json``, its weights drawn on the device; raises as `shape_config`."""
    return model_from_config(shape_config(folder), device=device, dtype=dtype)
