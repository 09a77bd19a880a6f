"""Planned memory: the longest context, and the settings that make a plan fit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import Glm4MoeConfig

from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import tokens
from razor_dist.plan.advice import remedies
from razor_dist.plan.compute import collectives, full_attention, traffic
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.devices import load_device
from razor_dist.plan.memory import DryRun, MemoryPlanner
from razor_dist.plan.planner import Plan, plan
from tests.plan.glm import N, settings


@pytest.mark.long
def test_the_longest_context_is_the_longest() -> None:
    device = load_device("h100")
    d = Deployment.of(settings(), "cuda", 0.3)
    planner = MemoryPlanner(d, device)
    longest = planner.longest_context(N)
    assert longest > N
    assert planner.at(longest, longest).total <= planner.budget
    more = longest + longest // 32
    assert planner.at(more, more).total > planner.budget


@pytest.mark.parametrize("guess", [1, N, 64 * N])
def test_activations_that_grow_with_the_context(
    monkeypatch: pytest.MonkeyPatch, guess: int
) -> None:
    """A length that fits beside a short context's activations does not fit beside its own."""
    planner = MemoryPlanner(Deployment.of(settings(), "cuda", 0.3), load_device("h200"))
    memory = planner.at(N, N)
    monkeypatch.setattr(planner, "_activations", lambda context: {"ring": 4000 * context})
    rest = memory.weights + memory.streaming_cache + memory.window_between_chunks
    most = (planner.budget - rest) / (4000 + 0.3 * 80 * 1024 / 8)
    assert 31 / 32 * most < planner.longest_context(guess) <= most


@pytest.mark.long
def test_a_shorter_context_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's activations are 4.7 GB, but a prompt may be shorter than a chunk."""
    monkeypatch.setattr("razor_dist.plan.planner.fewest_ranks", lambda *_: "")  # takes seconds
    small = load_device("h200").model_copy(update={"memory_gb": 24.5})
    found = plan(settings(decode="tensor"), small, context=N, retrieval=0.3)
    assert not found.fits and 64 * 1024 < found.longest < found.deployment.chunked_prefill_size
    said = f"; {tokens(found.longest)} tokens fit, with max_model_len: {found.longest}; "
    assert said in found.verdict[0]
    planner = MemoryPlanner(found.deployment, small)
    assert planner.at(found.longest, found.longest).total <= planner.budget
    more = found.longest + found.longest // 32
    assert planner.at(more, more).total > planner.budget


@pytest.mark.long
@pytest.mark.parametrize(("kv_dtype", "width"), [("int8", 128), ("int4", 64)])
def test_codes_save_memory_in_the_page_pool_alone(kv_dtype: str, width: int) -> None:
    """Keys are converted a block at a time, so activations stay the same."""
    device = load_device("h200")
    bf16, codes = (
        MemoryPlanner(Deployment.of(settings(kv_dtype=name), "cuda", 0.3), device).at(N, N)
        for name in ("bf16", kv_dtype)
    )
    assert codes.sequence_retrieval_kv == 48 * N // 8 * 2 * (width + 4)
    assert codes.activations == bf16.activations
    assert sum(codes.activations.values()) == pytest.approx(4.68e9, rel=0.01)
    assert bf16.total - codes.total == bf16.retrieval_kv - codes.retrieval_kv


@pytest.mark.long
@pytest.mark.usefixtures("any_context")
@pytest.mark.parametrize(
    ("device", "given", "refusal"),
    [
        ("cpu", {}, None),
        ("h100", {}, None),
        ("cpu", {"kv_dtype": "int4"}, "kv_dtype: int4 mixes"),
        ("cpu", {"attention": "streaming"}, "with attention: streaming there are none"),
    ],
)
def test_a_share_is_planned_beside_full_attention(
    device: str, given: dict[str, Any], refusal: str | None
) -> None:
    tokens, fraction = 2**16, None if "attention" in given else 0.3
    found = plan(
        settings(retrieval_share=0.01, **given),
        load_device(device),
        context=tokens,
        retrieval=fraction,
    )
    assert found.refusal is None if refusal is None else refusal in str(found.refusal)
    d = found.deployment
    config = d.config.model_copy(update={"retrieval_share": 0.0})
    without = dataclasses.replace(d, config=config)
    assert traffic(full_attention(d), tokens) == traffic(full_attention(without), tokens)
    layers = sum(count > 0 for count in d.retrieval_per_layer)
    assert [collectives(d, n) for n in (768, tokens)] == [layers, 3 * layers]
    assert collectives(without, tokens) == layers


def test_caches_of_many_sequences_leave_room_for_choosing_blocks() -> None:
    """Choosing blocks of a million tokens on eight ranks takes over 15 GB, near the weights' 19."""
    config, device = settings(retrieval_share=1 / 128, max_num_seqs=64), load_device("h100")
    planner = MemoryPlanner(Deployment.of(config, "cuda", 0.3), device)
    memory = planner.at(N, N)
    assert memory.activations["ring"] > 15e9 and memory.total <= planner.budget


@pytest.mark.long
def test_what_never_fits() -> None:
    small = load_device("4090").model_copy(update={"memory_gb": 16.0})
    found = plan(settings(), small, context=N, retrieval=0.3)
    assert not found.fits and found.longest == 0
    assert "does not fit" in found.verdict[0] and "no context fits" in found.verdict[0]
    assert "weights, whole on every rank, take 19.0 GB" in found.verdict[0]
    assert "fewest ranks that fit: more than 16" in found.verdict[1]
    shared = small.model_copy(update={"shared": True})  # where more ranks add no memory
    said = plan(settings(), shared, context=N, retrieval=0.3).verdict
    assert len(said) == 1 and "does not fit" in said[0] and "fewest ranks" not in said[0]


@pytest.mark.long
@pytest.mark.usefixtures("any_context")
@pytest.mark.parametrize(
    ("given", "retrieval", "message"),
    [
        ({"window_max": None}, 0.3, "at least as long as a shard|nothing is saved"),
        ({"chunked_prefill_size": 65536}, 0.3, "the halo moves 1.8 x all streaming keys"),
        ({}, 0.9, "90% of the KV heads are retrieval heads"),
        ({"prefill": "exact"}, 0.3, "prefill is exact"),
    ],
)
def test_settings_that_defeat_themselves(
    given: dict[str, Any], retrieval: float, message: str
) -> None:
    found = plan(settings(**given), load_device("h200"), context=N, retrieval=retrieval)
    for part in message.split("|"):
        assert any(part in said for said in found.warnings), found.warnings


@pytest.mark.usefixtures("any_context")
def test_windows_of_a_head_map_are_no_settings_fault(tmp_path: Path) -> None:
    """All of them move one halo, and no setting of windows changes them."""
    config = settings(window_max=None, chunked_prefill_size=65536)
    d = Deployment.of(config, "cuda", 0.3)
    windows = tuple(
        tuple(None if keep else 4096 * (1 + layer % 2) for keep in row)
        for layer, row in enumerate(d.head_map.retrieval)
    )
    made = dataclasses.replace(d.head_map, windows=windows, fingerprint="any")
    made.save(tmp_path / "m.json")
    named = config.model_copy(update={"head_map": str(tmp_path / "m.json")})
    said = "\n".join(plan(named, load_device("h200"), context=N).warnings)
    [moved] = re.findall(r"the halo moves ([\d.]+) x all streaming", said)
    assert 0.2 < float(moved) < 2
    assert "window_max" not in said and "window_min" not in said


@pytest.mark.long
@pytest.mark.usefixtures("any_context")
@pytest.mark.parametrize(
    ("given", "gb", "wanted", "unwanted"),
    [
        (
            {"window_max": None, "kv_dtype": "bf16"},
            30.0,
            ["kv_dtype: int8", "window_max: 8192"],
            "bf16",
        ),
        ({"kv_tokens": 64 * N, "max_num_seqs": 9}, 160.0, ["kv_tokens: 1048576"], "bf16"),
        ({"kv_dtype": "fp32"}, 26.0, ["chunked_prefill_size: 65536", "kv_dtype: bf16"], "window"),
        ({"dtype": "fp32"}, 40.0, ["dtype: bf16", "kv_dtype: int8"], "window_max"),
    ],
)
def test_settings_that_free_memory_come_the_most_first(
    given: dict[str, Any], gb: float, wanted: list[str], unwanted: str
) -> None:
    """A setting frees the difference between the plans without it and with it."""
    small = load_device("h200").model_copy(update={"memory_gb": gb})
    found = plan(settings(**given), small, context=N, retrieval=0.3)
    assert not found.fits

    def needed(changes: dict[str, Any]) -> int:
        config = settings(**given | {"max_model_len": N} | changes)
        return MemoryPlanner(Deployment.of(config, "cuda", 0.3), small).at(N, N).total

    advice = remedies(found.deployment, N, found.memory.total, found.budget, needed)
    freed = [one.frees for one in advice.alone]
    assert freed == sorted(freed, reverse=True)
    assert set(wanted) <= {one.name for one in advice.alone}
    assert unwanted not in str(advice)
    largest = advice.alone[0]
    less = needed({largest.setting: largest.value})
    assert found.memory.total - less == largest.frees > 0


@pytest.mark.parametrize(
    ("kind", "given", "refused"),
    [
        ("cpu", {"weight_dtype": "int8"}, "dtype: bf16"),
        ("cuda", {"ring": "ring_flash_attn"}, "kv_dtype: int8"),
    ],
)
def test_no_setting_is_named_that_the_engine_refuses(
    kind: Any, given: dict[str, Any], refused: str
) -> None:
    def named(**settings_: Any) -> set[str]:
        d = Deployment.of(settings(**settings_), kind, 0.3)
        return {one.name for one in remedies(d, N, 100, 1, lambda _: 0).alone}

    assert named(**given) == named() - {refused} != named()


@pytest.mark.usefixtures("any_context")
def test_prefixes_in_host_memory_leave_less_to_caches_on_cpu() -> None:
    small = load_device("cpu").model_copy(update={"memory_gb": 16.0})
    own = {"model": "smollm2", "world_size": 2, "max_num_seqs": 64, "decode": "replicated"}
    without, held = (
        plan(EngineConfig(**own, prefix_host_gb=gb), small, context=8192) for gb in (0.0, 4.0)
    )
    assert without.memory.prefixes == 0 and held.memory.prefixes == 2 * 2**30
    caches = [one.memory.retrieval_kv + one.memory.streaming_cache for one in (without, held)]
    assert caches[0] - caches[1] == pytest.approx(0.7 * 2 * 2**30, rel=0.05)
    total = without.memory.total - caches[0] + caches[1] + held.memory.prefixes
    assert held.memory.total == total


@pytest.mark.long
@pytest.mark.usefixtures("any_context")
def test_the_fewest_ranks_fit_and_half_of_them_do_not() -> None:
    device = load_device("l40s")
    found = plan(settings(world_size=1), device, context=N, retrieval=0.3)
    said = found.verdict[1]
    fewest = int(re.findall(r"fewest ranks that fit: (\d+)", said)[0])
    assert fewest > 1
    for ranks, fits in ((fewest, True), (fewest // 2, False)):
        assert plan(settings(world_size=ranks), device, context=N, retrieval=0.3).fits is fits


@pytest.mark.long
@pytest.mark.usefixtures("any_context")
def test_a_warning_of_long_windows_has_the_seconds_of_a_plan_without_them() -> None:
    device = load_device("h200")
    long = plan(settings(window_max=None), device, context=N, retrieval=0.3)
    short = plan(settings(window_max=8192), device, context=N, retrieval=0.3)
    (said,) = (said for said in long.warnings if "the prompt would take" in said)
    assert (
        f"take {short.prefill_time.seconds:.1f} s instead of {long.prefill_time.seconds:.1f} s"
        in said
    )


def test_a_longest_context_beyond_the_models_own_is_named_beside_it(million: Plan) -> None:
    assert million.longest > N
    assert million.longest_text.endswith("; the model's own is 1,048,576 (1M)")
    short = dataclasses.replace(million, longest=N)
    assert short.longest_text == "1,048,576"
    far = dataclasses.replace(million, longest=million.asked)
    assert far.longest_text.startswith("more than 16,777,216; ")


@pytest.mark.usefixtures("any_context")
@pytest.mark.parametrize(
    ("given", "context", "said"),
    [
        ({}, 4096, "with max_model_len: 4096"),
        ({}, None, ""),  # the engine's own default
        ({"max_model_len": 4096}, None, ""),
    ],
)
def test_a_context_that_fits_is_named_with_the_setting_that_it_needs(
    given: dict[str, Any], context: int | None, said: str
) -> None:
    found = plan(EngineConfig(model="smollm2", **given), load_device("cpu"), context=context)
    assert found.verdict[0].startswith("fits: ") and found.verdict[0].partition(", ")[2] == said


def test_nothing_is_said_of_good_settings(million: Plan) -> None:
    """The default length of chunks is one of the good settings."""
    assert million.warnings == []
    assert million.deployment.chunked_prefill_size == 8 * 32768


@pytest.mark.parametrize("stored", ["float32", "bfloat16", None])
@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
def test_ranks_of_a_host_share_weights_that_are_stored_as_they_compute(
    stored: str | None, weight_dtype: Any, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    fields = json.loads((tiny("llama") / "config.json").read_text()) | {"dtype": stored}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = settings(model=str(tmp_path), dtype="fp32", weight_dtype=weight_dtype, world_size=4)
    d = Deployment.of(config, "cpu", 0.5)
    found = MemoryPlanner(d, load_device("cpu")).at(1000, 1000).weights
    parameters = 4 * d.weights.parameters
    shared = parameters * 3 // 4 if stored == "float32" else 0
    assert found == d.weights.nbytes - shared
    linear = [m.weight for m in d.meta_model().modules() if isinstance(m, nn.Linear)]
    copies = 2 * sum(weight.numel() for weight in linear) if weight_dtype == "int8" else 0
    assert d.weights.nbytes == parameters + copies + sum(b.nbytes for b in d.meta_model().buffers())


def test_every_rank_of_a_host_holds_all_experts(tiny: Callable[[str], Path]) -> None:
    """Files have a tensor for each, which transformers stacks: no rank maps them."""
    config = settings(model=str(tiny("qwen3_moe")), dtype="fp32", world_size=4)
    d = Deployment.of(config, "cpu", 0.5)
    experts = 4 * 2 * 8 * (3 * 64 * 32)  # of two layers, each with eight
    shared = 4 * d.weights.parameters - experts
    found = MemoryPlanner(d, load_device("cpu")).at(1000, 1000).weights
    assert found == d.weights.nbytes - shared * 3 // 4


def test_a_chunk_passes_a_mixture_behind_dense_layers(tmp_path: Path) -> None:
    """GLM-4.6's first three layers are dense, and ERNIE-4.5-300B's."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 192}
    sizes |= {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    found = []
    for dense in (1, 3):
        folder = tmp_path / str(dense)
        mixture = {"n_routed_experts": 64, "moe_intermediate_size": 256, "num_experts_per_tok": 8}
        Glm4MoeConfig(**sizes | mixture, first_k_dense_replace=dense).save_pretrained(folder)
        config = settings(model=str(folder), attention="full", head_map=None, world_size=2)
        d = Deployment.of(config, "cpu")
        found.append(DryRun(d).activations(4096))
        assert d.not_shared is None and d.model.num_hidden_layers == 6
    assert found[1] == pytest.approx(found[0], rel=0.01)
