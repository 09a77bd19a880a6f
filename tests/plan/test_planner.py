"""The plan of GLM-4-9B-1M against limits worked out by hand: operations, bytes and times."""

from __future__ import annotations

import dataclasses
import io
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from rich.console import Console

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import tensor_parallel
from razor_dist.engine.tensor_parallel import expected_most
from razor_dist.plan.compute import (
    KERNELS_OF_STEP,
    decode_reads,
    decode_time,
    operations,
    prefill_time,
    traffic,
    visible,
)
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.devices import load_device
from razor_dist.plan.planner import Plan, _deploy, plan
from razor_dist.plan.tables import tables
from tests.plan.glm import N, settings

DOCS = Path(__file__).parents[2] / "docs"


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


@pytest.mark.long
@pytest.mark.usefixtures("any_context")
def test_decode_on_h200() -> None:
    """4.5 ms per token with replicated weights; 1.2 ms if they were sharded 8 ways."""
    found = plan(settings(), load_device("h200"), context=N, retrieval=0.3)
    assert found.decode_time.floor["memory"] == pytest.approx(4.5e-3, rel=0.02)
    assert found.decode_time.limit == "memory"
    d = Deployment.of(settings(), "cuda", 0.3)
    sharded = (decode_reads(d, N) - d.weights.step_bytes * 7 / 8) / 4.8e12
    assert sharded == pytest.approx(1.2e-3, rel=0.04)


@pytest.mark.long
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
    assert copies == found.deployment.shares.copied
    assert 2 * 40 * 4096 * 2 * 107 * 16 < copies < 1.8e9
    # 112 streaming heads, 14 on every rank.
    slot = 14 * ((1 + 4 + 8192 + 127 + 1024) * 512 + 2 * 128 * 4)
    assert found.memory.sequence_streaming_cache == slot


@pytest.mark.long
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


@pytest.mark.long
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
    assert memory.streaming_cache == slot + 112 * 11 * 2 * 128 * 4  # sums of what may be cached
    assert million.fits and million.links["prefill"]["ring"] / million.links["full_prefill"] < 0.31


@pytest.mark.long
@pytest.mark.usefixtures("any_context")
def test_one_chunk_moves_each_key_once() -> None:
    """80 KiB per token in full, past P-1 ranks: the retrieval heads' share of it."""
    found = plan(settings(chunked_prefill_size=N), load_device("h200"), context=N, retrieval=0.3)
    assert found.links["prefill"]["ring"] == 0.3 * 80 * 1024 * N * 7
    # Each of 2P chunks fetches its window: about 12 % of the prompt.
    assert found.links["prefill"]["halo"] / (0.7 * 80 * 1024) < 3 * 8 * (8192 + 127)


@pytest.mark.long
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
    spared = Deployment.of(config, "cpu", 0.5).shares.spared
    monkeypatch.setattr(tensor_parallel, "expected_most", lambda *_: 1.0)  # the fewest
    most = Deployment.of(config, "cpu", 0.5).shares.spared
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
