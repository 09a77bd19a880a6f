"""Models whose attention cannot be honoured are refused, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.capacity import context_length
from razor_dist.models.adapters import register_configs
from razor_dist.models.loader import model_from_config, read_config
from razor_dist.models.shape import ModelShape, experts_of, max_positions, routed_of
from razor_dist.models.support import check_supported, without_idle_window

register_configs()

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"max_position_embeddings": 32768, "sliding_window": 4096}, "4096 tokens"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 8}, "sliding window of 4096"),
    ("phi3", {"max_position_embeddings": 4096, "sliding_window": 2047}, "window of 2047"),
    # Half of their layers slide, and those alone have a rotary embedding.
    ("cohere2", {"max_position_embeddings": 4096}, "of 4096 tokens may differ from its others"),
    (
        "exaone4",
        {"sliding_window": 4096, "sliding_window_pattern": 4, "max_position_embeddings": 4096},
        "of 4096 tokens may differ from its others",
    ),
    ("gemma2", {}, "soft-capped"),
    ("gemma3_text", {}, "sliding window"),
    (
        "gemma3_text",
        {"layer_types": ["full_attention"] * 26},
        "differ in their rotary embedding",
    ),
    ("llama4_text", {"layer_types": ["full_attention"] * 48}, "attn_temperature_tuning"),
    ("gpt_oss", {}, "learned sinks"),
    ("deepseek_v3", {}, "latent attention"),
    ("hrm_text", {}, "layers run several times"),
    ("llama", {"num_key_value_heads": 5}, "32 query heads cannot share 5 KV heads"),
    ("jetmoe", {}, "keys that are repeated before attention"),
    ("falcon", {}, "FalconForCausalLM does not use"),
    ("falcon", {"alibi": True}, "biased by distance .* as is known for BLOOM, MPT, Baichuan"),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi is False"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm is True"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln is True"),
    ("mpt", {"no_bias": False}, "no_bias is False, and only True"),
    ("baichuan", {"hidden_size": 4096}, "Baichuan-7B has rotary embeddings"),
    ("baichuan", {"vocab_size": 1000}, "not clear whether its output projection is normalised"),
    ("t5", {}, "encoder-decoder"),
    ("bert", {}, "bidirectional"),
    ("roberta", {"is_decoder": True}, "first token's position is not 0"),
    ("xlm-roberta", {"is_decoder": True}, "first token's position is not 0"),
    ("lfm2", {"full_attn_idxs": [2]}, "layers of type conv"),
    ("minimax", {}, "layers of type linear_attention"),
    ("llava", {}, "multi-modal"),
    ("vit", {}, "no causal language model"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}, "are quantised"),
    *(
        (
            kind,
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **alpha}, **fields},
            why,
        )
        for kind, alpha, fields, why in (
            ("llama", {"alpha": 1000.0}, {}, "alpha, which is known of HunYuan only"),
            ("hunyuan_v1_dense", {"alpha": 1000.0}, {}, "alpha and no head_dim"),
            ("cohere", {}, {"model_max_length": 131072}, "rope_type dynamic"),
        )
    ),
    ("hunyuan_v1_moe", {"use_cla": True, "cla_share_factor": 2}, "share the keys of others"),
    *(
        (
            "llama",
            {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **factors}},
            "_factor in its config.json is 0.9: it is not known",
        )
        for kind, factors in (
            ("linear", {"attn_factor": 0.9}),
            ("yarn", {"attn_factor": 0.9, "attention_factor": 1.0}),
            ("yarn", {"extrapolation_factor": 0.9}),
        )
    ),
    ("llama", {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, "rope_type is 'ntk'"),
    *(
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor}},
            "factor in its config.json must be above 0",
        )
        for factor in (0.0, -1, [4])
    ),
    (
        "phimoe",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 64,
                "long_factor": [2.0] * 64,
                "short_mscale": 1.0,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 4096,
            }
        },
        "rope_type longrope",
    ),
]

# As their makers published them, on the hub, less fields that say nothing of the model itself.
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
GLM = Path(__file__).parents[2] / "configs/shapes/glm-4-9b-chat-1m/config.json"
PUBLISHED["zai-org/glm-4-9b-chat-1m-hf"] = json.loads(GLM.read_text())

# Query heads, KV heads, head_dim, longest context.
SERVED = {
    "meta-llama/Llama-2-7b-hf": (32, 32, 128, 4096),
    "meta-llama/Llama-3.1-8B": (32, 8, 128, 131072),
    "Qwen/Qwen2.5-7B-Instruct-1M": (28, 4, 128, 1010000),
    "Qwen/Qwen3-8B": (32, 8, 128, 40960),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (32, 4, 128, 262144),
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": (32, 8, 128, 1048576),
    "mistralai/Mistral-7B-v0.3": (32, 8, 128, 32768),
    "mistralai/Mixtral-8x7B-v0.1": (32, 8, 128, 32768),
    "microsoft/Phi-3-mini-128k-instruct": (32, 32, 96, 131072),
    "zai-org/glm-4-9b-chat-1m-hf": (32, 4, 128, 1048576),
    "databricks/dbrx-base": (48, 8, 128, 32768),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": (32, 8, 128, 131072),
}
NOT_SERVED = {
    "mistralai/Mistral-7B-v0.1": "sliding window of 4096 tokens .* context of 32768",
    "microsoft/Phi-3-mini-4k-instruct": "sliding window of 2047 tokens .* context of 4096",
    "google/gemma-2-2b": "soft-capped",
    "google/gemma-3-1b-pt": "sliding window of 512 tokens .* context of 32768",
    "google/gemma-3-4b-it": "'gemma3' cannot be served: it is multi-modal",
}


def test_every_published_configuration_is_tested() -> None:
    assert PUBLISHED.keys() == SERVED.keys() | NOT_SERVED.keys()


@pytest.mark.parametrize("name", SERVED)
def test_published_models_that_are_served(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = read_config(tmp_path)
    shape = ModelShape.from_config(config)
    assert shape.layers == PUBLISHED[name].get("num_hidden_layers", PUBLISHED[name].get("n_layers"))
    sizes = (shape.query_heads, shape.kv_heads, shape.head_dim, shape.max_positions)
    assert sizes == SERVED[name]
    assert getattr(without_idle_window(config), "sliding_window", None) is None


@pytest.mark.parametrize("name", NOT_SERVED)
def test_published_models_that_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    with pytest.raises(ModelError, match=NOT_SERVED[name]):
        read_config(tmp_path)


def test_dbrx_rotates_by_the_base_in_attn_config(tmp_path: Path) -> None:
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 1, "vocab_size": 192}
    fields = PUBLISHED["databricks/dbrx-base"] | sizes
    fields["attn_config"] = fields["attn_config"] | {"kv_n_heads": 2}
    fields["ffn_config"] = fields["ffn_config"] | {"ffn_hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert (experts_of(config), routed_of(config)) == (16, 4)
    model = model_from_config(config, device=torch.device("cpu"), dtype=torch.float32)
    base = cast(Any, model.base_model).rotary_emb.inv_freq[1].item() ** -8
    assert base == pytest.approx(500000)
    # transformers saves its default beside it, which says nothing.
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert read_config(tmp_path).rope_parameters["rope_theta"] == 500000
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config(tmp_path).rope_parameters["rope_theta"] == 1e6


def test_experts_by_other_names() -> None:
    config = AutoConfig.for_model("aria_text", moe_num_experts=64, moe_topk=6)
    assert (experts_of(config), routed_of(config)) == (64, 6)
    config = AutoConfig.for_model("hunyuan_v1_moe", num_experts=64, moe_topk=[8, 4])
    assert (experts_of(config), routed_of(config)) == (64, 6)


def test_dual_chunk_attention_is_served_as_far_as_it_was_made_for() -> None:
    fields = PUBLISHED["Qwen/Qwen2.5-7B-Instruct-1M"]
    shape = ModelShape.from_config(AutoConfig.for_model(**fields))
    assert shape.dual_chunk == 262144 - 8192
    with pytest.raises(ConfigError, match="made for 1010000 positions"):
        context_length(EngineConfig(max_model_len=1010001), shape)
    # A text that never fills one chunk needs none of it.
    short = AutoConfig.for_model(**fields | {"max_position_embeddings": 32768})
    assert ModelShape.from_config(short).dual_chunk is None
    llama = PUBLISHED["meta-llama/Llama-3.1-8B"]
    names = ("dual_chunk_attention_config",)
    with pytest.raises(ModelError, match="of type 'llama', and its rope_type is llama3"):
        ModelShape.from_config(AutoConfig.for_model(**llama, **{n: fields[n] for n in names}))


@pytest.mark.parametrize("original", [-1, 7, "262144", 1.5])
def test_dual_chunk_attention_of_another_length(original: object) -> None:
    fields = {"chunk_size": 10, "local_size": 2, "original_max_position_embeddings": original}
    config = AutoConfig.for_model("qwen2", dual_chunk_attention_config=fields)
    with pytest.raises(ModelError, match="must be 0, or an integer of at least"):
        ModelShape.from_config(config)


@pytest.mark.parametrize("wrong", [{}, {"chunk_size": 64}, {"chunk_size": 8, "local_size": 8}, 7])
def test_dual_chunk_attention_that_makes_no_sense(wrong: object) -> None:
    config = AutoConfig.for_model("qwen2", dual_chunk_attention_config=wrong)
    with pytest.raises(ModelError, match="integers chunk_size and local_size"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(("kind", "fields", "reason"), REFUSED, ids=lambda value: str(value)[:24])
def test_refused(kind: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_supported(AutoConfig.for_model(kind, **fields))


@pytest.mark.parametrize("missing", ["num_hidden_layers", "max_position_embeddings"])
def test_a_configuration_without_a_field(missing: str) -> None:
    """As of a model with code of its own, whose configuration has other names for it."""
    fields = {"num_attention_heads": 4, "hidden_size": 64, "vocab_size": 192}
    fields |= {"num_hidden_layers": 2, "max_position_embeddings": 4096}
    del fields[missing]
    config = PretrainedConfig(auto_map={"AutoConfig": "code.Config"}, **fields)
    with pytest.raises(ModelError, match=missing):
        check_supported(config)
        ModelShape.from_config(config)


def test_the_context_of_command_r_is_model_max_length() -> None:
    config = AutoConfig.for_model("cohere", model_max_length=131072)
    assert (config.max_position_embeddings, max_positions(config)) == (8192, 131072)


@pytest.mark.parametrize(("rope", "context"), [("linear", 16384), ("default", 4096)])
def test_the_context_of_linear_frequencies_is_max_sequence_length(rope: str, context: int) -> None:
    """As in Vicuna v1.5 16K's file."""
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0}
    fields = {"max_position_embeddings": 4096, "max_sequence_length": 16384}
    config = AutoConfig.for_model("llama", rope_parameters=parameters, **fields)
    check_supported(config)
    assert max_positions(config) == context


@pytest.mark.parametrize(
    "kind",
    ["llama", "qwen2", "qwen3", "glm", "glm4", "phi", "gpt_neox", "bloom", "mpt", "baichuan"],
)
def test_supported(kind: str) -> None:
    check_supported(AutoConfig.for_model(kind))


def test_window_of_no_layer_is_left_alone() -> None:
    # Qwen2-MoE says 0 where no layer slides, and its mask code needs a number.
    config = AutoConfig.for_model("qwen2_moe")
    check_supported(config)
    assert without_idle_window(config).sliding_window == 0


def test_window_that_cannot_be_turned_off() -> None:
    with pytest.raises(ModelError, match="'moshi' cannot be served: their sliding window"):
        without_idle_window(AutoConfig.for_model("moshi"))


def test_window_longer_than_the_context_is_dropped() -> None:
    config = AutoConfig.for_model("mistral", max_position_embeddings=2048, sliding_window=4096)
    check_supported(config)
    assert without_idle_window(config).sliding_window is None
