"""Refuse models that cannot be served, with the reason, rather than answer wrongly."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from razor_dist.config.errors import ModelError
from razor_dist.config.rope_scaling import RopeScaling, with_attention_factor
from razor_dist.models.adapters import adapter, is_alibi
from razor_dist.models.shape import max_positions

# Model types whose LongRoPE is only two sets of frequencies (`razor_dist.models.longrope`). That of
# PhiMoE, for example, also scales the embedding by length.
_LONGROPE = ("phi3",)

# Model types for which ``rope_type`` dynamic with an ``alpha`` means frequencies that never change.
_FIXED_ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")

# Model types whose makers document YaRN for texts beyond their training.
_YARN = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")

# Model types whose layers with a sliding window differ from others only by the window. In Cohere 2
# and EXAONE 4, for example, only layers with a window have a rotary embedding.
_WINDOW_ALONE = ("ministral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")

QUANTISED = "weights are quantised; use the unquantised ones"

_SINKS = "its attention has learned sinks in the softmax"
_SHIFTED = "its first token's position is not 0, but follows from the id of its padding token"
# Model types that differ in attention or positions in ways that no configuration field tells.
_OTHER_ATTENTION = {
    "bert-generation": "its attention is bidirectional",
    "diffllama": "it subtracts two attention maps",
    "doge": "its attention mask is computed from the values",
    "emu3": "it serves images as well as text",
    "hrm_text": "its layers run several times for each token",
    "jetmoe": "its experts' queries share keys that are repeated before attention",
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), _SHIFTED),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "xmod"), _SHIFTED),
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"), _SINKS),
    "nemotron": "its layers do not hand the call's arguments on to attention",
}

# Fields of configurations whose attention differs.
_OTHER_FIELDS = {
    "attn_logit_softcapping": "its attention scores are soft-capped",
    "index_topk": "its attention chooses keys by an indexer",
    "kv_lora_rank": "latent attention (MLA) has keys and values of different widths",
}

# Fields that every model must have, also one with code of its own.
_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def check_supported(config: PretrainedConfig) -> None:
    """Refuse, by a `ModelError` with the reason, a model whose attention cannot be honoured.

    A model whose code comes with its weights (``auto_map``) is checked by its configuration here,
    and by its class in `load_model`.
    """
    for check in (_kind_reason, _shape_reason, _rope_reason, _window_reason, _layers_reason):
        if (reason := check(config)) is not None:
            raise ModelError(f"models of type {config.model_type!r} cannot be served: {reason}")


def check_class(model_class: Any) -> None:
    """Raise `ModelError` for a model class that does not call transformers' attention interface."""
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"{model_class.__name__} does not use transformers' attention interface, so its "
            "attention cannot be replaced (true of Falcon and of hybrid models)"
        )


def without_idle_window(config: PretrainedConfig) -> PretrainedConfig:
    """Remove from ``config`` a sliding window that is too long to hide a token, and return it.

    The model would pass the window to attention at every call, without effect. Raise `ModelError`
    if the configuration's class requires a window.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "sliding_window", None) is None or kinds == {"full_attention"}:
        return config
    assert _window_reason(config) is None  # check_supported comes first
    try:
        config.sliding_window = None
    except StrictDataclassError as error:
        raise ModelError(
            f"models of type {config.model_type!r} cannot be served: their sliding window cannot "
            "be turned off"
        ) from error
    if kinds:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    return config


def read_as_meant(config: PretrainedConfig) -> None:
    """Set fields of ``config`` that are in its file but that transformers does not read."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "attn_factor" in rope:
        config.rope_parameters = rope = with_attention_factor(rope)
    # DBRX's rotary base, which transformers ignores. It saves its own default in rope_parameters,
    # so that only another value there counts.
    theta = getattr(getattr(config, "attn_config", None), "rope_theta", None)
    if theta is not None and rope.get("rope_theta") == config.default_theta:
        config.rope_parameters = {**rope, "rope_theta": theta}


def scale_rope(config: PretrainedConfig, scaling: RopeScaling) -> None:
    """Change ``config`` as if ``scaling`` stood in its file; `ModelError` if it does not fit."""
    if (reason := _scaling_reason(config, scaling)) is not None:
        raise ModelError(
            f"rope_scaling is not for this model of type {config.model_type!r}: {reason}"
        )
    # A new dict, since copies of a configuration share theirs.
    config.rope_parameters = {**config.rope_parameters, **scaling.parameters}


def _scaling_reason(config: PretrainedConfig, scaling: RopeScaling) -> str | None:
    if config.model_type not in _YARN:
        return (
            f"YaRN is documented for {', '.join(_YARN)}; a file that asks for it "
            "(rope_scaling in config.json) is served for any model with rotary embeddings"
        )
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        return f"its config.json scales the rotary embedding already (rope_type {kind})"
    if getattr(config, "dual_chunk_attention_config", None) is not None:
        return "it reaches further by dual chunk attention (dual_chunk_attention_config)"
    original, most = scaling.original_max_position_embeddings, config.max_position_embeddings
    if original > most:
        return f"original_max_position_embeddings is {original}, but it was made for {most}"
    return None


def _kind_reason(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and only decoders are"
    if config.get_text_config() is not config:
        return "it is multi-modal, and only text models are"
    for name in ("quantization_config", "compression_config"):
        if getattr(config, name, None) is not None:
            return f"its {QUANTISED}"
    masked_lm = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if masked_lm and not getattr(config, "is_decoder", False):
        return "its attention is bidirectional"
    if config.model_type in _OTHER_ATTENTION:
        return _OTHER_ATTENTION[config.model_type]
    if is_alibi(config):
        reason: str | None = adapter(config).reason(config)
        return reason
    if getattr(config, "alibi", False):
        return "its attention is biased by distance (alibi), as is known for BLOOM, MPT, Baichuan"
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    elif not getattr(config, "auto_map", None):
        return "it has no causal language model in transformers"
    return None


def _shape_reason(config: PretrainedConfig) -> str | None:
    for name, reason in _OTHER_FIELDS.items():
        if getattr(config, name, None) is not None:
            return f"{reason} ({name})"
    value_dim = getattr(config, "v_head_dim", None)
    if value_dim is not None and value_dim != getattr(config, "head_dim", None):
        return "its values are of another width than its keys (v_head_dim)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share the keys of others (num_kv_shared_layers)"
    if getattr(config, "use_cla", False):  # Hunyuan-Large
        return "some of its layers share the keys of others (use_cla)"
    for name in ("num_attention_heads", "num_key_value_heads"):
        if not isinstance(getattr(config, name, 1), int | None):
            return f"its layers differ in {name}"
    missing = [name for name in _SIZES if getattr(config, name, None) is None]
    if missing:
        return f"its config.json has no {', '.join(missing)}"
    query_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    if not query_heads or query_heads % kv_heads:
        return f"{query_heads} query heads cannot share {kv_heads} KV heads"
    return None


def _window_reason(config: PretrainedConfig) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        return f"it has layers of type {', '.join(others)}; only full attention is supported"
    window = getattr(config, "sliding_window", None)
    if window is None or kinds == {"full_attention"}:
        return None
    context = max_positions(config)
    if window < context:
        return (
            f"it was trained with a sliding window of {window} tokens on some or all layers, "
            f"shorter than its context of {context}"
        )
    if kinds and config.model_type not in _WINDOW_ALONE:
        return (
            f"its layers with a sliding window of {window} tokens may differ from its others in "
            "more than the window"
        )
    return None


def _rope_reason(config: PretrainedConfig) -> str | None:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for name, value in rope.items():
        if isinstance(value, str) and name not in ("rope_type", "type"):
            return f"rope_parameters.{name} in its config.json must be a number, got {value!r}"
    kind = rope.get("rope_type", "default")
    # Such frequencies would differ from one rank's slice, or one decode step, to the next.
    if rope.get("alpha") is not None and config.model_type not in _FIXED_ALPHA:
        return "it has a rope_parameters.alpha, which is known of HunYuan only"
    if rope.get("alpha") is not None and getattr(config, "head_dim", None) is None:
        return "it has a rope_parameters.alpha and no head_dim, without which that means nothing"
    longrope = kind == "longrope" and config.model_type not in _LONGROPE
    if longrope or (kind == "dynamic" and not _within_context(config)):
        return f"its rotary frequencies change with the length of the sequence (rope_type {kind})"
    known = ("default", *ROPE_INIT_FUNCTIONS)
    if kind not in known and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"its rope_type is {kind!r}, which is none of {', '.join(known)}"
    for name in ("attn_factor", "extrapolation_factor"):
        if rope.get(name) not in (None, 1):
            return f"rope_parameters.{name} in its config.json is {rope[name]!r}: it is not known"
    factor = rope.get("factor")
    if factor is not None and not (isinstance(factor, int | float) and factor > 0):
        return f"rope_parameters.factor in its config.json must be above 0, got {factor!r}"
    return None


def _within_context(config: PretrainedConfig) -> bool:
    """True if a model of ``rope_type`` dynamic has one set of frequencies for all that is served.

    transformers changes them beyond ``max_position_embeddings``, and never where HunYuan's
    ``alpha`` has fixed them.
    """
    c: Any = config
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    within = known and max_positions(config) <= int(c.max_position_embeddings)
    return within or c.rope_parameters.get("alpha") is not None


def _layers_reason(config: PretrainedConfig) -> str | None:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return "its layers differ in their rotary embedding"
    tuned = getattr(config, "attn_temperature_tuning", False)
    if tuned and 0 in (getattr(config, "no_rope_layers", None) or ()):
        return (
            "layers without rotary embeddings scale queries by their place in a call "
            "(attn_temperature_tuning), and a text is read in several"
        )
    return None
