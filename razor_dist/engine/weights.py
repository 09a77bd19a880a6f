"""Loading on one rank: the model, its weights or a share of them, its head map."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.capacity import context_length
from razor_dist.engine.device import ring_of, torch_dtype, torch_kv_dtype
from razor_dist.heads.head_map import HeadMap, default_head_map
from razor_dist.models.loader import (
    eos_token_ids,
    layer_classes,
    load_model,
    model_fingerprint,
    read_config,
    stored_dtype,
)
from razor_dist.models.registry import resolve_model
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.zero import ShardedWeights, import_deepspeed, join_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A loaded model, ready to become one rank's engine."""

    model: PreTrainedModel  # with our attention
    head_map: HeadMap
    eos_token_ids: tuple[int, ...]
    # This rank's part of the weights, if they are sharded: the model cannot run yet.
    shares: ShardedWeights | None


def load(config: EngineConfig, comm: Communicator, device: torch.device) -> Loaded:
    """Load the model on one rank; no rank waits for another.

    Raises
    ------
    ConfigError, ModelError, HeadMapError
        If the settings, the model or the head map do not fit together.
    """
    dtype = torch_dtype(config, device)
    # Before minutes of loading.
    ring_of(config, device, dtype, torch_kv_dtype(config, dtype))
    _check_weights(config, comm, device)
    trust = config.trust_remote_code
    path = resolve_model(config.model, trust_remote_code=trust)
    model_config = read_config(path, trust_remote_code=trust)
    shape = ModelShape.from_config(model_config)
    context_length(config, shape)
    head_map = head_map_of(config, shape, model_fingerprint(model_config))
    if comm.rank == 0 and config.attention == "razor" and config.head_map is None:
        chosen = default_head_map(config.model)
        if chosen.parent == path:
            log.info("the head map is the model folder's own, %s", chosen)
    shares = None
    if config.weights == "replicated":
        model = load_model(path, device=device, dtype=dtype, trust_remote_code=trust)
    else:
        # As views of the mapped files, of which a rank then reads its share.
        cpu = torch.device("cpu")
        model = load_model(path, device=cpu, dtype=stored_dtype(path), trust_remote_code=trust)
        join_ranks(device, config.collective_timeout)
        shares = ShardedWeights(
            model,
            device,
            dtype=dtype,
            offload=config.weights == "zero3-offload",
            group=comm.group,
            together=layer_classes(model),
        )
    return Loaded(model, head_map, eos_token_ids(path), shares)


def head_map_of(config: EngineConfig, shape: ModelShape, fingerprint: str) -> HeadMap:
    """The head map that the settings name, for a model of this shape."""
    if config.attention == "full":
        return HeadMap.full(shape)
    if config.attention == "streaming":
        return HeadMap.streaming(shape)
    head_map = HeadMap.load(config.head_map or default_head_map(config.model))
    head_map.validate(shape, fingerprint)
    return head_map


def _check_weights(config: EngineConfig, comm: Communicator, device: torch.device) -> None:
    """Raise `ConfigError` if weights are to be sharded without DeepSpeed, or over one rank."""
    if config.weights == "replicated":
        return
    if config.weights == "zero3" and comm.size == 1:
        raise ConfigError(
            "weights: zero3 shards the weights over the ranks, and world_size is 1; use "
            "replicated, or zero3-offload to keep them in CPU memory"
        )
    import_deepspeed(device, use=f"weights: {config.weights} needs", extra="zero3")
