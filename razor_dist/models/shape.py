"""The sizes of a model that caches, plans and head maps depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from razor_dist.models.alibi import is_alibi

_BLOOM_TRAINED = 2048


@dataclass(frozen=True)
class ModelShape:
    """Sizes read from a transformers configuration.

    Attributes
    ----------
    layers, query_heads, kv_heads, head_dim, vocab_size : int
        As the names say; heads are per layer.
    max_positions : int
        Longest context, in tokens, that the model was made for.
    alibi : bool
        Whether its heads are biased by distance, which has no last position.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    alibi: bool = False

    def __post_init__(self) -> None:
        assert self.query_heads % self.kv_heads == 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ModelShape:
        """Read the sizes of ``config``."""
        c: Any = config
        query_heads = c.num_attention_heads
        return cls(
            layers=c.num_hidden_layers,
            query_heads=query_heads,
            kv_heads=getattr(c, "num_key_value_heads", None) or query_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // query_heads,
            vocab_size=c.vocab_size,
            max_positions=max_positions(config),
            alibi=is_alibi(config),
        )


def max_positions(config: PretrainedConfig) -> int:
    """The longest context, in tokens, that a model was made for.

    ALiBi models have no table of positions, and name the length they were trained with in their
    own ways; BLOOM's files do not always name it.
    """
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    assert config.model_type == "bloom", "every other model names its context"
    return _BLOOM_TRAINED
