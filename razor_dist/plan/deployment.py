"""A deployment as the engine would build it, by the engine's own functions."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.cache.caches import CacheConfig
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.capacity import (
    RankSizes,
    cache_room,
    cached_tail,
    chunk_length,
    recorded_bytes,
)
from razor_dist.engine.checks import check_shape
from razor_dist.engine.decode_mode import why_replicated
from razor_dist.engine.device import torch_dtype
from razor_dist.engine.tensor_parallel import TensorParallel, is_compact
from razor_dist.heads.decision import spread
from razor_dist.heads.head_map import HeadMap, default_head_map, head_map_of
from razor_dist.heads.layout import HeadLayout, HeadShare
from razor_dist.kernels.quantized import row_bytes
from razor_dist.models.loader import model_fingerprint, model_from_config, read_config
from razor_dist.models.registry import config_folder
from razor_dist.models.shape import ModelShape, experts_of, routed_of
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.zigzag import Chunk, chunks
from razor_dist.plan.allocations import Allocations

# Of the KV heads: what the paper takes for contexts of a million tokens (28 % + 2 %).
ASSUMED_FRACTION = 0.3

META = torch.device("meta")


@dataclass(frozen=True)
class StreamingHeads:
    policy: StreamingPolicy
    per_layer: tuple[int, ...]  # KV heads

    @property
    def rows(self) -> int:
        return sum(self.per_layer)


def _choose_heads(
    config: EngineConfig, shape: ModelShape, fingerprint: str, fraction: float | None
) -> tuple[HeadMap, str, str | None]:
    """The head map, a guess if none exists, and `source` and `missing` of the `Deployment`."""
    name, by_map = config.head_map, config.attention == "razor"
    exists = name is not None and Path(name).expanduser().exists()
    missing = name if by_map and not exists else None
    if fraction is not None:
        if not by_map or exists:
            given = f"head_map is {name}" if by_map else f"attention is {config.attention}"
            raise ConfigError(
                f"--retrieval stands in place of a head map, but {given}; leave one out, or say "
                "--head-map none --attention razor"
            )
        if not 0 < fraction <= 1:
            raise ConfigError(f"retrieval must be above 0 and at most 1, got {fraction:g}")
        source, missing = f"{fraction:.0%} of the KV heads, spread evenly", None
    elif missing or (by_map and name is None and not _has_head_map(config.model)):
        fraction = ASSUMED_FRACTION
        source = f"assumed: {fraction:.0%} of the KV heads, spread evenly"
        if name is None:
            source += "; no head map was given and none is shipped for this model"
    else:
        source = f"head map {name or 'shipped with the model'}"
        if not by_map:
            source = f"attention: {config.attention}"
        return head_map_of(config, shape, fingerprint), source, None
    retrieval = spread(fraction, shape.layers, shape.kv_heads)
    return replace(HeadMap.uniform("full", shape), retrieval=retrieval), source, missing


def _has_head_map(model: str) -> bool:
    try:
        default_head_map(model)
    except HeadMapError:
        return False
    return True


class Shares(NamedTuple):
    """Savings and costs of ranks that share short steps; all 0 if they do not."""

    spared: int  # parameters that a token does not wait for, since other ranks multiply them
    copied: int  # bytes of weights that the rank with most of them keeps a second time
    sums: int  # sums of hidden states over all ranks in a shared step


@dataclass(frozen=True)
class Weights:
    """Sizes of a model's parameters, counted in the model's own class on the meta device."""

    parameters: int  # each counted once, also where it serves twice (tied embeddings)
    nbytes: int  # of parameters and buffers, in the dtype of the deployment, and 8-bit copies
    # The bytes of these that may be pages of files: the parameters without stacked experts, which
    # transformers copies while it loads them.
    mapped: int
    # Parameters that multiply every token: all matrices but the embedding and the output head, and
    # only those experts that a token is sent to.
    matmul: int
    head: int  # parameters of the output head, which multiplies the last token alone
    # Bytes that one token's step reads: all without the embedding, unless that is the output head,
    # too, and only those experts that the token is sent to.
    step_bytes: int
    chunk_bytes: int  # bytes that a prompt's chunk reads, whose tokens are sent to all experts
    recorded: int  # bytes that recorded decode steps keep on CPU

    @classmethod
    def of(cls, model: PreTrainedModel, config: EngineConfig) -> Weights:
        """Count a model's parameters.

        With 8-bit weights, a linear layer has two 8-bit copies, for few rows and for many
        (`razor_dist.kernels.linear`), of which a step reads one.
        """
        int8 = config.weight_dtype == "int8"
        embedding: nn.Module = model.get_input_embeddings()
        table, head = embedding.weight, model.get_output_embeddings().weight
        assert isinstance(table, torch.Tensor) and isinstance(head, torch.Tensor)
        experts = experts_of(model.config)
        routed = routed_of(model.config)
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        linear = [m.weight for m in model.modules() if int8 and isinstance(m, nn.Linear)]
        copied = {id(weight): weight.numel() for weight in linear}
        matmul, step, chunk, private = 0.0, float(buffers), buffers, 0
        for name, parameter in model.named_parameters():
            of_experts = experts > 0 and ".experts." in name
            share = routed / experts if routed and of_experts else 1.0
            private += parameter.nbytes if of_experts and parameter.dim() > 2 else 0
            if parameter is not table or table is head:
                read = copied.get(id(parameter), parameter.nbytes)
                step, chunk = step + read * share, chunk + read
            if parameter.dim() >= 2 and parameter is not table and parameter is not head:
                matmul += parameter.numel() * share
        held = sum(p.nbytes for p in model.parameters())
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            nbytes=buffers + held + 2 * sum(copied.values()),
            mapped=held - private,
            matmul=round(matmul),
            head=head.numel(),
            step_bytes=round(step),
            chunk_bytes=chunk,
            recorded=recorded_bytes(model, ModelShape.from_config(model.config), config),
        )


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(lists)


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Remove all layers of a model but those ``kept``."""
    layers = layers_of(model)
    chosen = [layers[layer] for layer in kept]
    del layers[:]
    layers.extend(chosen)
    module: Any
    for index, layer in enumerate(chosen):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    model.config.num_hidden_layers = len(kept)
    return model


@dataclass(frozen=True)
class Deployment:
    config: EngineConfig
    model: PretrainedConfig
    shape: ModelShape
    kind: Literal["cuda", "cpu"]  # of the ranks' device
    head_map: HeadMap
    source: str  # of the head map, in words
    stored: torch.dtype | str | None  # dtype of the weights' files, if config.json says it
    # The head map that the settings name, if it does not exist; then `head_map` is a guess.
    missing: str | None = None
    shared: bool = False  # the ranks share short steps (tensor-parallel decode)

    @classmethod
    def of(
        cls, config: EngineConfig, kind: Literal["cuda", "cpu"], fraction: float | None = None
    ) -> Deployment:
        """Read the model's ``config.json`` and the head map.

        With a ``fraction``, that share of the KV heads are retrieval heads, without a head map.
        Raise the engine's errors, and `ConfigError` for a fraction beside a head map.
        """
        if config.device not in ("auto", kind):
            raise ConfigError(f"device is {config.device}, but the device of the plan is a {kind}")
        if config.weights != "replicated":
            raise ConfigError(
                f"weights is {config.weights}, but plan knows replicated weights only; set "
                "RAZOR_WEIGHTS=replicated to plan for those"
            )
        folder = config_folder(config.model)
        model = read_config(folder, **config.model_options)
        stored = model.dtype  # before transformers changes it, with every model made from it
        shape = ModelShape.from_config(model)
        heads, source, missing = _choose_heads(config, shape, model_fingerprint(model), fraction)
        found = cls(config, model, shape, kind, heads, source, stored, missing)
        return replace(found, shared=config.decode == "tensor" and found.not_shared is None)

    @cached_property
    def refusal(self) -> str | None:
        """The engine's reason to refuse the settings on such a device; None if it takes them."""
        try:
            check_shape(self.config, self.shape, torch.device(self.kind))
        except ConfigError as error:
            return str(error)
        return None

    @property
    def world_size(self) -> int:
        return self.config.world_size

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.config, torch.device(self.kind))

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.sizes.kv_dtype

    @property
    def sizes(self) -> RankSizes:
        return RankSizes(self.config, self.shape, self.layout, self.world_size, self.dtype)

    @property
    def chunked_prefill_size(self) -> int:
        length = self.config.max_model_len or self.shape.max_positions
        windows, device = self.layout.windows, torch.device(self.kind)
        return chunk_length(self.config, self.shape, windows, length, self.world_size, device)

    def chunks(self, prompt: int) -> list[Chunk]:
        return chunks(0, prompt, self.chunked_prefill_size, self.world_size)

    def cache(self, max_model_len: int, free: float = math.inf) -> CacheConfig:
        """A rank's caches for ``max_model_len``, in ``free`` bytes beside the weights."""
        working = self.sizes.working_bytes(max_model_len, self.chunked_prefill_size)
        return self.sizes.caches(max_model_len, cache_room(free, working))

    def one_cache(self, layout: HeadLayout, tokens: int) -> CacheConfig:
        """Caches of ``layout`` for one sequence of ``tokens`` tokens."""
        alone = self.config.model_copy(update={"kv_tokens": None, "max_num_seqs": 1})
        return replace(self.sizes, config=alone, layout=layout).caches(tokens)

    @property
    def tail(self) -> int:
        """Tokens that streaming caches keep after their windows have left them."""
        return cached_tail(self.config)

    @property
    def exact(self) -> bool:
        return self.config.prefill == "exact"

    @property
    def retrieval_per_layer(self) -> tuple[int, ...]:
        return tuple(sum(row) for row in self.head_map.retrieval)

    def share(self, rank: int) -> HeadShare | None:
        """A rank's part with tensor-parallel decode; None without."""
        if not self.shared:
            return None
        return HeadShare(rank, self.world_size, self.shape.group, is_compact(self._first_layer))

    @cached_property
    def not_shared(self) -> str | None:
        """The reason why ranks cannot share short steps; None if they can."""
        if self.world_size == 1:
            return "there is one rank"
        return why_replicated(self.config, self._first_layer)

    @cached_property
    def layout(self) -> HeadLayout:
        """The layout of the rank with the fullest streaming caches."""
        found = self.layouts[0]
        most = [sum(map(len, rows)) for rows in zip(*found.kept, strict=True)]
        return self.layouts[most.index(max(most))] if most else found

    @cached_property
    def layouts(self) -> list[HeadLayout]:
        """Layouts by rank; one for all ranks unless they share heads."""
        return self.layouts_of(range(self.shape.layers))

    def layouts_of(self, layers: Sequence[int]) -> list[HeadLayout]:
        """`layouts` of some layers of the model."""
        retrieval = [self.head_map.retrieval[layer] for layer in layers]
        windows = self.head_map.windows
        windows = windows and tuple(windows[layer] for layer in layers)
        return [
            HeadLayout.from_decision(retrieval, META, windows, self.share(rank))
            for rank in range(self.world_size if self.shared else 1)
        ]

    @cached_property
    def shares(self) -> Shares:
        if not self.shared:
            return Shares(0, 0, 0)
        model, by_rank, copied, whole, sums = self.meta_model(), [], [], 0, 0
        for layout in self.layouts:
            with Allocations() as made:
                parts = layout, Communicator(None), self.kind
                tensor = TensorParallel(model, self.shape, *parts)
            by_rank.append(tensor.parameters)
            copied.append(made.live)
            whole, sums = tensor.whole_parameters, tensor.sums
            tensor.remove()
        spared = whole - sum(max(of_layer) for of_layer in zip(*by_rank, strict=True))
        return Shares(spared, max(copied), sums)

    @cached_property
    def streaming(self) -> tuple[StreamingHeads, ...]:
        """The streaming heads by window, in the order of `HeadLayout.windows`."""
        policies, layers = self.sizes.policies, self.layout.streaming_in_layers
        return tuple(StreamingHeads(own, layers(index)) for index, own in enumerate(policies))

    def meta_model(self) -> PreTrainedModel:
        remote = self.config.trust_remote_code
        config = copy.deepcopy(self.model)
        return model_from_config(config, device=META, dtype=self.dtype, trust_remote_code=remote)

    @cached_property
    def _first_layer(self) -> PreTrainedModel:
        return keep_layers(self.meta_model(), [0])

    @cached_property
    def weights(self) -> Weights:
        return Weights.of(self.meta_model(), self.config)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's key and value in a retrieval head, with their scales."""
        return 2 * row_bytes(self.shape.head_dim, self.kv_dtype)

    @property
    def streaming_kv_bytes(self) -> int:
        """Bytes of a token's key and value in a streaming head."""
        return 2 * row_bytes(self.shape.head_dim, self.sizes.streaming_dtype)

    @property
    def full_kv_bytes(self) -> int:
        return self.shape.layers * self.shape.kv_heads * self.kv_bytes
