"""The sizes of a model that caches, plans and head maps depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes read from a transformers configuration.

    Attributes
    ----------
    layers, query_heads, kv_heads, head_dim, vocab_size : int
        As the names say; heads are per layer.
    max_positions : int
        Longest context, in tokens, that the model was made for.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int

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
            max_positions=c.max_position_embeddings,
        )
