"""The sizes of a model that caches, plans and head maps depend on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from razor_dist.config.errors import ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.models.adapters import is_alibi
from razor_dist.models.dual_chunk import dual_chunk_sizes

_BLOOM_TRAINED = 2048
_CONTEXT = ("max_position_embeddings", "max_seq_len", "seq_length")  # fields for the context


@dataclass(frozen=True)
class ModelShape:
    """Sizes read from a transformers configuration; heads are per layer."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int  # longest context, in tokens, that the model was made for
    alibi: bool = False  # heads are biased by distance, so that there is no last position
    dual_chunk: int | None = None  # tokens of a chunk, if contexts may have several chunks
    rotary: bool = True  # False for models that are known to have no rotary embeddings

    def __post_init__(self) -> None:
        assert self.query_heads % self.kv_heads == 0

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ModelShape:
        c: Any = config
        query_heads = c.num_attention_heads
        positions, dual = max_positions(config), dual_chunk_sizes(config)
        return cls(
            layers=c.num_hidden_layers,
            query_heads=query_heads,
            kv_heads=getattr(c, "num_key_value_heads", None) or query_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // query_heads,
            vocab_size=c.vocab_size,
            max_positions=positions,
            alibi=is_alibi(config),
            dual_chunk=dual[0] if dual is not None and dual[0] < positions else None,
            rotary=_is_rotary(config),
        )


def _is_rotary(config: PretrainedConfig) -> bool:
    """False if transformers' code for this model has no rotary embeddings; True for other code."""
    try:
        own = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    except ImportError:  # a package is missing, which loading the model will report
        return True
    return own is None or any("rotary" in name.lower() for name in dir(sys.modules[own.__module__]))


def experts_of(config: PretrainedConfig) -> int:
    """The number of experts in a mixture's layer; 0 for another model."""
    found: int = _of_mixture(config, "num_local_experts", "num_experts", "moe_num_experts")
    return found


def routed_of(config: PretrainedConfig) -> float:
    """The number of experts that a token is sent to in a layer; 0 if no field names it.

    HunYuan's files may have a number for each layer; this is their mean.
    """
    found = _of_mixture(config, "num_experts_per_tok", "moe_topk", "moe_top_k")
    return sum(found) / len(found) if isinstance(found, list) else found


def _of_mixture(config: PretrainedConfig, *names: str) -> Any:
    """The first of these fields that is set, here or in ``ffn_config`` (DBRX); 0 if none is."""
    for part in (config, getattr(config, "ffn_config", None)):
        for name in names:
            if value := getattr(part, name, None):
                return value
    return 0


def max_positions(config: PretrainedConfig) -> int:
    """The longest context, in tokens, that a model was made for.

    ALiBi models have no table of positions, and their files name the length of their training by
    several fields; BLOOM's may not name it. With YaRN the context is a multiple of the original
    one, whether or not ``max_position_embeddings`` says so. Command R's is its
    ``model_max_length``, as vLLM reads it, and Vicuna's, with linear frequencies, its
    ``max_sequence_length``. Raise `ModelError` if no field names it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("factor"):
        return int(rope["factor"] * rope["original_max_position_embeddings"])
    named = getattr(config, "model_max_length", None)
    if config.model_type == "cohere" and isinstance(named, int):
        return named
    named = getattr(config, "max_sequence_length", None)
    if rope.get("rope_type") == "linear" and isinstance(named, int):
        return max(named, getattr(config, "max_position_embeddings", None) or 0)
    for name in _CONTEXT:
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    if config.model_type == "bloom":
        return _BLOOM_TRAINED
    raise ModelError(
        f"config.json of the model of type {config.model_type!r} does not say its context: it has "
        f"none of {', '.join(_CONTEXT)}"
    )


def share_refusal(config: EngineConfig, shape: ModelShape) -> str | None:
    """The reason why retrieval heads cannot choose blocks of keys; None if they can."""
    if not config.retrieval_share:
        return None
    if config.attention == "streaming":
        return "is of retrieval heads, and with attention: streaming there are none"
    if config.kv_dtype == "int4":
        return "reads keys' slower dimensions, which kv_dtype: int4 mixes with the others"
    if shape.alibi:
        return f"is for models with rotary embeddings, and {config.model} has ALiBi"
    if not shape.rotary:
        return f"is for models with rotary embeddings, and {config.model} has none"
    length, chunk = config.max_model_len or shape.max_positions, shape.dual_chunk
    if chunk is not None and length > chunk:
        return (
            f"does not know the dual chunk attention of {config.model}, which begins after "
            f"{chunk} tokens, and max_model_len is {length}"
        )
    return None
