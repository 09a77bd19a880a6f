"""Razor against full attention at a shape: what is counted, what does not fit, what is written."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from razor_dist import cli
from razor_dist.config.errors import ConfigError, EngineError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import make_engine
from razor_dist.engine.capacity import context_length
from razor_dist.evals.bench import measure
from razor_dist.evals.bench import shape as bench_shape
from razor_dist.evals.bench.measure import CeilingSizes, Rates, TimedRun, measure_ceilings
from razor_dist.evals.bench.settings import ShapeBenchSettings
from razor_dist.evals.bench.shape import HEAD, engine_around, prompt_tokens, random_model, run
from razor_dist.kernels import decode_torch, query
from razor_dist.kernels.query import Query
from razor_dist.models.loader import load_model
from razor_dist.models.longrope import LongRope
from razor_dist.plan.compute import decode_reads, full_attention
from razor_dist.plan.deployment import Deployment
from tests.alibi_models import make_alibi
from tests.tiny_models import make_tiny

CPU = torch.device("cpu")
SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


class NoAttention:
    """An `AttentionContext` that multiplies nothing."""

    def attend(self, layer: int, query: Query, *_: Any) -> Tensor:
        return torch.zeros_like(query.q).flatten(0, 1).transpose(0, 1)


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.SIZES, "cpu", CeilingSizes(8 << 20, 128, seconds=0.01))


def settings(folder: Path, **given: Any) -> ShapeBenchSettings:
    small = {"window_max": "64", "kept": 0.5, "new_tokens": 4, "repeats": 1, "device": "cpu"}
    return ShapeBenchSettings(shape=str(folder), **{"tokens": "300", **small, **given})


@pytest.mark.long
def test_a_shape_is_timed_with_random_weights(
    tiny: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two lengths, and one beyond the model's 4096 positions: it is said, and the rest goes on."""
    out, page = tmp_path / "shape.json", tmp_path / "shape.md"
    command = ["bench", "shape", str(tiny("glm")), "--tokens", "300,8K,0.5K"]
    command += ["--new-tokens", "4", "--repeats", "1", "--window-max", "64", "--kept", "0.5"]
    command += ["--device", "cpu", "--threads", str(torch.get_num_threads())]
    assert cli.main([*command, "--json", str(out), "--markdown", str(page)]) == 0
    found = json.loads(out.read_text())
    ceiling = found["ceilings"]
    assert min(ceiling.values()) > 0
    first, unfit, last = found["lengths"]
    assert [first["tokens"], unfit["tokens"], last["tokens"]] == [300, 8192, 512]
    assert "made for 4096 positions" in unfit["engines"]["full"]["does_not_fit"]
    assert unfit["razor_over_full"] == {}
    for length in (first, last):
        for one in length["engines"].values():
            rate = one["operations"] / one["prefill_seconds"]
            assert one["prefill_of_matmul_ceiling"] == pytest.approx(
                rate / ceiling["matmul_operations_per_second"]
            )
            rate = one["step_bytes"] / one["decode_seconds_per_token"]
            assert one["decode_of_bandwidth"] == pytest.approx(
                rate / ceiling["bytes_read_per_second"]
            )
            assert one["peak_bytes"] >= one["before_bytes"] > 0
    # Half the heads keep 304 tokens, half the sinks and a window of at most 64 + 127.
    assert 0.75 < first["razor_over_full"]["kv"] < 0.85
    assert last["razor_over_full"]["kv"] < first["razor_over_full"]["kv"]
    shown, written = capfd.readouterr().out, page.read_text()
    for text in (shown, written):
        assert text.count("razor / full") == 2 and "made for 4096 positions" in text
        assert all(text.count(word) >= 2 for word in ("does not fit", "512"))
    table = [line for line in written.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3 + 2 + 3
    assert all(line.count("|") == len(HEAD) + 1 for line in table)
    # The command on the page is the command.
    assert found["command"].startswith("razor-dist bench shape /") and found["command"] in written
    for flag in ("--kept 0.5 ", "--window-max 64 ", "--tokens 300,8K,0.5K "):
        assert flag in found["command"]


@pytest.mark.parametrize("attention", ["razor", "full"])
def test_a_decode_step_reads_what_is_counted(
    attention: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys and values that the kernels are given, byte for byte, sequence by sequence."""
    monkeypatch.setattr("razor_dist.attention.decode.implementation", lambda device: decode_torch)
    mine = settings(tiny("glm"))
    config, prompt = mine.config(1304), list(range(3, 153)) * 2
    d = Deployment.of(config, "cpu", 0.5)
    d = d if attention == "razor" else full_attention(d)
    model = load_model(str(tiny("glm")), device=CPU, dtype=torch.float32)
    engine = engine_around(model, d)
    read: list[int] = []

    def counted(kernel: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        read.append(k.nbytes + v.nbytes)
        return kernel(q, k, v, *rest, **options)

    for name in ("attend", "compensate"):
        monkeypatch.setattr(query, name, partial(counted, getattr(query, name)))
    tokens = engine.stream(prompt, 2)
    next(tokens)
    read.clear()
    next(tokens)  # one decode step
    assert sum(read) == decode_reads(d, len(prompt) + 1) - d.weights.step_bytes


@pytest.mark.parametrize("family", ["llama", "glm", "phi3", "bloom", "mpt", "baichuan"])
def test_a_prefills_products_are_those_that_are_counted(family: str, tmp_path: Path) -> None:
    """torch's own count of what a model multiplies, attention aside."""
    alibi = family in ("bloom", "mpt", "baichuan")
    folder = (make_alibi if alibi else make_tiny)(family, tmp_path / family)
    model = random_model(
        str(folder), CPU, torch.bfloat16
    )  # by torch's own products, which it counts
    ids = torch.arange(40)[None]
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(
            input_ids=ids,
            position_ids=ids,
            use_cache=False,
            logits_to_keep=1,
            attention_context=NoAttention(),
        )
    weights = Deployment.of(EngineConfig(model=str(folder)), "cpu").weights
    assert counter.get_total_flops() == 2 * (40 * weights.matmul + weights.head)


def test_a_model_with_an_adapter_is_timed(tmp_path: Path) -> None:
    record = run(settings(make_alibi("mpt", tmp_path / "mpt")))
    assert 0 < record.figures["lengths"][0]["razor_over_full"]["kv"] < 1


def test_random_models_are_as_the_loader_makes_them(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    phi3 = random_model(str(tiny("phi3")), CPU, torch.float32)
    body: Any = phi3.base_model
    assert isinstance(body.rotary_emb, LongRope)
    assert phi3.config.sliding_window is None
    made = random_model(str(make_alibi("bloom", tmp_path / "b")), CPU, torch.float32)
    loaded = load_model(str(tmp_path / "b"), device=CPU, dtype=torch.float32)
    assert type(made) is type(loaded)


@pytest.mark.long
def test_an_engine_is_gone_before_the_next_is_built(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    def make(*arguments: Any, **options: Any) -> Any:
        assert not any(engine() for engine in made)
        engine = make_engine(*arguments, **options)
        made.append(weakref.ref(engine.runner.caches.pages))
        if len(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nmore")
        return engine

    monkeypatch.setattr(bench_shape, "make_engine", make)
    gc.collect()
    first, second = run(settings(tiny("glm"), tokens="80,90")).figures["lengths"]
    assert len(made) == 4
    unfit = {"does_not_fit": "CUDA out of memory. Tried to allocate 80 GiB."}
    assert first["engines"]["razor"] == unfit
    assert first["engines"]["full"]["decode_seconds_per_token"] > 0
    assert not first["razor_over_full"] and second["razor_over_full"]


def test_memory_that_is_not_there_is_not_asked_for(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_shape, "make_engine", lambda *_, **__: pytest.fail("it was built"))

    class Little:
        available = 1000

    monkeypatch.setattr(bench_shape.psutil, "virtual_memory", Little)
    with pytest.raises(
        ConfigError, match=r"nothing was measured: it needs .* GB beside the weights"
    ):
        run(settings(tiny("glm"), tokens="100"))


def test_a_prompt_of_the_whole_context_leaves_room_for_the_answer(
    tiny: Callable[[str], Path],
) -> None:
    mine = settings(tiny("glm"))
    shape = Deployment.of(mine.config(300), "cpu", 0.5).shape
    assert [prompt_tokens(n, mine.new_tokens, shape) for n in (300, 4092, 4096)] == [
        300,
        4092,
        4092,
    ]
    assert context_length(mine.config(4092 + mine.new_tokens), shape) == 4096
    # One without a last position has room.
    assert prompt_tokens(4096, mine.new_tokens, replace(shape, alibi=True)) == 4096


def test_a_bug_is_not_taken_for_a_lack_of_memory(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench_shape, "make_engine", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(settings(tiny("glm")))


def test_a_model_that_computes_no_numbers_is_no_measurement(tiny: Callable[[str], Path]) -> None:
    model = random_model(str(tiny("glm")), CPU, torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    config = settings(tiny("glm")).config(300)
    engine = engine_around(model, Deployment.of(config, "cpu", 0.5))
    with pytest.raises(EngineError, match="not finite"):
        engine([1, 2, 3], 4)


def test_ceilings_are_of_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says that every call takes a second."""
    done = {"sum": 0, "matmul": 0}

    def fastest(operation: Callable[[], Tensor], *_: Any) -> float:
        result = operation()
        done["matmul" if result.dim() == 2 else "sum"] += 1
        return 1.0 if result.dim() else 2.0

    monkeypatch.setattr(measure, "fastest", fastest)
    monkeypatch.setitem(measure.SIZES, "cpu", CeilingSizes(1 << 20, 64))
    found = measure_ceilings(CPU, torch.bfloat16)
    # The matrix-vector product is the faster one here; 2**20 bytes are read.
    assert found == Rates(bandwidth=2.0**20, products=2 * 64**3)
    assert done == {"sum": 3, "matmul": 2}
    assert found.or_better(Rates(1.0, 1e12)) == Rates(2.0**20, 1e12)


def test_the_fastest_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    durations = iter([9.0, 4.0, 5.0, 3.0, 6.0, 7.0])  # the first call, its timing, then rounds

    def call() -> Tensor:
        nonlocal now
        now += next(durations)
        return torch.zeros(())

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    assert measure.fastest(call, CPU, seconds=10.0) == 3.0


def test_steps_that_record_a_graph_do_not_count() -> None:
    stamps = [12.0, 15.0, 17.0, 17.5, 18.0, 18.5]
    found = TimedRun.from_stamps(10.0, stamps, [1] * 6, steady=True)
    assert (found.prefill_seconds, found.decode_seconds) == (2.0, 0.5)


def test_the_committed_shapes() -> None:
    """A quarter of the layers, and of every width, of which half the heads of half the size."""
    large, small = (
        Deployment.of(EngineConfig(model=str(SHAPES / name)), "cpu", 0.3)
        for name in ("glm-4-9b-chat-1m", "glm-quarter")
    )
    assert large.head_map.kv_fraction == small.head_map.kv_fraction == 0.3
    assert small.shape.layers * small.shape.group == large.shape.layers * large.shape.group // 8
    assert small.model.hidden_size * 4 == large.model.hidden_size
    assert small.model.intermediate_size * 4 == large.model.intermediate_size
    # Far more than a CPU's caches hold.
    assert small.weights.step_bytes > 600e6
