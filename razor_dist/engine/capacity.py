"""Room for tokens in an engine: in a sequence, in a chunk, and in a rank's caches."""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from razor_dist.attention.chosen import activation_bytes
from razor_dist.cache.caches import CacheConfig, new_caches
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.cache.slots import Arena
from razor_dist.config.errors import ConfigError
from razor_dist.config.memory import free_bytes
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.device import torch_kv_dtype
from razor_dist.engine.tape import recorded_rows
from razor_dist.heads.layout import HeadLayout
from razor_dist.kernels.chosen import chooses
from razor_dist.kernels.quantized import has_scale, row_bytes
from razor_dist.models.shape import ModelShape, experts_of, routed_of
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.sharding import shard_sizes
from razor_dist.parallel.zigzag import Chunk, Interval, chunks, holdings, whole_shards

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
# Least length of a chunk, in windows per rank. Each of a chunk's 2P shards fetches its window: in a
# chunk of 2P windows the streaming heads send all of their keys and values, in one of 4P windows
# half of them.
_WINDOWS_IN_CHUNK = 4
# Tokens by which the last chunk and the decoded tokens may favour one rank.
_UNEVEN = 4
# The caches of several sequences take up to this part of the memory that is free.
_SHARE = 0.7
# Entries of the prefix cache for each sequence that may run. Two are counted at least: half of the
# entries may be pinned, and one request may pin four. An entry sets aside memory for its sums only;
# its tokens share the pages and windows of all.
_CACHED = 4
# Chunks of a long prompt of which `RankSizes.window_bytes` takes the most.
_LAST_CHUNKS = 8
# Activations of a chunk, in multiples of its hidden states (`razor-dist plan` counts them).
_ACTIVATIONS = 16


def context_length(config: EngineConfig, shape: ModelShape) -> int:
    """Tokens of prompt and answer together; `ConfigError` if the model was made for fewer.

    A model biased by distance has no last position: `about_settings` warns there.
    """
    length = config.max_model_len or shape.max_positions
    if length > shape.max_positions and not shape.alibi:
        raise ConfigError(
            f"max_model_len is {length}, but {config.model} was made for {shape.max_positions} "
            "positions"
        )
    return length


def _policies(
    config: EngineConfig, shape: ModelShape, windows: Sequence[int | None]
) -> list[StreamingPolicy]:
    policy = StreamingPolicy.of(config)
    return [policy.with_window(window, alibi=shape.alibi) for window in windows]


def chunk_length(
    config: EngineConfig,
    shape: ModelShape,
    windows: Sequence[int | None],
    max_model_len: int,
    world_size: int,
    device: torch.device,
) -> int:
    """The most tokens that all ranks prefill in one chunk; ``windows`` are `HeadLayout`'s."""
    if config.chunked_prefill_size:
        return whole_shards(config.chunked_prefill_size, world_size)
    if device.type == "cpu":
        return world_size * _CHUNK_CPU
    if world_size == 1 or config.prefill == "exact":
        return world_size * _CHUNK_CUDA  # no halo
    policies = _policies(config, shape, windows)
    longest = max((policy.window(max_model_len - 1) for policy in policies), default=0)
    wanted = max(_CHUNK_CUDA, _WINDOWS_IN_CHUNK * longest)
    width = max(shape.query_heads * shape.head_dim, _WIDTH_OF_LONGEST)
    most = _LONGEST_CHUNK_CUDA * _WIDTH_OF_LONGEST // width
    # Even shards of whole blocks, which the ring of ring-flash-attn and batched blocks want.
    most = max(_CHUNK_CUDA, most // _STEP_CUDA * _STEP_CUDA)
    return world_size * min(wanted, most)


@dataclass(frozen=True)
class RankSizes:
    """Computes the sizes of a rank's caches and windows, for queries of ``dtype``."""

    config: EngineConfig
    shape: ModelShape
    layout: HeadLayout
    world_size: int
    dtype: torch.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of retrieval heads' keys and values."""
        return torch_kv_dtype(self.config, self.dtype)

    @property
    def streaming_dtype(self) -> torch.dtype:
        """The dtype of streaming heads' keys and values."""
        return streaming_dtype(self.kv_dtype, self.dtype)

    @property
    def policies(self) -> list[StreamingPolicy]:
        """The policy of each of the layout's windows."""
        return _policies(self.config, self.shape, self.layout.windows)

    def caches(self, max_model_len: int, room: float = math.inf) -> CacheConfig:
        """Return a rank's caches in ``room`` bytes.

        They hold ``max_num_seqs`` sequences of ``max_model_len`` tokens, or as many as there is
        room for, but at least one; more, if these are shorter. ``kv_tokens`` sets the size of the
        page pool.
        """
        if room == math.inf:
            return self._caches(max_model_len, self.config.max_num_seqs)
        one, two = (self._reserved(self._caches(max_model_len, count)) for count in (1, 2))
        more = max(0.0, room - one) / max(1, two - one)
        return self._caches(max_model_len, min(self.config.max_num_seqs, 1 + more))

    def _caches(self, max_model_len: int, sequences: float) -> CacheConfig:
        config, tail = self.config, cached_tail(self.config)
        longest = shard_sizes(0, max_model_len, max_model_len, self.world_size)
        # How a sequence splits into prompt and answer moves a few tokens between ranks.
        pages = -(-max(longest) // config.page_size) + max(1, -(-_UNEVEN // config.page_size))
        num_pages = int(pages * sequences)
        if config.kv_tokens is not None:
            per_rank = -(-config.kv_tokens // self.world_size)
            num_pages = -(-per_rank // config.page_size) + config.max_num_seqs
        # A head's key and value.
        dtypes = self.kv_dtype, self.streaming_dtype
        token, streaming_token = (2 * row_bytes(self.shape.head_dim, of) for of in dtypes)
        return CacheConfig(
            arenas=tuple(Arena.of(own, max_model_len, sequences, tail) for own in self.policies),
            max_sequences=config.max_num_seqs,
            max_tokens=max_model_len,
            num_pages=num_pages,
            page_size=config.page_size,
            scratch_pages=pages if config.prefill == "exact" else 0,
            dtype=self.kv_dtype,
            streaming_dtype=self.streaming_dtype,
            max_cached=_CACHED * max(2, config.max_num_seqs) if config.caches_prefixes else 0,
            page_bytes=self.layout.retrieval_rows * config.page_size * token,
            place_bytes=tuple(rows * streaming_token for rows in self.layout.most_rows),
        )

    def _reserved(self, caches: CacheConfig) -> int:
        device, rows = torch.device("meta"), self.layout.most_rows
        return new_caches(self.layout, self.shape, caches, device, rows=rows).reserved_bytes

    def check_one_fits(self, max_model_len: int, most: float) -> None:
        """Raise `ConfigError` if the caches of one sequence take more than ``most`` bytes."""
        if (one := self._reserved(self.caches(max_model_len, 0.0))) > most:
            reason = f"they take {one / 1e9:.1f} GB of {max(0, most) / 1e9:.1f}"
            raise self.does_not_fit(max_model_len, reason)

    def does_not_fit(self, max_model_len: int, reason: object) -> ConfigError:
        windows = f"window_max {self.config.window_max}"
        own = [tokens for tokens in self.layout.windows if tokens is not None]
        if own:  # window_max does nothing
            windows = f"the head map's windows of up to {max(own)} tokens"
        return ConfigError(
            f"the KV caches do not fit into memory with max_model_len {max_model_len}, {windows} "
            f"and kv_tokens {self.config.kv_tokens}; lower these, or use more ranks ({reason})"
        )

    def working_bytes(self, length: int, chunked_prefill_size: int) -> float:
        """Bytes that a chunk takes beside the caches at the end of a text of ``length`` tokens.

        It is the most there: activations and `window_bytes`.
        """
        shape, dtype = self.shape, self.dtype
        hidden = shape.query_heads * shape.head_dim * dtype.itemsize
        working = _ACTIVATIONS * chunked_prefill_size / self.world_size * hidden
        working += self.window_bytes(length, chunked_prefill_size)
        if self.config.retrieval_share and chooses(length):
            last = Chunk(max(0, length - chunked_prefill_size), length, self.world_size)
            rows = max(len(heads.retrieval) for heads in self.layout.layers)
            working += activation_bytes(last, rows, shape.group, shape.head_dim, dtype)
        return working

    def window_bytes(self, length: int, chunked_prefill_size: int) -> int:
        """Bytes of windows that the fullest rank holds of a prompt in work (`_window_tokens`).

        While a chunk runs, a layer gets its new part and then lets go of the old one, so that of
        one layer both are there.
        """
        tokens = 0
        for index, policy in enumerate(self.policies):
            rows = self.layout.streaming_in_layers(index)
            held = self._window_tokens(policy, length, chunked_prefill_size)
            tokens += (sum(rows) + max(rows)) * held
        return 2 * row_bytes(self.shape.head_dim, self.streaming_dtype) * tokens

    def _window_tokens(self, policy: StreamingPolicy, prompt: int, chunk: int) -> int:
        """Tokens of window that the fullest rank holds of each head between two chunks.

        Each rank keeps its own part of the window (`ChunkedWindow.pieces`). The last shard of a
        chunk is rank 0's, so that it may hold all of a window that is shorter. Nothing stays after
        the last.
        """
        if self.config.prefill == "exact":
            return 0
        done, most = chunks(0, prompt, chunk, self.world_size), 0
        # Windows never shrink, so that of many chunks the last ones hold the most.
        for index in range(max(0, len(done) - _LAST_CHUNKS), len(done) - 1):
            end, ranks = done[index].end, [0] * self.world_size
            keep = max(0, max(policy.sinks, policy.start(end)) - cached_tail(self.config))
            for held, rank in holdings(done[: index + 1], Interval(keep, end)):
                ranks[rank] += len(held)
            most = max(most, *ranks)
        return most


def streaming_dtype(kv_dtype: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return what streaming heads' keys and values are kept in: codes are for the others."""
    return dtype if has_scale(kv_dtype) else kv_dtype


def cached_tail(config: EngineConfig) -> int:
    """Tokens that streaming caches keep after their windows have left them."""
    return config.prefix_tail_tokens if config.caches_prefixes else 0


def free_memory(comm: Communicator, device: torch.device) -> float:
    """Bytes that are free for each rank now, the least of all ranks, which call this together."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # layers that were joined have left their weights there
        # A rank may see its own GPU alone, so what tells GPUs apart is their identity.
        own = zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode())
        ranks = int((comm.host.all_gather(torch.tensor([own]), "control") == own).sum())
        if comm.group is not comm.host.group:
            _meet(comm, device)
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = free_bytes()
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this host
    return comm.host.all_gather(torch.tensor([free // ranks]), "control").min().item()


def _meet(comm: Communicator, device: torch.device) -> None:
    """Make transfers of each kind, with which NCCL takes the memory for its buffers."""
    sent = torch.zeros(1, device=device)
    arriving = [(rank, torch.empty_like(sent)) for rank in comm.others]
    comm.exchange([(rank, sent) for rank in comm.others], arriving, "control").wait()
    comm.all_reduce(sent, "control").wait()


def prefix_bytes(config: EngineConfig, device: str) -> int:
    """Bytes of a rank's prefixes in host memory, if its caches are there, too."""
    return int(config.prefix_host_gb * 2**30 / config.world_size) if device == "cpu" else 0


def recorded_bytes(model: PreTrainedModel, shape: ModelShape, config: EngineConfig) -> int:
    """Bytes that recordings of a model's decode steps keep on CPU, at most.

    A row keeps what linear layers read and write, queries and keys as they are normed and rotated,
    and twice what experts read and write, all in float32; of an embedding what it gives.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    row = shape.layers * 2 * (shape.query_heads + shape.kv_heads) * shape.head_dim
    experts, routed = experts_of(model.config), routed_of(model.config)
    for name, parameter in model.named_parameters():
        times = 1.0 if parameter.dim() > 1 else 0.0
        if experts and ".experts." in name:
            times *= 2 * routed / (1 if parameter.dim() > 2 else experts)
        looked_up = parameter is table and table is not head
        row += round(times * sum(parameter.shape[-1 if looked_up else -2 :]))
    return recorded_rows(config) * row * torch.float32.itemsize


def cache_room(free: float, working: float) -> float:
    """Bytes for a rank's caches, of those ``free`` beside weights, if a chunk takes ``working``."""
    return _SHARE * (free - working)
