"""From settings to one rank's engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.cache.sequence import shard_sizes
from razor_dist.config import EngineConfig
from razor_dist.engine.core import EngineCore
from razor_dist.engine.graph import Recorder, cuda_recorder
from razor_dist.engine.runner import CacheConfig, ModelRunner
from razor_dist.errors import ConfigError, ModelError
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.heads.layout import HeadLayout, Windows
from razor_dist.models.loader import (
    dtype_name,
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
from razor_dist.parallel.ring import RingAttention, ring_attention
from razor_dist.parallel.ring_flash import load_zigzag, ring_flash_attention
from razor_dist.parallel.zero import ShardedWeights, import_deepspeed, join_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """One rank's engine.

    Attributes
    ----------
    runner : ModelRunner
    core : EngineCore
        Of use on rank 0 only.
    info : dict
        The ``info`` of the protocol's ``ready`` message.
    """

    runner: ModelRunner
    core: EngineCore
    info: dict[str, Any]


def torch_device(config: EngineConfig, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises
    ------
    ConfigError
        If CUDA is asked for and not there.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU; use cpu or auto")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def torch_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights, and in which the model computes."""
    if config.dtype == "auto":
        # Decode attention over bf16 runs about 5 times slower than fp32 on CPUs without bf16.
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[config.dtype]


def torch_kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values that are kept or travel; ``dtype`` is what is computed in."""
    return dtype if config.kv_dtype == "auto" else _DTYPES[config.kv_dtype]


def _warn_of_kv_dtype(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Say what a choice of dtypes costs that its user may not expect."""
    if device.type == "cpu" and kv_dtype == torch.bfloat16:
        log.warning(
            "keys and values are kept in bf16 on cpu: half the memory of fp32, but decoding over "
            "a long context is slower; kv_dtype: fp32 is faster where it fits"
        )
    elif kv_dtype == torch.float32 != dtype:
        log.warning(
            "kv_dtype is fp32, but the model computes in bf16: its keys and values take twice "
            "the memory and are no more exact; kv_dtype: auto keeps them in bf16"
        )


def head_map_of(config: EngineConfig, shape: ModelShape, fingerprint: str) -> HeadMap:
    """The head map that the settings name, for a model of this shape."""
    if config.attention == "full":
        return HeadMap.full(shape)
    if config.attention == "streaming":
        return HeadMap.streaming(shape)
    head_map = HeadMap.load(config.head_map or shipped_head_map(config.model))
    head_map.validate(shape, fingerprint)
    return head_map


def ring_of(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> RingAttention:
    """The implementation of ring attention that the settings name.

    Raises
    ------
    ConfigError
        If its packages are not installed, or cannot compute on this device or in this dtype.
    """
    if config.ring == "own":
        return ring_attention
    if device.type != "cuda" or dtype == torch.float32:
        raise ConfigError(
            "ring is ring_flash_attn, which computes in bf16 on cuda only; here it is "
            f"{dtype_name(dtype)} on {device.type}: use ring: own"
        )
    if kv_dtype != dtype:
        raise ConfigError(
            "ring is ring_flash_attn, whose keys and values have the dtype of the queries; set "
            "kv_dtype: auto, or use ring: own"
        )
    load_zigzag()
    return ring_flash_attention


def wave_length(config: EngineConfig, world_size: int, device: torch.device) -> int:
    """Tokens of a prompt that all ranks together prefill in one wave.

    On CPU the activations of 2048 tokens per rank still fit the caches: a 7000-token prompt in one
    wave took 1.2 times as long (docs/LOG.md).
    """
    return config.wave_tokens or world_size * (2048 if device.type == "cpu" else 8192)


def cache_config(
    config: EngineConfig,
    shape: ModelShape,
    max_model_len: int,
    wave_tokens: int,
    world_size: int,
    dtype: torch.dtype,
) -> CacheConfig:
    """A rank's caches; by default ``max_num_seqs`` sequences of full length fit.

    ``dtype`` is that of the keys and values (`torch_kv_dtype`).
    """
    longest = shard_sizes(0, max_model_len, max_model_len, wave_tokens, world_size)
    # A page more: how a sequence splits into prompt and answer moves a few tokens between ranks.
    pages = -(-max(longest) // config.page_size) + 1
    if config.kv_tokens is None:
        num_pages = pages * config.max_num_seqs
    else:
        per_rank = -(-config.kv_tokens // world_size)
        num_pages = -(-per_rank // config.page_size) + config.max_num_seqs
    return CacheConfig(
        policy=config.policy,
        max_sequences=config.max_num_seqs,
        max_tokens=max_model_len,
        num_pages=num_pages,
        page_size=config.page_size,
        scratch_pages=pages if config.prefill == "exact" else 0,
        dtype=dtype,
    )


def recorder_of(config: EngineConfig, comm: Communicator, device: torch.device) -> Recorder | None:
    """What records decode steps, where that is possible."""
    if not config.cuda_graphs:
        return None
    recorder = cuda_recorder(comm, device)
    if recorder is not None and config.weights != "replicated":
        if comm.rank == 0:
            log.warning(
                "decode steps are not recorded in CUDA graphs: with weights: %s every step "
                "gathers the weights anew",
                config.weights,
            )
        return None
    return recorder


class _NoAttention:
    """An `AttentionContext` that attends to nothing."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """See `razor_dist.attention.AttentionContext`."""
        return torch.zeros_like(q).transpose(0, 1)


@torch.inference_mode()
def check_model(model: PreTrainedModel, name: str) -> None:
    """Run one token through a model, so that what cannot be honoured is refused at start.

    Raises
    ------
    ModelError
        If a layer asks of attention what we do not compute.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model(
            input_ids=token,
            position_ids=token,
            use_cache=False,
            logits_to_keep=1,
            attention_context=_NoAttention(),
        )
    except NotImplementedError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error


def make_engine(
    model: PreTrainedModel,
    config: EngineConfig,
    retrieval: Sequence[Sequence[bool]],
    comm: Communicator,
    *,
    eos_token_ids: tuple[int, ...],
    windows: Windows | None = None,
    ring: RingAttention | None = None,
) -> Engine:
    """One rank's engine around a model that is loaded with our attention.

    Parameters
    ----------
    model : PreTrainedModel
    config : EngineConfig
    retrieval : sequence of sequence of bool
        For every layer and KV head, whether it is a retrieval head.
    comm : Communicator
    eos_token_ids : tuple of int
    windows : sequence of sequence of (int or None), optional
        For every layer and KV head, a local head's own window.
    ring : RingAttention, optional
        In place of the one that the settings name.

    Raises
    ------
    ConfigError
        If the settings and the model's sizes do not fit together, or the caches into memory.
    """
    shape = ModelShape.from_config(model.config)
    device, dtype = model.device, model.dtype
    kv_dtype = torch_kv_dtype(config, dtype)
    if comm.rank == 0:
        _warn_of_kv_dtype(device, dtype, kv_dtype)
    max_model_len = context_length(config, shape)
    wave_tokens = wave_length(config, comm.size, device)
    try:
        runner = ModelRunner(
            model,
            shape,
            HeadLayout.from_decision(retrieval, device, windows),
            cache_config(config, shape, max_model_len, wave_tokens, comm.size, kv_dtype),
            comm,
            ring or ring_of(config, device, dtype, kv_dtype),
            recorder_of(config, comm, device),
        )
    except RuntimeError as error:  # torch.OutOfMemoryError on cuda, an allocator's error on CPU
        if "memory" not in str(error):
            raise
        raise ConfigError(
            f"the KV caches of {config.max_num_seqs} sequences of {max_model_len} tokens do not "
            "fit into memory; lower max_num_seqs, max_model_len or kv_tokens, or use more ranks "
            f"({error})"
        ) from error
    core = EngineCore(
        runner,
        max_model_len=max_model_len,
        wave_tokens=wave_tokens,
        eos_token_ids=eos_token_ids,
        seed=config.seed,
    )
    kept = sum(map(sum, retrieval))
    info = {
        "world_size": comm.size,
        "model": config.model,
        "max_model_len": max_model_len,
        "vocab_size": shape.vocab_size,
        "eos_token_ids": list(eos_token_ids),
        "attention": config.attention,
        "prefill": config.prefill,
        "retrieval_fraction": kept / (shape.layers * shape.kv_heads),
        "kv_bytes_per_rank": runner.reserved_bytes,
    }
    return Engine(runner, core, info)


def context_length(config: EngineConfig, shape: ModelShape) -> int:
    """Tokens of prompt and answer together.

    Raises
    ------
    ConfigError
        If more are asked for than the model was made for. One that is biased by distance has no
        last position: there it is a warning.
    """
    length = config.max_model_len or shape.max_positions
    if length > shape.max_positions and shape.alibi:
        log.warning(
            "max_model_len is %d, but %s was trained with %d positions: its bias by distance goes "
            "on beyond, what it makes of such texts is not known",
            length,
            config.model,
            shape.max_positions,
        )
    elif length > shape.max_positions:
        if shape.beyond:
            raise ConfigError(
                f"max_model_len is {length}, but {config.model} is served up to "
                f"{shape.max_positions} positions: {shape.beyond}"
            )
        raise ConfigError(
            f"max_model_len is {length}, but {config.model} was made for "
            f"{shape.max_positions} positions"
        )
    return length


@dataclass(frozen=True)
class Loaded:
    """What one rank needs for its engine.

    Attributes
    ----------
    model : PreTrainedModel
        With our attention.
    head_map : HeadMap
        Of its heads.
    eos_token_ids : tuple of int
    shares : ShardedWeights or None
        This rank's part of the weights, if they are sharded: the model cannot run yet.
    """

    model: PreTrainedModel
    head_map: HeadMap
    eos_token_ids: tuple[int, ...]
    shares: ShardedWeights | None


def check_weights(config: EngineConfig, comm: Communicator, device: torch.device) -> None:
    """Refuse sharded weights where they cannot be.

    Raises
    ------
    ConfigError
        If DeepSpeed is missing, or there is nothing to shard over.
    """
    if config.weights == "replicated":
        return
    if config.weights == "zero3" and comm.size == 1:
        raise ConfigError(
            "weights: zero3 shards the weights over the ranks, and world_size is 1; use "
            "replicated, or zero3-offload to keep them in CPU memory"
        )
    import_deepspeed(device, use=f"weights: {config.weights} needs", extra="zero3")


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
    check_weights(config, comm, device)
    trust = config.trust_remote_code
    path = resolve_model(config.model, trust_remote_code=trust)
    model_config = read_config(path, trust_remote_code=trust)
    shape = ModelShape.from_config(model_config)
    context_length(config, shape)
    head_map = head_map_of(config, shape, model_fingerprint(model_config))
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


def start(config: EngineConfig, loaded: Loaded, comm: Communicator) -> Engine:
    """One rank's engine; with sharded weights, all ranks start theirs together.

    Raises
    ------
    ConfigError, ModelError
        As `make_engine` and `check_model`.
    """
    if loaded.shares is not None:
        loaded.shares.gather_when_run(partial(comm.note, "weights"))
    check_model(loaded.model, config.model)
    return make_engine(
        loaded.model,
        config,
        loaded.head_map.retrieval,
        comm,
        eos_token_ids=loaded.eos_token_ids,
        windows=loaded.head_map.windows,
    )


def build_engine(config: EngineConfig, comm: Communicator, device: torch.device) -> Engine:
    """`load` and `start`: a rank's engine, where no other rank can have failed meanwhile."""
    return start(config, load(config, comm, device), comm)
