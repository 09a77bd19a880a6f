"""Dual chunk attention in a model: its settings, and positions that restart in every chunk.

With it, Qwen's 1M models serve longer texts than they were trained on
(`razor_dist.kernels.dual_chunk`). transformers ignores the field and attends as usual at any
length. Here queries and keys are rotated by ``position mod chunk``, and attention rotates queries
further for keys of other chunks. Within the first chunk nothing changes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.kernels.dual_chunk import DualChunk

# Model types of which Qwen publishes configurations with dual chunk attention.
_DUAL_CHUNK = ("qwen2", "qwen3", "qwen3_moe")


def dual_chunk_sizes(config: PretrainedConfig) -> tuple[int, int, int] | None:
    """Sizes of dual chunk attention in tokens, as in `DualChunk`; None for models without it.

    They are ``chunk_size - local_size``, the length of a chunk; ``chunk_size``; and
    ``original_max_position_embeddings``, or 0. Raise `ModelError` if the field is malformed, or
    unknown for the model's type. A ``sparse_attention_config`` is ignored: attention is exact.
    """
    fields = getattr(config, "dual_chunk_attention_config", None)
    if fields is None:
        return None
    match fields:
        case {"chunk_size": int(size), "local_size": int(local)} if 0 <= local < size:
            original = fields.get("original_max_position_embeddings", 0)
        case _:
            raise ModelError(
                "dual_chunk_attention_config in config.json must have integers chunk_size and "
                f"local_size, the first larger than the second; got {fields!r}"
            )
    if not isinstance(original, int) or 0 < original < size - local or original < 0:
        raise ModelError(
            "original_max_position_embeddings in dual_chunk_attention_config must be 0, or an "
            f"integer of at least chunk_size - local_size ({size - local}); got {original!r}"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in _DUAL_CHUNK or rope != "default":
        raise ModelError(
            "dual_chunk_attention_config in config.json is for models of type "
            f"{', '.join(_DUAL_CHUNK)} with plain rotary embeddings; this one is of type "
            f"{config.model_type!r}, and its rope_type is {rope}"
        )
    return size - local, size, original


class DualChunkRope(nn.Module):
    """A model's rotary embedding ``stock``, applied to positions modulo the chunk length."""

    def __init__(self, stock: Any, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self.stock, self._sizes = stock, sizes

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each ``[B, T, R]``; ``position_ids`` is int64 ``[B, T]``."""
        found: tuple[Tensor, Tensor] = self.stock(x, position_ids % self._sizes[0])
        return found

    @property
    def dual(self) -> DualChunk:
        return DualChunk(*self._sizes, self.stock.inv_freq.float())


def count_within_chunks(model: PreTrainedModel) -> None:
    """Make a model with dual chunk attention use `DualChunkRope`; leave other models alone."""
    sizes, body = dual_chunk_sizes(model.config), model.base_model
    if sizes is not None:
        body.rotary_emb = DualChunkRope(body.rotary_emb, sizes)


def dual_chunk_of(body: nn.Module) -> DualChunk | None:
    """The dual chunk attention of a ``base_model``, after `count_within_chunks`; None without."""
    rope = getattr(body, "rotary_emb", None)
    return rope.dual if isinstance(rope, DualChunkRope) else None


def check_one_chunk(body: nn.Module, tokens: int) -> None:
    """Raise `ConfigError` for a text of several chunks, for attention that does not know chunks."""
    dual = dual_chunk_of(body)
    if dual is not None and tokens > dual.length:
        raise ConfigError(
            f"a sample of {tokens} tokens is longer than one chunk of the model's dual chunk "
            f"attention, {dual.length} tokens; heads are measured on shorter ones"
        )
