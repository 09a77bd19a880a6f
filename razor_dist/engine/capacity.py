"""Room for tokens in an engine: in a sequence, in a chunk, and in a rank's caches."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from razor_dist.cache.sequence import shard_sizes
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.runner import CacheConfig
from razor_dist.heads.policy import StreamingPolicy
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.zigzag import whole_shards

log = logging.getLogger(__name__)

# Tokens of a chunk per rank, unless the settings say. On CPU the activations of 2048 still fit the
# caches: a 7000-token prompt in one chunk took 1.2 times as long (docs/LOG.md).
_CHUNK_CPU = 2048
_CHUNK_CUDA = 8192
# With long windows it is longer on CUDA, up to this for heads of this many dimensions together.
# Activations grow with both; these are GLM-4-9B's, and make 4 GB (docs/million.md).
_LONGEST_CHUNK_CUDA = 32768
_WIDTH_OF_LONGEST = 4096
_STEP_CUDA = 1024
# So many windows per rank. Each of a chunk's 2P shards fetches its window: of 2P windows' length, a
# chunk would have the streaming heads send all of their keys and values, of twice that, half of
# them.
_WINDOWS_IN_CHUNK = 4
# Tokens by which the last chunk and the decoded tokens may favour one rank.
_UNEVEN = 4


def context_length(config: EngineConfig, shape: ModelShape) -> int:
    """Tokens of prompt and answer together; `ConfigError` if the model was made for fewer.

    A model biased by distance has no last position: there it is a warning.
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
        most = f"{shape.max_positions} positions"
        limit = (
            f"is served up to {most}: {shape.beyond}" if shape.beyond else f"was made for {most}"
        )
        raise ConfigError(f"max_model_len is {length}, but {config.model} {limit}")
    return length


def chunk_length(
    config: EngineConfig,
    shape: ModelShape,
    windows: Sequence[int | None],
    max_model_len: int,
    world_size: int,
    device: torch.device,
) -> int:
    """The most tokens of a prompt that all ranks prefill in one chunk.

    ``windows`` are `HeadLayout.windows`.
    """
    if config.chunked_prefill_size:
        return whole_shards(config.chunked_prefill_size, world_size)
    if device.type == "cpu":
        return world_size * _CHUNK_CPU
    if world_size == 1 or config.prefill == "exact":
        return world_size * _CHUNK_CUDA  # no halo
    policies = [StreamingPolicy.of(config).with_window(window) for window in windows]
    longest = max((policy.window(max_model_len - 1) for policy in policies), default=0)
    wanted = max(_CHUNK_CUDA, _WINDOWS_IN_CHUNK * longest)
    width = max(shape.query_heads * shape.head_dim, _WIDTH_OF_LONGEST)
    most = _LONGEST_CHUNK_CUDA * _WIDTH_OF_LONGEST // width
    # Even shards of whole blocks, which the ring of ring-flash-attn and batched blocks want.
    most = max(_CHUNK_CUDA, most // _STEP_CUDA * _STEP_CUDA)
    return world_size * min(wanted, most)


def cache_config(
    config: EngineConfig,
    shape: ModelShape,
    max_model_len: int,
    world_size: int,
    dtype: torch.dtype,
) -> CacheConfig:
    """A rank's caches of ``dtype``; by default ``max_num_seqs`` sequences of full length fit."""
    longest = shard_sizes(0, max_model_len, max_model_len, world_size)
    # How a sequence splits into prompt and answer moves a few tokens between ranks.
    pages = -(-max(longest) // config.page_size) + max(1, -(-_UNEVEN // config.page_size))
    if config.kv_tokens is None:
        num_pages = pages * config.max_num_seqs
    else:
        per_rank = -(-config.kv_tokens // world_size)
        num_pages = -(-per_rank // config.page_size) + config.max_num_seqs
    return CacheConfig(
        policy=StreamingPolicy.of(config),
        max_sequences=config.max_num_seqs,
        max_tokens=max_model_len,
        num_pages=num_pages,
        page_size=config.page_size,
        scratch_pages=pages if config.prefill == "exact" else 0,
        dtype=dtype,
    )
