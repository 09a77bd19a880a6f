"""YaRN: by a flag as by the model's file, on any number of ranks, and never mixed with another."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import (
    AutoConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    LlamaConfig,
    PretrainedConfig,
)

from razor_dist import LLM, SamplingParams
from razor_dist.config.errors import ConfigError, HeadMapError, ModelError
from razor_dist.config.rope_scaling import RopeScaling
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import load_config
from razor_dist.engine.capacity import context_length
from razor_dist.heads.head_map import HeadMap
from razor_dist.models.loader import model_fingerprint, model_from_config, read_config
from razor_dist.models.shape import ModelShape
from tests.cases import Case, logits_of, model_and_shape
from tests.logits import GROWING, assert_any_cut, split_of, stock_logits, tokens_of
from tests.models.test_support import PUBLISHED
from tests.ranks import Ranks
from tests.tiny_models import Tiny, write_random

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
HUNYUAN = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 192, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 160, "eos_token_id": 2, "tie_word_embeddings": False},
}


@pytest.fixture
def yarn(tiny: Tiny, tmp_path: Path) -> Path:
    """A model whose file asks for YaRN from 64 tokens on."""
    folder = tmp_path / "yarn"
    shutil.copytree(tiny("qwen3"), folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_parameters"] |= YARN
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_yarn_is_stock_transformers_on_any_number_of_ranks(yarn: Path, ranks: Ranks) -> None:
    n, tokens = 150, tokens_of(154, seed=1)
    every = ((True,) * 2,) * 3
    case = Case(str(yarn), every, GROWING, tokens[:n], tokens[n:], chunked_prefill_size=64)
    assert_any_cut(ranks, case, stock_logits(yarn, tokens)[n - 1 :], (1, 4))
    split = dataclasses.replace(case, retrieval=split_of(yarn), chunked_prefill_size=8192)
    want = ranks(1).run(logits_of, split)[0]
    assert_any_cut(ranks, dataclasses.replace(split, tensor=True), want, (4,), (37,))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}, **SIZES),
        HunYuanDenseV1Config(rope_parameters={**HUNYUAN}, **SIZES),
        HunYuanMoEV1Config(rope_parameters={**HUNYUAN}, num_experts=4, moe_topk=[2, 1], **SIZES),
    ],
    ids=lambda config: str(config.model_type),
)
def test_dynamic_frequencies_are_constant_within_the_context(
    config: PretrainedConfig, ranks: Ranks, tmp_path: Path
) -> None:
    n, tokens = 150, tokens_of(154, seed=1)
    path = write_random(config, tmp_path)
    case = Case(str(path), ((True,) * 2,) * 2, GROWING, tokens[:n], tokens[n:], 64)
    assert_any_cut(ranks, case, stock_logits(path, tokens)[n - 1 :], (1, 2))
    model, _ = model_and_shape(str(path))
    rope = cast(Any, model.base_model).rotary_emb
    assert "dynamic" not in rope.rope_type  # or every pass would look at its positions


@pytest.mark.long
def test_the_flag_is_the_file(yarn: Path, tiny: Tiny) -> None:
    prompt = {"prompt_token_ids": list(tokens_of(100, seed=3))}
    settings = SamplingParams(max_tokens=12, temperature=0)

    def answer(model: Path, **options: Any) -> Sequence[int]:
        with LLM(model=str(model), attention="full", max_model_len=200, **options) as llm:
            return llm.generate(prompt, settings)[0].outputs[0].token_ids

    assert answer(tiny("qwen3"), rope_scaling=YARN) == answer(yarn) != answer(tiny("qwen3"))


def test_the_context_is_a_multiple_of_the_original(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3-8B"]))
    # As Qwen's README has it.
    scaling = RopeScaling("yarn", 4.0, 32768)
    shape = ModelShape.from_config(read_config(tmp_path, rope_scaling=scaling))
    assert shape.max_positions == 131072
    with pytest.raises(ConfigError, match="made for 131072 positions"):
        context_length(EngineConfig(max_model_len=131073), shape)


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_window_that_the_scaled_context_exceeds(by_flag: bool, tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 32768, "max_window_layers": 8}
    fields = {"model_type": "qwen2", "max_position_embeddings": 32768, **window}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    own = {} if by_flag else {"rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(fields | own))
    with pytest.raises(ModelError, match=r"window of 32768 tokens .* context of 131072"):
        read_config(tmp_path, rope_scaling=RopeScaling.of(rope) if by_flag else None)


def test_ultralong() -> None:
    """YaRN as the report on UltraLong has it (arXiv 2504.06214): alpha 1, beta 4, factor 128."""
    rope = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192}
    fields = PUBLISHED["meta-llama/Llama-3.1-8B"] | {"max_position_embeddings": 1048576}
    config = AutoConfig.for_model(
        **fields | {"rope_scaling": rope | {"beta_fast": 4.0, "beta_slow": 1.0}}
    )
    assert ModelShape.from_config(config).max_positions == 1048576
    assert config.rope_parameters["beta_fast"] == 4.0


def test_ultralongs_frequencies_are_stock_transformers(ranks: Ranks, tmp_path: Path) -> None:
    rope = {**YARN, "factor": 8.0, "original_max_position_embeddings": 20, "beta_fast": 4.0}
    path = write_random(LlamaConfig(rope_parameters=rope | {"rope_theta": 5e5}, **SIZES), tmp_path)
    n, tokens = 150, tokens_of(154, seed=1)
    case = Case(str(path), ((True,) * 2,) * 2, GROWING, tokens[:n], tokens[n:], 64)
    assert_any_cut(ranks, case, stock_logits(path, tokens)[n - 1 :], (1, 2))


@pytest.mark.parametrize("by_flag", [True, False])
def test_attn_factor_is_of_the_usual_factor(by_flag: bool, tmp_path: Path) -> None:
    """As vLLM has it. DeepSeek-R1-0528-Qwen3-8B's makes the product 1."""
    fields = PUBLISHED["deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"] | {"num_hidden_layers": 1}
    rope = fields["rope_scaling"]
    plain = fields | {"rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(plain if by_flag else fields))
    config = read_config(tmp_path, rope_scaling=RopeScaling.of(rope) if by_flag else None)
    model = model_from_config(config, device=torch.device("meta"), dtype=torch.bfloat16)
    assert cast(Any, model.base_model).rotary_emb.attention_scaling == 1
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    wanted |= {"rope_theta": 1000000, "attention_factor": 1.0}
    assert config.rope_parameters == wanted


def test_a_factor_that_changes_nothing_is_no_other_model(yarn: Path) -> None:
    plain = model_fingerprint(read_config(yarn))
    fields = json.loads((yarn / "config.json").read_text())
    fields["rope_parameters"]["attn_factor"] = 1.0
    (yarn / "config.json").write_text(json.dumps(fields))
    assert model_fingerprint(read_config(yarn)) == plain


def test_another_rope_is_another_model(tiny: Tiny) -> None:
    path, scaling = tiny("qwen3"), RopeScaling.of(YARN)
    plain, scaled = read_config(path), read_config(path, rope_scaling=scaling)
    assert model_fingerprint(plain) != model_fingerprint(scaled)
    shape = ModelShape.from_config(scaled)
    every = ((True,) * 2,) * 3
    found = HeadMap.of_model("tiny", plain, method="full", settings={}, retrieval=every)
    with pytest.raises(HeadMapError, match="another configuration"):
        found.validate(shape, model_fingerprint(scaled))


@pytest.mark.long
def test_a_prefix_of_another_rope_is_never_used(tiny: Tiny, tmp_path: Path) -> None:
    prompt = {"prompt_token_ids": list(tokens_of(100, seed=4))}
    options: dict[str, Any] = {
        "model": str(tiny("qwen3")),
        "attention": "full",
        "max_model_len": 200,
        "page_size": 8,
        "prefix_store": str(tmp_path / "store"),
    }
    cached = []
    for scaling in (None, YARN, YARN, YARN | {"attention_factor": 1.0}):
        with LLM(rope_scaling=scaling, **options) as llm:
            found = llm.generate(prompt, SamplingParams(max_tokens=1))[0]
            cached.append(found.num_cached_tokens > 0)
    assert cached == [False, False, True, False]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{", "rope_scaling must be a JSON object or none: "),
        ({**YARN, "rope_type": "dynamic"}, "rope_scaling.rope_type must be yarn, got 'dynamic'"),
        ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings is missing"),
        ({**YARN, "type": "yarn"}, "no field 'type'; did you mean 'rope_type'?"),
        ({**YARN, "factor": 1}, "rope_scaling.factor must be greater than 1, got 1"),
        ({**YARN, "factor": "4"}, "rope_scaling.factor must be a number, got '4'"),
        ({**YARN, "factor": None}, "factor must be a number, got None"),
        ({**YARN, "original_max_position_embeddings": 64.0}, "s must be an integer, got 64.0"),
        ({**YARN, "beta_slow": 40}, "beta_fast (32) must be above beta_slow (40)"),
        ({**YARN, "attention_factor": 1.0, "attn_factor": 1.0}, "factor and attn_factor are given"),
        ({**YARN, "attention_factor": float("nan")}, "must be a finite number, got nan"),
    ],
)
def test_mistakes_in_the_setting_are_named(value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(EngineConfig, {"rope_scaling": value}, {})
    assert problem in str(raised.value)
    assert str(raised.value).endswith("(from --rope-scaling)")


@pytest.mark.parametrize(
    ("name", "original", "reason"),
    [
        (
            "meta-llama/Llama-3.1-8B",
            8192,
            r"YaRN is documented for qwen2, .*\(rope_scaling in config",
        ),
        ("Qwen/Qwen2.5-7B-Instruct-1M", 32768, "reaches further by dual chunk attention"),
        ("Qwen/Qwen3-8B", 65536, "embeddings is 65536, but it was made for 40960"),
    ],
)
def test_models_that_refuse_it(name: str, original: int, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    with pytest.raises(ModelError, match=reason):
        read_config(tmp_path, rope_scaling=RopeScaling("yarn", 4.0, original))


def test_a_file_that_scales_already_refuses_it(yarn: Path) -> None:
    with pytest.raises(ModelError, match="scales the rotary embedding already"):
        read_config(yarn, rope_scaling=RopeScaling("yarn", 2.0, 64))


@pytest.mark.parametrize("name", ["factor", "attention_factor"])
def test_a_text_for_a_number_in_the_file_is_named(name: str, yarn: Path) -> None:
    fields = json.loads((yarn / "config.json").read_text())
    fields["rope_parameters"][name] = "4.0"
    (yarn / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=rf"rope_parameters\.{name} .* a number, got '4.0'"):
        read_config(yarn)


def test_the_setting_reaches_the_ranks() -> None:
    config = load_config(EngineConfig, {"rope_scaling": json.dumps(YARN)}, {})
    again = EngineConfig.from_json(config.engine_json())
    assert again == config and again.rope_scaling == RopeScaling("yarn", 4.0, 64)
    assert load_config(EngineConfig, {"rope_scaling": "none"}, {}).rope_scaling is None
