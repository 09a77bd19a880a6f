"""The sizes of a model that caches, plans and head maps depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from razor_dist.config.errors import ModelError
from razor_dist.models.adapters import is_alibi

_BLOOM_TRAINED = 2048
_BEYOND_CHUNK = (
    "its dual chunk attention is ordinary attention up to there and is not supported beyond; "
    "without dual_chunk_attention_config in its config.json, longer texts are served with ordinary "
    "attention, as transformers does"
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes read from a transformers configuration; heads are per layer."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int  # longest context, in tokens, that the model was made for and is served
    alibi: bool = False  # heads are biased by distance, which has no last position
    beyond: str = ""  # why a model that was made for more is served no further; else empty

    def __post_init__(self) -> None:
        assert self.query_heads % self.kv_heads == 0

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ModelShape:
        c: Any = config
        query_heads = c.num_attention_heads
        positions, beyond = max_positions(config), ""
        chunk = dual_chunk_length(config)
        if chunk is not None and chunk < positions:
            positions, beyond = chunk, _BEYOND_CHUNK
        return cls(
            layers=c.num_hidden_layers,
            query_heads=query_heads,
            kv_heads=getattr(c, "num_key_value_heads", None) or query_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // query_heads,
            vocab_size=c.vocab_size,
            max_positions=positions,
            alibi=is_alibi(config),
            beyond=beyond,
        )


def max_positions(config: PretrainedConfig) -> int:
    """The longest context, in tokens, that a model was made for.

    ALiBi models have no table of positions, and name the length they were trained with in their
    own ways; BLOOM's files do not always name it. With YaRN the context is a multiple of the
    original one, whether or not ``max_position_embeddings`` names it (vLLM reads files so, too).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("factor"):
        return int(rope["factor"] * rope["original_max_position_embeddings"])
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    assert config.model_type == "bloom", "every other model names its context"
    return _BLOOM_TRAINED


def dual_chunk_length(config: PretrainedConfig) -> int | None:
    """The number of tokens up to which dual chunk attention is ordinary; None for models without.

    Qwen's 1M models were trained on 256K tokens and reach further by dual chunk attention (arXiv
    2402.17463): it cuts a text into chunks of ``chunk_size - local_size`` tokens and gives keys of
    other chunks such positions that no distance exceeds ``chunk_size``. Within one chunk nothing
    changes. transformers does not know the field and attends as usual at any length. Raise
    `ModelError` if ``chunk_size`` and ``local_size`` are not integers, the first the larger one.
    """
    fields = getattr(config, "dual_chunk_attention_config", None)
    if fields is None:
        return None
    match fields:
        case {"chunk_size": int(chunk), "local_size": int(local)} if 0 <= local < chunk:
            return chunk - local
    raise ModelError(
        "dual_chunk_attention_config in config.json must have integers chunk_size and local_size, "
        f"the first larger than the second; got {fields!r}"
    )
