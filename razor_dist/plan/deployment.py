"""A deployment as the engine would build it: the same decisions, by its own functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.capacity import cache_config, chunk_length
from razor_dist.engine.device import torch_dtype, torch_kv_dtype
from razor_dist.engine.runner import CacheConfig
from razor_dist.engine.weights import head_map_of
from razor_dist.heads.decision import Windows, spread
from razor_dist.heads.head_map import default_head_map
from razor_dist.heads.layout import HeadLayout
from razor_dist.heads.policy import StreamingPolicy
from razor_dist.models.loader import model_fingerprint, model_from_config, read_config
from razor_dist.models.registry import config_folder
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.zigzag import Chunk, chunks

# The paper's fraction for contexts of a million tokens (28 % + 2 %), of KV heads here.
ASSUMED_FRACTION = 0.3

META = torch.device("meta")


@dataclass(frozen=True)
class StreamingHeads:
    """Streaming heads that share a policy.

    ``per_layer`` counts the KV heads of each layer.
    """

    policy: StreamingPolicy
    per_layer: tuple[int, ...]

    @property
    def rows(self) -> int:
        """KV heads of all layers together."""
        return sum(self.per_layer)


@dataclass(frozen=True)
class HeadChoice:
    """The choice of retrieval heads, and who made it.

    Attributes
    ----------
    retrieval : sequence of sequence of bool
        ``[layers][KV heads]``.
    source : str
        For people.
    missing : str or None
        The head map that the settings name, if there is none: the choice is a guess.
    selected_fraction : float or None
        Fraction of query heads that were chosen for their own scores, of a head map that says.
    windows : tuple of tuple of (int or None), optional
        For every layer and KV head, a streaming head's own window.
    """

    retrieval: Sequence[Sequence[bool]]
    source: str
    missing: str | None = None
    selected_fraction: float | None = None
    windows: Windows | None = None

    @property
    def kv_fraction(self) -> float:
        """Fraction of KV heads that keep the whole context."""
        flags = [flag for row in self.retrieval for flag in row]
        return sum(flags) / len(flags)

    @classmethod
    def of(
        cls, config: EngineConfig, shape: ModelShape, fingerprint: str, fraction: float | None
    ) -> HeadChoice:
        """Return the engine's choice, or one that keeps a ``fraction`` of the KV heads.

        Where there is no head map, a fraction is assumed: a plan comes before the map is made.

        Raises
        ------
        ConfigError
            If a fraction is given beside a head map, or out of range.
        HeadMapError
            If the head map that is named cannot be read or is another model's.
        """
        if config.attention != "razor":
            if fraction is not None:
                raise _not_beside(f"attention is {config.attention}")
            found = head_map_of(config, shape, fingerprint)
            return cls(found.retrieval, f"attention: {config.attention}")
        name = config.head_map
        missing = name if name is not None and not Path(name).expanduser().exists() else None
        if fraction is not None:
            if not 0 < fraction <= 1:
                raise ConfigError(f"retrieval must be above 0 and at most 1, got {fraction:g}")
            if name is not None and not missing:
                raise _not_beside(f"head_map is {name}")
            kept = spread(fraction, shape.layers, shape.kv_heads)
            return cls(kept, f"{fraction:.0%} of the KV heads, spread evenly")
        if missing or (name is None and not _has_head_map(config.model)):
            kept = spread(ASSUMED_FRACTION, shape.layers, shape.kv_heads)
            source = f"assumed: {ASSUMED_FRACTION:.0%} of the KV heads, spread evenly"
            if name is None:
                source += "; no head map was given and none is shipped for this model"
            return cls(kept, source, missing)
        found = head_map_of(config, shape, fingerprint)
        source = f"head map {name or 'shipped with the model'}"
        chosen = found.selected_fraction if found.selected else None
        return cls(found.retrieval, source, selected_fraction=chosen, windows=found.windows)


def _has_head_map(model: str) -> bool:
    try:
        default_head_map(model)
    except HeadMapError:
        return False
    return True


def _not_beside(given: str) -> ConfigError:
    return ConfigError(
        f"--retrieval stands in place of a head map, but {given}; leave one out, or say --head-map "
        "none --attention razor"
    )


@dataclass(frozen=True)
class Weights:
    """Sizes of a model's parameters, counted in the model's own class on the meta device.

    Attributes
    ----------
    parameters : int
        Each counted once, also where it serves twice (tied embeddings).
    nbytes : int
        Of parameters and buffers, in the dtype of the deployment.
    matmul : int
        Parameters that multiply every token: all matrices but the embedding and the output head;
        of experts, those that a token is sent to.
    head : int
        Parameters of the output head, which multiplies the last token alone.
    step_bytes : int
        Bytes that one token's step reads: all but the embedding's, of which it takes a row, unless
        that is the output head, too; and of experts, those that the token is sent to.
    """

    parameters: int
    nbytes: int
    matmul: int
    head: int
    step_bytes: int

    @classmethod
    def of(
        cls, config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
    ) -> Weights:
        """Count the parameters of a model."""
        model = model_from_config(
            config, device=META, dtype=dtype, trust_remote_code=trust_remote_code
        )
        embedding: nn.Module = model.get_input_embeddings()
        table, head = embedding.weight, model.get_output_embeddings().weight
        assert isinstance(table, torch.Tensor) and isinstance(head, torch.Tensor)
        routed = getattr(config, "num_experts_per_tok", None)
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        held = [*model.parameters(), *model.buffers()]
        matmul, step = 0.0, float(sum(buffer.nbytes for buffer in model.buffers()))
        for name, parameter in model.named_parameters():
            share = routed / experts if routed and experts and ".experts." in name else 1.0
            if parameter is not table or table is head:
                step += parameter.nbytes * share
            if parameter.dim() >= 2 and parameter is not table and parameter is not head:
                matmul += parameter.numel() * share
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            nbytes=sum(t.nbytes for t in held),
            matmul=round(matmul),
            head=head.numel(),
            step_bytes=round(step),
        )


@dataclass(frozen=True)
class Deployment:
    """A model, its settings and the ranks that it would run on.

    ``kind`` is that of the ranks' device.
    """

    config: EngineConfig
    model: PretrainedConfig
    shape: ModelShape
    decision: HeadChoice
    kind: Literal["cuda", "cpu"]

    @classmethod
    def of(
        cls, config: EngineConfig, kind: Literal["cuda", "cpu"], fraction: float | None = None
    ) -> Deployment:
        """Read the model's ``config.json`` and the head map.

        Raises
        ------
        ConfigError, ModelError, HeadMapError
            As the engine raises them.
        """
        if config.device not in ("auto", kind):
            raise ConfigError(f"device is {config.device}, but the device of the plan is a {kind}")
        if config.weights != "replicated":
            raise ConfigError(
                f"weights is {config.weights}, but plan knows replicated weights only; set "
                "RAZOR_WEIGHTS=replicated to plan for those"
            )
        folder = config_folder(config.model)
        model = read_config(folder, trust_remote_code=config.trust_remote_code)
        shape = ModelShape.from_config(model)
        decision = HeadChoice.of(config, shape, model_fingerprint(model), fraction)
        return cls(config, model, shape, decision, kind)

    @property
    def world_size(self) -> int:
        """Number of ranks, P."""
        return self.config.world_size

    @property
    def dtype(self) -> torch.dtype:
        """Number format of weights and computing."""
        return torch_dtype(self.config, torch.device(self.kind))

    @property
    def kv_dtype(self) -> torch.dtype:
        """Number format of keys and values."""
        return torch_kv_dtype(self.config, self.dtype)

    @property
    def chunked_prefill_size(self) -> int:
        """Tokens of a prompt that all ranks prefill together."""
        length = self.config.max_model_len or self.shape.max_positions
        device = torch.device(self.kind)
        return chunk_length(
            self.config, self.shape, self.layout.windows, length, self.world_size, device
        )

    def chunks(self, prompt: int) -> list[Chunk]:
        """The chunks of a prompt of so many tokens."""
        return chunks(0, prompt, self.chunked_prefill_size, self.world_size)

    def cache(self, max_model_len: int, *, bounded: bool = True) -> CacheConfig:
        """The caches that the engine would make for sequences of up to so many tokens.

        Not ``bounded``, as if ``kv_tokens`` were not set.
        """
        config = self.config if bounded else self.config.model_copy(update={"kv_tokens": None})
        return cache_config(
            config,
            self.shape,
            max_model_len,
            self.chunked_prefill_size,
            self.world_size,
            self.kv_dtype,
        )

    @property
    def exact(self) -> bool:
        """True if streaming heads attend in full at prefill."""
        return self.config.prefill == "exact"

    @property
    def retrieval_per_layer(self) -> tuple[int, ...]:
        """Retrieval KV heads of every layer."""
        return tuple(sum(row) for row in self.decision.retrieval)

    @cached_property
    def layout(self) -> HeadLayout:
        """Place of each head's keys and values, on the meta device."""
        return HeadLayout.from_decision(self.decision.retrieval, META, self.decision.windows)

    @cached_property
    def streaming(self) -> tuple[StreamingHeads, ...]:
        """The streaming heads, by window, in the order of `HeadLayout.windows`."""
        policy, found = StreamingPolicy.of(self.config), []
        for index, window in enumerate(self.layout.windows):
            per_layer = tuple(
                sum(g.rows.stop - g.rows.start for g in heads.groups if g.index == index)
                for heads in self.layout.layers
            )
            found.append(StreamingHeads(policy.with_window(window), per_layer))
        return tuple(found)

    @cached_property
    def weights(self) -> Weights:
        """Sizes of the parameters."""
        remote = self.config.trust_remote_code
        return Weights.of(self.model, self.dtype, trust_remote_code=remote)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one KV head's key and value of one token."""
        return 2 * self.shape.head_dim * self.kv_dtype.itemsize

    @property
    def full_kv_bytes(self) -> int:
        """Bytes of all heads' keys and values of one token."""
        return self.shape.layers * self.shape.kv_heads * self.kv_bytes
