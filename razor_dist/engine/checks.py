"""Checks of settings against device, model and head map, before any weight is read."""

from __future__ import annotations

from pathlib import Path

import torch

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.capacity import context_length
from razor_dist.engine.device import check_ring, ring_of, torch_dtype, torch_kv_dtype
from razor_dist.heads.head_map import HeadMap, head_map_of
from razor_dist.models.loader import model_fingerprint, read_config
from razor_dist.models.shape import ModelShape, share_refusal
from razor_dist.parallel.zero import require_deepspeed


def check_settings(config: EngineConfig, folder: Path, device: torch.device) -> HeadMap:
    """Check settings against a rank's device and the model in ``folder``; return the head map.

    Reads ``config.json`` and the head map, which takes milliseconds. Raises `ConfigError`,
    `ModelError` or `HeadMapError` where settings, device, model and head map do not fit together.
    """
    check_store(config.prefix_store)
    model_config = read_config(folder, **config.model_options)
    shape = ModelShape.from_config(model_config)
    check_shape(config, shape, device)
    dtype = torch_dtype(config, device)
    ring_of(config, device, dtype, torch_kv_dtype(config, dtype))
    return head_map_of(config, shape, model_fingerprint(model_config))


def check_store(prefix_store: str | None) -> None:
    """Raise `ConfigError` if an engine's number in the name of a store was not filled in."""
    if "{engine}" in (prefix_store or ""):
        raise ConfigError(
            f"prefix_store is {prefix_store}, but only jobs and Ray Serve put a number in place of "
            "{engine}; name the folder of this engine"
        )


def check_shape(config: EngineConfig, shape: ModelShape, device: torch.device) -> None:
    """Check settings against a model's shape and a kind of device, which need not be here.

    Raises `ConfigError`.
    """
    dtype = torch_dtype(config, device)
    check_ring(config, device, dtype, torch_kv_dtype(config, dtype))
    _check_weights(config, device)
    context_length(config, shape)
    if config.kv_dtype == "int4" and shape.head_dim % 2:
        raise ConfigError(
            f"kv_dtype is int4, which keeps two dimensions in a byte, and heads of {config.model} "
            f"have {shape.head_dim}; use int8"
        )
    reason = share_refusal(config, shape)
    if reason is not None:
        raise ConfigError(f"retrieval_share {reason}; leave it out")


def _check_weights(config: EngineConfig, device: torch.device) -> None:
    """Raise `ConfigError` if weights are to be sharded without DeepSpeed, or over one rank.

    Or if they are to be of 8 bits where no such products are computed.
    """
    if config.weight_dtype == "int8":
        if device.type != "cpu" or torch_dtype(config, device) != torch.float32:
            raise ConfigError(
                "weight_dtype: int8 is for device: cpu with dtype: fp32; leave it out, or on a GPU "
                "use dtype: bf16"
            )
        if config.weights != "replicated":
            raise ConfigError(
                f"weight_dtype: int8 packs whole layers, which weights: {config.weights} has on no "
                "rank; leave one of them out"
            )
    if config.weights == "replicated":
        return
    if config.weights == "zero3" and config.world_size == 1:
        raise ConfigError(
            "weights: zero3 shards the weights over the ranks, and world_size is 1; use "
            "replicated, or zero3-offload to keep them in CPU memory"
        )
    require_deepspeed(f"weights: {config.weights} needs", "zero3")
