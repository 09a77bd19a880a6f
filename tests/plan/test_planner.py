"""The plan of GLM-4-9B-1M against limits worked out by hand, and what the command says."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from razor_dist import cli
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import tokens
from razor_dist.config.sources import load_config
from razor_dist.engine import tensor_parallel
from razor_dist.engine.tensor_parallel import expected_most
from razor_dist.plan.advice import remedies
from razor_dist.plan.compute import (
    KERNELS_OF_STEP,
    collectives,
    decode_reads,
    decode_time,
    full_attention,
    operations,
    prefill_time,
    traffic,
    visible,
)
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.devices import load_device
from razor_dist.plan.memory import MemoryPlanner
from razor_dist.plan.planner import Plan, _deploy, plan
from razor_dist.plan.tables import tables

CONFIGS = Path(__file__).parents[2] / "configs"
DOCS = Path(__file__).parents[2] / "docs"
GLM = str(CONFIGS / "shapes" / "glm-4-9b-chat-1m")
N = 2**20


def settings(**given: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": GLM,
            "world_size": 8,
            "window_min": 4000,
            "window_max": 8192,
            "max_num_seqs": 1,
            "decode": "replicated",
            **given,
        }
    )


@pytest.fixture(scope="module")
def million() -> Plan:
    return plan(settings(), load_device("h100"), context=N, retrieval=0.3)


def test_operations_of_a_million_tokens(million: Plan) -> None:
    """PFLOP: 360 of full attention, 30 % of that for retrieval heads, 17 of linear layers."""
    work = million.work
    assert work.full == 4 * 128 * 32 * 40 * N * (N + 1) // 2
    assert work.full / 1e15 == pytest.approx(360, rel=0.005)
    # q, k, v, o; gate, up, down; the output head of one token.
    layer = 4096 * (4096 + 2 * 512 + 4096) + 3 * 4096 * 13696
    assert work.linear == 2 * (40 * layer * N + 151552 * 4096)
    assert work.linear / 1e15 == pytest.approx(17, rel=0.02)
    assert work.retrieval == 48 * work.full // 160
    assert work.streaming / 1e15 == pytest.approx(
        0.7 * 4 * 128 * 32 * 40 * N * 8192 / 1e15, rel=0.01
    )


def test_prefill_on_eight_h100(million: Plan) -> None:
    """16 s at peak, and 22 s at FlashAttention-3's best of 740 TFLOP/s."""
    assert million.prefill_time.seconds_at_peak == pytest.approx(16, rel=0.03)
    assert million.prefill_time.limit == "compute"
    assert million.work.total / (8 * 740e12) == pytest.approx(22, rel=0.01)


@pytest.mark.usefixtures("any_context")
def test_decode_on_h200() -> None:
    """4.5 ms per token with replicated weights; 1.2 ms if they were sharded 8 ways."""
    found = plan(settings(), load_device("h200"), context=N, retrieval=0.3)
    assert found.decode_time.floor["memory"] == pytest.approx(4.5e-3, rel=0.02)
    assert found.decode_time.limit == "memory"
    d = Deployment.of(settings(), "cuda", 0.3)
    sharded = (decode_reads(d, N) - d.weights.step_bytes * 7 / 8) / 4.8e12
    assert sharded == pytest.approx(1.2e-3, rel=0.04)


@pytest.mark.usefixtures("any_context")
def test_decode_in_tensor_mode() -> None:
    """A layer waits for the rank with its retrieval heads and a streaming one: 3.1 GB weights."""
    found = plan(settings(decode="auto"), load_device("h200"), context=N, retrieval=0.3)

    def layer(kept: int) -> int:  # rows of q, k, v; columns of eight heads; an eighth of the MLP
        return 4096 * ((kept + 1) * 10 * 128 + 8 * 128 + 3 * 107 * 16)

    weights = 2 * (32 * layer(1) + 8 * layer(2) + 4096 * 151552 // 8)
    keys = 48 * N // 8 + 40 * (8 + 8192 + 127)
    memory = (weights + 512 * keys) / 4.8e12
    assert found.decode == "tensor" and found.not_shared is None
    assert found.decode_time.floor["memory"] == pytest.approx(memory, rel=1e-3)
    collectives = 40 + 2 * 40 + 1
    assert found.decode_time.floor["links"] == pytest.approx(collectives * 10e-6, rel=0.02)
    replicated = found.decode_times["replicated"]
    assert replicated == plan(settings(), load_device("h200"), context=N, retrieval=0.3).decode_time
    assert 1.6 < replicated.seconds / found.decode_time.seconds < 1.8
    # A rank's rows of gate and up lie apart in one matrix; those of its heads may, too.
    copies = found.memory.weight_copies
    assert copies == found.deployment.copied_bytes
    assert 2 * 40 * 4096 * 2 * 107 * 16 < copies < 1.8e9
    # 112 streaming heads, 14 on every rank.
    slot = 14 * ((1 + 4 + 8192 + 127 + 1024) * 512 + 2 * 128 * 4)
    assert found.memory.sequence_streaming_cache == slot


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_terms_have_ranges_and_sum_up(kv_dtype: str) -> None:
    """As the page of the prediction has them, for one sequence and for eight."""
    device, page = load_device("h200"), (DOCS / "benchmarks" / "gpu" / "model.md").read_text()
    d = Deployment.of(settings(decode="tensor", kv_dtype=kv_dtype), "cuda", 0.3)
    for sequences in (1, 8):
        found = decode_time(d, device, N, traffic(d, N), sequences)
        terms = found.expected
        for name, seconds in terms.items():
            assert 0 < found.best[name] <= seconds <= found.worst[name]
        memory = max(terms["compute"], terms["memory"])
        overhead = terms["links"] + terms["launches"] + terms["host"]
        assert found.seconds == pytest.approx(memory + overhead)
        assert found.seconds_at_peak < found.seconds_best < found.seconds < found.seconds_worst
        numbers = [memory, terms["links"], terms["launches"], terms["host"], found.seconds]
        cells = [f"{decode_reads(d, N, sequences) / 1e9:.2f}", *(f"{1e3 * n:.2f}" for n in numbers)]
        cells.append(f"{1e3 * found.seconds_best:.1f} to {1e3 * found.seconds_worst:.1f}")
        name = f"{sequences}, {'8 bits' if kv_dtype == 'int8' else 'bf16'}"
        assert f"| {name} | {' | '.join(cells)} |" in page


def test_prefill_of_retrieval_heads_is_partly_by_blocks_of_earlier_keys() -> None:
    """Four chunks of 32,768 tokens a rank: six of eight pairs of blocks are whole."""
    device, page = load_device("h200"), (DOCS / "benchmarks" / "gpu" / "model.md").read_text()
    for given, prompt, long in (({}, N, 0.75), ({"chunked_prefill_size": 1 << 15}, 1 << 17, 0)):
        d = Deployment.of(settings(decode="tensor", **given), "cuda", 0.3)
        found, work = prefill_time(d, device, prompt, traffic(d, prompt)), operations(d, prompt)
        retrieval = work.retrieval * (long / 0.6 + (1 - long) / 0.35)
        expected = retrieval + work.streaming / 0.35 + work.linear / 0.7
        assert found.expected["compute"] == pytest.approx(expected / (8 * 989e12), rel=1e-4)
        if prompt == N:
            each = found.seconds_best, found.seconds, found.seconds_worst
            assert f"| {' | '.join(f'{n:.1f}' for n in each)} |" in page


def test_memory_of_a_million_tokens(million: Plan) -> None:
    """80 KiB per token in full: 80 GiB, and 30 % of it over 8 ranks."""
    assert million.full_kv_per_rank == 80 * 2**30 / 8
    memory = million.memory
    assert memory.weights == million.deployment.weights.nbytes == pytest.approx(18.97e9, rel=1e-3)
    assert memory.sequence_retrieval_kv == 0.3 * 80 * 2**30 / 8
    slot = 112 * ((1 + 4 + 8192 + 127 + 1024) * 512 + 2 * 128 * 4)  # the tail has 1024 tokens
    assert memory.sequence_streaming_cache == slot
    assert memory.streaming_cache == slot + 112 * 7 * 2 * 128 * 4  # sums of what may be cached
    assert million.fits and million.links["prefill"]["ring"] / million.links["full_prefill"] < 0.31


@pytest.mark.usefixtures("any_context")
def test_one_chunk_moves_each_key_once() -> None:
    """80 KiB per token in full, past P-1 ranks: the retrieval heads' share of it."""
    found = plan(settings(chunked_prefill_size=N), load_device("h200"), context=N, retrieval=0.3)
    assert found.links["prefill"]["ring"] == 0.3 * 80 * 1024 * N * 7
    # Each of 2P chunks fetches its window: about 12 % of the prompt.
    assert found.links["prefill"]["halo"] / (0.7 * 80 * 1024) < 3 * 8 * (8192 + 127)


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
    advice = remedies(found.deployment, N, found.memory.total, found.budget, found._bytes)
    freed = [one.frees for one in advice.alone]
    assert freed == sorted(freed, reverse=True)
    assert set(wanted) <= {one.name for one in advice.alone}
    assert unwanted not in str(advice)
    largest = advice.alone[0]
    config = settings(**given | {largest.setting: largest.value}, max_model_len=N)
    less = MemoryPlanner(Deployment.of(config, "cuda", 0.3), small).at(N, N)
    assert found.memory.total - less.total == largest.frees > 0


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


@pytest.mark.parametrize(("ratio", "mode"), [(1.3, "tensor"), (1.5, "replicated")])
def test_ranks_share_steps_where_the_engine_would_choose_so(
    ratio: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharing is worth 1.4 times a token's time."""
    monkeypatch.setattr(
        "razor_dist.plan.planner.decode_time",
        lambda d, *_: SimpleNamespace(seconds=ratio if d.shared else 1.0),
    )
    d, times = _deploy(settings(decode="auto"), load_device("h200"), 4096, 0.3)
    assert next(iter(times)) == mode and d.shared is (mode == "tensor")


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


@pytest.mark.usefixtures("any_context")
def test_the_fewest_ranks_fit_and_half_of_them_do_not() -> None:
    device = load_device("l40s")
    found = plan(settings(world_size=1), device, context=N, retrieval=0.3)
    said = found.verdict[1]
    fewest = int(re.findall(r"fewest ranks that fit: (\d+)", said)[0])
    assert fewest > 1
    for ranks, fits in ((fewest, True), (fewest // 2, False)):
        assert plan(settings(world_size=ranks), device, context=N, retrieval=0.3).fits is fits


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


def test_a_head_map_that_is_yet_to_be_made_is_assumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shipped settings for GLM-4-9B-1M, whose head map is not shipped."""
    monkeypatch.chdir(tmp_path)
    file = str(CONFIGS / "glm-4-9b-chat-1m.yaml")
    assert cli.main(["plan", GLM, "--config", file]) == 0
    shown = capsys.readouterr()
    assert "assumed: 30% of the KV heads" in " ".join(shown.out.split())
    assert "configs/head_maps/glm-4-9b-chat-1m.json does not exist: assumed: 30%" in shown.err
    found = plan(
        load_config(EngineConfig, {"model": GLM}, {}, file),
        load_device("h200"),
        retrieval=0.5,
    )
    assert found.deployment.head_map.kv_fraction == 0.5
    assert not any("does not exist" in said for said in found.warnings)


@pytest.mark.long
def test_the_exit_code_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", GLM, "--device", "4090", "--context", "1M", "--retrieval", "0.3"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("does not fit: 70.4 GB per rank of 22.5; ")


def test_nothing_is_said_of_good_settings(million: Plan) -> None:
    """The default length of chunks is one of the good settings."""
    assert million.warnings == []
    assert million.deployment.chunked_prefill_size == 8 * 32768


def test_a_step_reads_the_experts_that_it_is_sent_to(tiny: Callable[[str], Path]) -> None:
    weights = Deployment.of(EngineConfig(model=str(tiny("mixtral"))), "cpu").weights
    experts, embedding = 3 * 4 * (3 * 64 * 96), 192 * 64  # three layers of four, of which two work
    assert weights.step_bytes == weights.nbytes - 4 * (experts // 2 + embedding)
    assert weights.chunk_bytes == weights.nbytes - 4 * embedding


def test_a_chunk_reads_one_of_two_copies_of_8_bits(tiny: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(tiny("llama")), dtype="fp32", weight_dtype="int8")
    weights = Deployment.of(config, "cpu").weights
    fp32 = Deployment.of(config.model_copy(update={"weight_dtype": "auto"}), "cpu").weights
    linear = (weights.nbytes - fp32.nbytes) // 2  # of one byte each, and of four before
    assert linear > 0 and weights.chunk_bytes == fp32.chunk_bytes - 3 * linear


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


@pytest.mark.parametrize(("experts", "ranks", "routed"), [(128, 8, 8), (8, 4, 3), (4, 8, 2)])
def test_the_busiest_rank_has_more_experts_than_the_fewest(
    experts: int, ranks: int, routed: int
) -> None:
    draw, owners = random.Random(0), [expert * ranks // experts for expert in range(experts)]
    drawn = (Counter(draw.sample(owners, routed)).values() for _ in range(20_000))
    mean = fmean(map(max, drawn))
    assert expected_most(tuple(Counter(owners).values()), routed) == pytest.approx(mean, abs=0.02)


def test_a_token_waits_for_the_rank_with_most_of_its_experts(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model=str(tiny("qwen3_moe")), decode="tensor", world_size=4)
    spared = Deployment.of(config, "cpu", 0.5).spared_parameters
    monkeypatch.setattr(tensor_parallel, "expected_most", lambda *_: 1.0)  # the fewest
    most = Deployment.of(config, "cpu", 0.5).spared_parameters
    mean = expected_most((2, 2, 2, 2), 3)
    assert 1.4 < mean < 1.5 and most - spared == 2 * round((mean - 1) * 3 * 64 * 32)


@pytest.mark.usefixtures("any_context")
@pytest.mark.parametrize(("context", "known"), [(3967, True), (3968, False)])
def test_no_time_is_given_for_answers_beyond_a_chunk(
    context: int, known: bool, tiny: Callable[[str], Path]
) -> None:
    """A chunk has 4,096 - 128 tokens; answers beyond it are not recorded, and slower."""
    config = settings(model=str(tiny("qwen2_1m")), decode="auto", world_size=2)
    found = plan(config, load_device("cpu"), context=context, retrieval=0.5)
    console = Console(width=200, file=io.StringIO())
    console.print(tables(found))
    shown = console.file.getvalue()
    assert ("decode, ms/token" in shown) is ("a token, ms" in shown) is known
    assert "prefill, s" in shown and "limited by" in shown
    said = "answers beyond 3,968 tokens are not recorded, and their time is not estimated"
    assert (said in found.warnings) is not known
    data = found.as_json()
    assert (data["decode_time"] is not None) is bool(data["decode_times"]) is known


@pytest.mark.parametrize("prompt", [1, 5, 40, 333])
def test_keys_that_a_streaming_head_sees(prompt: int) -> None:
    """Counted one by one, by the definition."""
    paper = StreamingPolicy(window_min=16, window_ratio=5, window_max=40, sinks=4, block=8)
    for policy in (paper, dataclasses.replace(paper, compensation=False)):
        seen = 0
        for i in range(prompt):
            start = policy.start(i)
            if start <= policy.sinks:
                seen += i + 1
            else:
                seen += policy.sinks + policy.compensation + i + 1 - start
        assert visible(policy, prompt) == seen


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--world-size", "8", "--context", "256K", "--window-max", "8K", "--max-num-seqs", "1"]
    assert cli.main(["plan", GLM, *sizes]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("262,144 (256K) tokens", "assumed: 30%", "retrieval KV", "limited by", "halo"):
        assert words in shown


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("world_size: 2\nport: 80\nmax_model_len: 8192\n")
    assert cli.main(["plan", "smollm2", "--device", "cpu", "--config", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world_size"], found["context"], found["dtype"]) == (2, 8192, "float32")
    assert found["heads"] == "head map shipped with the model"
    assert found["memory"]["total"] > found["memory"]["weights"] > 0


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("weight_dtype: int8", "weight_dtype: int8 is for device: cpu"),
        ("{ring: ring_flash_attn, kv_dtype: int8}", "ring is ring_flash_attn, whose keys"),
        ("max_model_len: 100K", "max_model_len is 102400, but smollm2 was made for 8192"),
    ],
)
def test_what_the_engine_refuses_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: str, refusal: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(given)
    assert cli.main(["plan", "smollm2", "--config", str(file), "--context", "1K", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["refusal"].startswith(refusal) and not found["memory"]["fits"]
    assert found["verdict"][0] == f"the engine refuses it: {found['refusal']}"


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", GLM, "--context", "1m"]) == 2
    assert "invalid size '1m'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="retrieval must be above 0"):
        plan(settings(), load_device("h200"), retrieval=1.5)
    with pytest.raises(ConfigError, match="in place of a head map, but attention is full"):
        plan(settings(attention="full"), load_device("h200"), retrieval=0.5)
    with pytest.raises(ConfigError, match="device is cpu"):
        plan(settings(device="cpu"), load_device("h200"))
    with pytest.raises(ConfigError, match="kv_tokens is 1000, too few"):
        plan(settings(kv_tokens=1000), load_device("h200"), context=8192)
    with pytest.raises(ConfigError, match="replicated weights only"):
        plan(settings(weights="zero3"), load_device("h200"))
    with pytest.raises(ConfigError, match="context must be at least 1, got 0"):
        plan(settings(), load_device("h200"), context=0)
    with pytest.raises(ConfigError, match="above max_model_len"):
        plan(settings(max_model_len=1024), load_device("h200"), context=2048)
    with pytest.raises(ConfigError, match="world_size is 100000, but plan counts up to"):
        plan(settings(world_size=100_000), load_device("h200"))
    with pytest.raises(ModelError, match="has no config"):
        plan(settings(model=str(Path(GLM).parent)), load_device("h200"))


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from razor_dist.cli import main; main(['plan', '--help']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("name", "copies", "collectives", "itemsize"),
    [
        ("vLLM TP8", 2, 2, 2),
        ("vLLM TP8 + DCP2", 1, 4, 2),
        ("… and keys and values of fp8", 1, 4, 1),
    ],
)
def test_rows_of_vllm_are_by_the_same_rates(
    name: str, copies: int, collectives: int, itemsize: int
) -> None:
    """Full attention whose 4 KV heads eight ranks hold in ``copies``; 15 kernels a layer."""
    device, page = load_device("h200"), (DOCS / "benchmarks" / "gpu" / "model.md").read_text()
    d = Deployment.of(settings(decode="tensor"), "cuda", 0.3)
    shape, weights = d.shape, d.weights.step_bytes / 8
    kv = copies * 2 * N * shape.layers * shape.kv_heads * shape.head_dim * itemsize / 8
    assert 8 * kv == copies * 40 * 2**30 * itemsize

    def milliseconds(sequences: int) -> str:
        """Return the range by the best and the worst numbers of the device's file."""
        found = []
        for end in (device.at("best"), device.at("worst")):
            bandwidth = end.bandwidth(8) * end.efficiency.bandwidth
            latencies = (collectives * shape.layers + 1) * end.link_latency_us
            launches = (15 * shape.layers + KERNELS_OF_STEP) * end.kernel_us
            rest = 1e-6 * (latencies + launches + end.host_us)
            found.append(1e3 * ((weights + sequences * kv) / bandwidth + rest))
        return "\N{EN DASH}".join(f"{value:.1f}" for value in found)

    fits = 8 * kv + d.weights.nbytes < device.memory(8)
    eight = milliseconds(8) if fits else "does not fit"
    row = f"| {name} | {(weights + kv) / 1e9:.2f} | {milliseconds(1)} | {eight} |"
    assert row in page, row
