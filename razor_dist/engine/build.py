"""From settings to one rank's engine: the model, its weights or a share of them, its caches."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from razor_dist.cache.policy import StreamingPolicy, saves_from
from razor_dist.config.errors import ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import capacity
from razor_dist.engine.advice import about_settings
from razor_dist.engine.checks import check_settings
from razor_dist.engine.core import EngineCore
from razor_dist.engine.decode_mode import run_without_attention, share_short_steps
from razor_dist.engine.device import (
    kv_dtype_name,
    ring_of,
    torch_dtype,
    torch_kv_dtype,
    warn_of_kv_dtype,
)
from razor_dist.engine.graph import recorder_of
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.tape import Tape
from razor_dist.engine.warm_up import warm_up
from razor_dist.heads.decision import HeadRoles
from razor_dist.heads.head_map import HeadMap, default_head_map
from razor_dist.heads.sources import source_heads
from razor_dist.kernels.chosen import BlockChoice
from razor_dist.kernels.linear import use_int8_linear
from razor_dist.models.loader import (
    dtype_name,
    eos_token_ids,
    layer_classes,
    load_model,
    model_fingerprint,
    read_config,
    settings_of,
    stored_dtype,
    weights_fingerprint,
)
from razor_dist.models.registry import resolve_model
from razor_dist.models.shape import ModelShape, experts_of
from razor_dist.models.slower_half import slower_half
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.ring import RingAttention
from razor_dist.parallel.zero import ShardedWeights, import_deepspeed, join_ranks
from razor_dist.prefix.index import Tier
from razor_dist.prefix.store import PrefixStore
from razor_dist.prefix.tiers import Tiers
from razor_dist.prefix.transfer import PART_BYTES, Transfers
from razor_dist.protocol.messages import EngineInfo

log = logging.getLogger(__name__)

# Numbers of each weight by which ranks compare theirs. Each may be a page of a file to read.
_FEW_SAMPLES = 8


@dataclass(frozen=True)
class Loaded:
    model: PreTrainedModel  # with our attention
    head_map: HeadMap
    roles: HeadRoles
    eos_token_ids: tuple[int, ...]
    weights: str  # their fingerprint, if prefixes are kept beyond the caches
    about: dict[str, object]  # what all ranks must have loaded alike, by name; empty for one rank
    # This rank's part of the weights, if they are sharded: the model cannot run yet.
    shares: ShardedWeights | None


@contextmanager
def _in_turn(model: PretrainedConfig) -> Iterator[None]:
    """Let one rank of a host at a time load a mixture of experts, whose experts it copies.

    Ranks of one host have met in a file (`init_distributed`); those of torchrun have none, and load
    at once. A rank that dies lets go of the lock.
    """
    met = os.environ.get("RAZOR_RENDEZVOUS", "")
    if not experts_of(model) or not met.startswith("file://"):
        yield
        return
    with open(f"{met.removeprefix('file://')}.loading", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def load(config: EngineConfig, comm: Communicator, device: torch.device) -> Loaded:
    """Load the model on one rank; no rank waits for another, except `_in_turn`.

    Raises `ConfigError`, `ModelError` or `HeadMapError` where these do not fit together.
    """
    dtype = torch_dtype(config, device)
    path = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    head_map = check_settings(config, path, device)
    if config.weights != "replicated":  # found to be broken now, not after minutes of loading
        import_deepspeed(device, use=f"weights: {config.weights} needs", extra="zero3")
        join_ranks(device, config.collective_timeout)
    if comm.rank == 0 and config.attention == "razor" and config.head_map is None:
        chosen = default_head_map(config.model)
        if chosen.parent == path:
            log.info("the head map is the model folder's own, %s", chosen)
    shares, fingerprint, cpu = None, "", torch.device("cpu")
    whole = config.weights == "replicated"
    # Else on the CPU, as views of the mapped files where they can be, of which a rank then reads
    # its share.
    where, kind = (device, dtype) if whole else (cpu, stored_dtype(path))
    with nullcontext() if whole else _in_turn(read_config(path, **config.model_options)):
        model = load_model(path, device=where, dtype=kind, **config.model_options)
        sources = source_heads(config, head_map, model.config)
        roles = HeadRoles(head_map.retrieval, head_map.windows, sources)
        about = {} if comm.size == 1 else _about_rank(model, roles, dtype)
        if not whole:
            if config.keeps_prefixes:
                fingerprint = weights_fingerprint(model)
            shares = ShardedWeights(
                model,
                device,
                dtype=dtype,
                offload=config.weights == "zero3-offload",
                group=comm.group,
                together=layer_classes(model),
            )
    if config.weight_dtype == "int8":
        packed = use_int8_linear(model) / model.num_parameters()
        if comm.rank == 0 and packed < 0.5:  # or most of it is what it was
            log.warning(
                "weight_dtype: int8 packs linear layers, which have %.0f%% of this model's "
                "parameters; the others, such as a mixture's experts, stay in fp32",
                100 * packed,
            )
    ends = _end_ids(path, model.config.vocab_size, warn=comm.rank == 0)
    return Loaded(model, head_map, roles, ends, fingerprint, about, shares)


def _about_rank(model: PreTrainedModel, roles: HeadRoles, dtype: torch.dtype) -> dict[str, object]:
    """Return what tells one rank's engine from another's, beside its settings."""
    return {
        "head map": hashlib.sha256(repr(roles).encode()).hexdigest(),
        "config.json": model_fingerprint(model.config),
        "weights": weights_fingerprint(model, samples=_FEW_SAMPLES),
        "dtype": dtype_name(dtype),
    }


def _end_ids(path: Path, vocab_size: int, *, warn: bool) -> tuple[int, ...]:
    """The end-of-sequence ids of a model folder, without those that no logit belongs to."""
    ids = eos_token_ids(path)
    known = tuple(token for token in ids if 0 <= token < vocab_size)
    if warn and known != ids:
        unknown = ", ".join(str(token) for token in ids if token not in known)
        log.warning(
            "eos_token_id %s is ignored: the model has logits for tokens 0 to %d only",
            unknown,
            vocab_size - 1,
        )
    return known


@dataclass(frozen=True)
class RankEngine:
    runner: ModelRunner
    core: EngineCore  # of use on rank 0 only
    info: EngineInfo


def build_engine(config: EngineConfig, comm: Communicator, device: torch.device) -> RankEngine:
    """A rank's engine, where no other rank can have failed: `load`, `start` and `warmed_up`."""
    return warmed_up(start(config, load(config, comm, device), comm))


def start(config: EngineConfig, loaded: Loaded, comm: Communicator) -> RankEngine:
    """Return one rank's engine; with sharded weights, all ranks start theirs together."""
    if loaded.shares is not None:
        loaded.shares.gather_when_run(partial(comm.note, "weights"))
    check_model(loaded.model, config.model)
    model, head_map, roles = loaded.model, loaded.head_map, loaded.roles
    ends, weights = loaded.eos_token_ids, loaded.weights
    engine = make_engine(model, config, roles, comm, eos_token_ids=ends, weights=weights)
    if comm.rank == 0:
        shared = engine.runner.decode == "tensor"
        longest = engine.core.max_model_len
        for sentence in about_settings(
            config, engine.runner.shape, head_map, longest, shared=shared
        ):
            log.warning("%s", sentence)
    return engine


def warmed_up(engine: RankEngine) -> RankEngine:
    """Do on CUDA what the first requests would wait for; all ranks call this together."""
    if engine.runner.device.type == "cuda":
        warm_up(engine.runner)
    return engine


def check_model(model: PreTrainedModel, name: str) -> None:
    """Run one token through a model; `ModelError` if its attention is not one we compute."""
    try:
        run_without_attention(model)
    except NotImplementedError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error


def make_engine(
    model: PreTrainedModel,
    config: EngineConfig,
    roles: HeadRoles,
    comm: Communicator,
    *,
    eos_token_ids: tuple[int, ...],
    ring: RingAttention | None = None,
    weights: str = "",
) -> RankEngine:
    """Return one rank's engine around a model that is loaded with our attention.

    ``ring`` takes the place of the one that the settings name. ``weights`` is their fingerprint, if
    it cannot be had from the model. Raises `ConfigError` if settings and model do not fit together,
    or the caches into memory.
    """
    shape = ModelShape.from_config(model.config)
    device, dtype = model.device, model.dtype
    kv_dtype = torch_kv_dtype(config, dtype)
    if comm.rank == 0:
        warn_of_kv_dtype(device, dtype, kv_dtype)
    recorder = recorder_of(config, comm, device)
    mode = share_short_steps(config, model, shape, roles, comm, recorder)
    layout, length = mode.layout, capacity.context_length(config, shape)
    chunk = capacity.chunk_length(config, shape, layout.windows, length, comm.size, device)
    sizes = capacity.RankSizes(config, shape, layout, comm.size, dtype)
    free = capacity.free_memory(comm, device) - capacity.prefix_bytes(config, device.type)
    free -= capacity.recorded_bytes(model, shape, config) if isinstance(recorder, Tape) else 0
    room = capacity.cache_room(free, sizes.working_bytes(length, chunk))
    if device.type == "cuda":  # on CPU what is allocated takes no memory until it is written
        # The least that a prompt needs beside them.
        sizes.check_one_fits(length, free - sizes.window_bytes(length, chunk))
    cache = sizes.caches(length, room)
    ring = ring or ring_of(config, device, dtype, kv_dtype)
    try:
        runner = ModelRunner(model, mode, cache, comm, ring, recorder, roles.sources)
    except (RuntimeError, MemoryError) as error:
        # torch.OutOfMemoryError on cuda, an allocator's error on CPU, numpy's
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise sizes.does_not_fit(length, error) from error
    if config.retrieval_share:
        slow = slower_half(model, shape.head_dim).to(device)
        runner.caches.choice = BlockChoice(config.retrieval_share, slow)
    if comm.size > 1 and recorder is not None:
        runner.patience = config.collective_timeout
    core = EngineCore(
        runner,
        config,
        chunked_prefill_size=chunk,
        eos_token_ids=eos_token_ids,
        seed=config.seed if config.seed is not None else secrets.randbits(62),
        load_tokenizer=partial(_tokenizer, config),
    )
    info = _info(sizes, runner, eos_token_ids, roles.retrieval, mode.reason)
    if config.keeps_prefixes:
        about = _about(config, model, roles, weights or weights_fingerprint(model))
        folder = _keep_prefixes(config, about, runner, core)
        info.prefix_folder = None if folder is None else str(folder)
    return RankEngine(runner, core, info)


def _info(
    sizes: capacity.RankSizes,
    runner: ModelRunner,
    eos_token_ids: tuple[int, ...],
    retrieval: Sequence[Sequence[bool]],
    decode_reason: str,
) -> EngineInfo:
    config, shape, size = sizes.config, runner.shape, runner.comm.size
    streaming = {
        policy: sum(sizes.layout.streaming_in_layers(index))
        for index, policy in enumerate(sizes.policies)
    }
    return EngineInfo(
        max_model_len=runner.config.max_tokens,
        vocab_size=shape.vocab_size,
        world_size=size,
        model=config.model,
        eos_token_ids=tuple(eos_token_ids),
        attention=config.attention,
        prefill=config.prefill,
        decode=runner.decode,
        decode_reason=decode_reason,
        kv_dtype=kv_dtype_name(runner.config.dtype),
        retrieval_fraction=sum(map(sum, retrieval)) / (shape.layers * shape.kv_heads),
        source_heads=runner.source_heads.count,
        kv_reserved_bytes_per_rank=runner.caches.reserved_bytes,
        saves_from_tokens=saves_from(streaming, 1 if runner.decode == "tensor" else size),
        page_size=runner.config.page_size,
        num_pages=runner.config.num_pages * size,
    )


def _about(
    config: EngineConfig, model: PreTrainedModel, roles: HeadRoles, weights: str
) -> dict[str, Any]:
    """Return all that stored prefixes depend on."""
    return {
        "weights": weights,
        "model": settings_of(model.config),
        "retrieval": [list(map(int, row)) for row in roles.retrieval],
        "windows": roles.windows,
        "policy": asdict(StreamingPolicy.of(config)),
        "dtype": dtype_name(model.dtype),
        "kv_dtype": kv_dtype_name(torch_kv_dtype(config, model.dtype)),
        **({} if config.weight_dtype == "auto" else {"weight_dtype": config.weight_dtype}),
        **({"retrieval_share": config.retrieval_share} if config.retrieval_share else {}),
    }


def _keep_prefixes(
    config: EngineConfig, about: dict[str, Any], runner: ModelRunner, core: EngineCore
) -> Path | None:
    """Keep prefixes in host memory and on disk too; return the store's folder.

    ``about`` says what they depend on.
    """
    caches, comm = core.scheduler.room, runner.comm
    store = None if config.prefix_store is None else PrefixStore(Path(config.prefix_store), about)
    fingerprint = "" if store is None else store.fingerprint
    folder = None if store is None else store.folder
    runner.transfers = Transfers(comm, runner.caches, folder)
    if comm.rank:
        return folder
    room: dict[Tier, float] = {}
    if config.prefix_host_gb:
        room["host"] = config.prefix_host_gb * 2**30
    if store is not None:
        room["disk"] = (config.prefix_store_gb or math.inf) * 2**30

    def state_parts(length: int) -> list[tuple[int, int]]:
        batches = [cache.batches(length, PART_BYTES) for cache in runner.caches.streaming]
        return [(of[0].stop, len(of)) for of in batches]

    index = caches.prefix_cache.index
    caches.tiers = Tiers(caches.accounts, index, fingerprint, store, room, state_parts)
    return folder


def _tokenizer(config: EngineConfig) -> PreTrainedTokenizerBase | None:
    trust = config.trust_remote_code
    folder = resolve_model(config.model, trust_remote_code=trust)
    return load_tokenizer(folder, trust_remote_code=trust)
