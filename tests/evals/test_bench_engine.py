"""The bench's arithmetic, its command line, and a run on a tiny model; others are run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from razor_dist import cli
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.bench import floor as bench_floor
from razor_dist.evals.bench import measure
from razor_dist.evals.bench.engine import OWN, STOCK, of_floor, rank_name, ratios, run
from razor_dist.evals.bench.floor import Floor, floor
from razor_dist.evals.bench.measure import (
    CeilingSizes,
    Rates,
    TimedRun,
    Timing,
    random_tokens,
    take_turns,
)
from razor_dist.evals.bench.peers import open_peers, openvino_pipeline
from razor_dist.evals.bench.settings import EngineBenchSettings, ProbeBenchSettings
from razor_dist.evals.report import cpu_name
from razor_dist.heads.decision import spread
from razor_dist.models.loader import load_model
from razor_dist.models.shape import ModelShape
from razor_dist.plan.deployment import Deployment
from tests.tiny_models import make_tiny, save_head_map

WRONG_SIZES = ("", "0", "1,x", "8,8", "8, 8", "-1")


def timing(name: str, *runs: tuple[float, float]) -> Timing:
    return Timing(name, [TimedRun(prefill, decode, (1, 2)) for prefill, decode in runs])


def test_a_run_ends_prefill_with_the_first_token() -> None:
    run = TimedRun.from_stamps(10.0, [12.0, 12.5, 13.0], [7, 8, 9])
    assert (run.prefill_seconds, run.decode_seconds) == (2.0, 0.5)
    assert run == TimedRun.from_stamps(0.0, [2.0, 3.0], [7, 8, 9])


def test_medians_shrug_off_one_slow_run() -> None:
    found = timing("x", (2.0, 0.1), (20.0, 0.9), (1.0, 0.2))
    assert (found.prefill, found.decode) == (2.0, 0.2)
    assert found.as_json()["prefill_runs"] == [2.0, 20.0, 1.0]


def test_engines_take_turns_after_a_warm_up_that_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []

    def engine(name: str, prompt: list[int], new_tokens: int) -> TimedRun:
        calls.append(name)
        return TimedRun(float(len(calls)), 0.0, ())

    engines = {n: (lambda p, k, n=n: engine(n, p, k)) for n in "ab"}
    with caplog.at_level("INFO"):
        found = take_turns(engines, [1], 3, 2)
    assert "".join(calls) == "ababab"
    assert [run.prefill_seconds for run in found["a"].runs] == [3.0, 5.0]
    assert len(caplog.messages) == 6


def test_ratios_and_their_bars() -> None:
    single = {
        STOCK: timing(STOCK, (20.0, 0.050)),
        OWN["razor"]: timing("", (14.0, 0.040)),
        OWN["full"]: timing("", (22.0, 0.060)),
    }
    parallel = {
        rank_name("razor", 1): timing("", (14.0, 0.040)),
        rank_name("razor", 8): timing("", (28.0, 0.400)),
        rank_name("razor", 8, "tensor"): timing("", (14.0, 0.060)),
    }
    found = ratios(single, parallel, (1, 8))
    assert [(round(r.value, 3), r.bar, r.met) for r in found] == [
        (0.7, 0.75, True),
        (0.8, 0.45, False),
        (1.1, 1.0, False),
        (1.2, None, None),
        (2.0, 1.5, False),
        (10.0, None, None),
        (1.0, 1.5, True),
        (1.5, 2.0, True),
    ]
    # Of several ranks one may be compared with, which has no tensor-parallel decode.
    found = ratios(single, parallel, (8, 1))
    assert [r.value for r in found[4:]] == pytest.approx([0.5, 0.1])
    of_floors = {OWN["razor"]: Floor(prefill=10.0, decode=0.02)}
    assert of_floor(single, of_floors) == ("prefill, razor / its floor", 1.4, 1.1, False)


@pytest.mark.long
def test_pages_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    code = (
        "import sys; from pathlib import Path; from razor_dist.evals.bench.measure import *;"
        "from razor_dist.evals.bench.settings import RanksBenchSettings as Settings;"
        "settings = Settings(markdown=Path(sys.argv[1]));"
        "BenchRecord('start', settings, {}, [Table('\\u2264', [['']])]).write()"
    )
    plain = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-X", "utf8=0", "-c", code, page], env=plain, check=True)
    assert "≤" in page.read_text(encoding="utf-8")


def test_ratios_to_peers() -> None:
    openvino, llama = "openvino-genai 2026.4.1.0", "llama-cpp-python 0.3.36"
    single = {
        STOCK: timing(STOCK, (20.0, 0.050)),
        OWN["razor"]: timing("", (14.0, 0.040)),
        OWN["full"]: timing("", (22.0, 0.060)),
        OWN["int8 weights"]: timing("", (10.0, 0.020)),
        OWN["int8 both"]: timing("", (9.0, 0.010)),
        openvino: timing(openvino, (12.0, 0.020)),
        llama: timing(llama, (36.0, 0.020)),
    }
    found = {r.name: (round(r.value, 3), r.met) for r in ratios(single, {}, ())}
    assert found["decode, int8 weights / transformers"] == (0.4, False)
    assert found[f"prefill, int8 both / {openvino}"] == (0.75, True)
    assert found[f"decode, int8 both / {openvino}"] == (0.5, True)
    assert found[f"decode, razor / {openvino}"] == (2.0, None)
    assert found[f"prefill, int8 both / {llama}"] == (0.25, None)
    assert len(found) == 2 * (4 + 2 * 2)


@pytest.mark.parametrize("int8", [False, True])
def test_a_floor_is_what_is_counted_at_the_rates_that_are_measured(
    int8: bool, tiny: Callable[[str], Path]
) -> None:
    """Floors of full attention equal a count by hand of its operations and bytes."""
    model = load_model(tiny("llama"), device=torch.device("cpu"), dtype=torch.float32)
    shape, head = ModelShape.from_config(model.config), model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    table = model.get_input_embeddings().weight
    assert table is not head.weight
    config = EngineConfig(
        model=str(tiny("llama")), attention="full", weight_dtype="int8" if int8 else "auto"
    )
    rates = Rates(bandwidth=1e6, products=2e6, attention=4e6, int8_products=8e6)
    found = floor(Deployment.of(config, "cpu"), rates, prompt=100, new_tokens=20)

    products = 2 * (100 * sum(w.numel() for w in linear if w is not head.weight))
    products += 2 * head.weight.numel()
    pairs = shape.layers * shape.query_heads * 100 * 101 // 2
    attention = 4 * shape.head_dim * pairs / 4e6
    assert found.prefill == pytest.approx(products / (8e6 if int8 else 2e6) + attention)
    tensors = [*model.parameters(), *model.buffers()]
    weights = sum(t.nbytes for t in tensors if t is not table)
    weights -= sum(3 * w.numel() for w in linear) if int8 else 0
    keys = 2 * 4 * shape.head_dim * shape.kv_heads * shape.layers * (100 + 10)
    assert found.decode == pytest.approx((weights + keys) / 1e6, rel=1e-3)

    taken = timing("x", (3 * found.prefill, 5 * found.decode))
    assert found.under(taken) == pytest.approx((3, 5))
    assert found.as_json(taken)["decode_over_floor"] == pytest.approx(5)
    assert rates.or_better(rates._replace(attention=1.0, bandwidth=9e6)) == rates._replace(
        bandwidth=9e6
    )


def test_rates_are_of_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says that every call takes two seconds."""
    shapes: list[tuple[int, ...]] = []

    def fastest(operation: Callable[[], object], *_: object) -> float:
        result = operation()
        if isinstance(result, tuple):  # attention and its lse
            shapes.append(tuple(result[0].shape))
        return 2.0

    for module in (bench_floor, measure):
        monkeypatch.setattr(module, "fastest", fastest)
    monkeypatch.setitem(measure.SIZES, "cpu", CeilingSizes(1 << 20, 64))
    shape = ModelShape.from_config(Deployment.of(EngineConfig(), "cpu").model)
    found = bench_floor.measure_rates(shape, torch.device("cpu"), torch.float32, int8=True)
    assert shapes == [(3, 3, 64, 64)]
    # Two operations for each product of q and k, and two of the weights with v.
    assert found == Rates(2.0**19, 64**3, 9 * 4 * 64 * 64 * 64 / 2, 64**3)


@pytest.mark.long
def test_a_bench_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Between chunks, of which a busy machine makes more, a prompt holds more than at its end.
    monkeypatch.setenv("RAZOR_MAX_STEP_MS", "1e6")
    monkeypatch.setitem(measure.SIZES, "cpu", CeilingSizes(1 << 20, 64, seconds=0.01))
    folder = make_tiny("llama", tmp_path / "tiny")
    save_head_map(folder, ((False, True),) * 4, folder / "head_map.json")
    settings = EngineBenchSettings(
        model=str(folder), tokens="300", new_tokens=4, repeats=1, world_sizes="none", int8=True,
        threads=torch.get_num_threads(), json=tmp_path / "x.json",
    )  # fmt: skip
    record = run(settings)
    record.write()
    found = json.loads((tmp_path / "x.json").read_text())
    times = {one["name"]: one for one in found["one_process"]}
    assert times.keys() == found["floors"].keys() == {STOCK, *OWN.values()}
    for name, least in found["floors"].items():
        for key in ("prefill", "decode"):
            seconds = "prefill_seconds" if key == "prefill" else "decode_seconds_per_token"
            ratio = times[name][seconds] / least[seconds]
            assert least[f"{key}_over_floor"] == pytest.approx(ratio)
    least = {
        label: found["floors"][name]["decode_seconds_per_token"] for label, name in OWN.items()
    }
    assert least["int8 both"] < least["int8 weights"] < least["int8 keys"] < least["razor"]
    held = {label: times[name]["kv_bytes"] for label, name in OWN.items()}
    assert held["int8 both"] == held["int8 keys"] < held["razor"] == held["int8 weights"]
    assert held["int4 keys"] < held["int8 keys"]
    assert found["full_attention_generates_the_tokens_of_transformers"] is True
    assert not found["ranks"] and len(found["ratios"]) == 2 * len(OWN) + 1
    page = record.page()
    assert f" {found['floors'][STOCK]['prefill_over_floor']:.2f} |" in page
    assert "GFLOP/s in a matrix product (" in page and "Bytes, measured" not in page


def test_peers_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    engines, missing = open_peers(EngineBenchSettings(peers="openvino,llama-cpp"))
    assert not engines and len(missing) == 2
    assert missing[0].startswith("openvino was left out: ")
    assert missing[1].endswith("; pip install llama-cpp-python (extra: peers).")
    assert open_peers(EngineBenchSettings()) == ({}, [])


def test_openvino_reads_a_prompt_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    fake = SimpleNamespace(
        SchedulerConfig=lambda: SimpleNamespace(max_num_batched_tokens=256),
        LLMPipeline=lambda *_, **settings: given.update(settings),
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", fake)
    openvino_pipeline(Path("model.gguf"), 2, max_num_seqs=4)
    scheduler = given["scheduler_config"]
    assert scheduler.max_num_batched_tokens >= 1 << 32
    assert (scheduler.enable_prefix_caching, scheduler.max_num_seqs) == (False, 4)


def test_ranks_share_the_threads() -> None:
    settings = EngineBenchSettings(threads=4)
    assert [settings.config("razor", p).threads for p in (1, 2, 8)] == [4, 2, 1]
    assert settings.config("razor").window_min == 512, "the model's shipped defaults hold"


def test_the_prompt_is_the_seeds() -> None:
    assert random_tokens(100, 50, 0) == random_tokens(100, 50, 0) != random_tokens(100, 50, 1)
    assert len(random_tokens(100, 50, 0)) == 50
    assert max(random_tokens(100, 50, 0)) < 100


def test_the_command_that_is_written_down_can_be_run() -> None:
    settings = ProbeBenchSettings(model="a b", training=True, json=Path("x.json"))
    command = settings.command("probe")
    assert command.startswith("razor-dist bench probe --model 'a b' --tokens 2500 --repeats 4 ")
    assert "--training --train-tokens 32768" in command and "json" not in command


def test_the_cpus_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A Fine: CPU\n")
    assert cpu_name(file) == "A Fine: CPU"
    assert cpu_name(tmp_path / "none")


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from razor_dist.cli import main; main(['bench', '--help']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(("kept", "count"), [(0.3, 48), (0.001, 1), (1.0, 160), (0.25, 40)])
def test_kept_heads_are_spread_evenly(kept: float, count: int) -> None:
    decision = spread(kept, 40, 4)
    assert sum(map(sum, decision)) == count
    per_layer = [sum(row) for row in decision]
    assert max(per_layer) - min(per_layer) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((["--world-sizes", sizes], "world_sizes is") for sizes in WRONG_SIZES),
        *((["busy", "--busy", sizes], "busy is") for sizes in WRONG_SIZES),
        (["--shape", "/nowhere"], "there is no such folder; give a local folder"),
        (["shape", "/nowhere"], "there is no such folder; give a local folder"),
        (["shape", "x", "--kept", "0"], "above 0 and at most 1"),
        (["shape", "x", "--window-max", "0"], "window_max must be at least 1"),
        (["--peers", "openvino,vllm"], "peers has 'vllm'; there are openvino, llama-cpp"),
        (["--peers", "openvino", "--model", "/x"], "but model is '/x'; leave one of them out"),
        (["--tokens", "1K,2K"], "takes one length"),
        (["--tokens", "1Q"], "'1Q'"),
        (["shape", "glm-quarter", "--tokens", "1K,1024"], "each once"),
        (["shape", "x", "--markdown", "/nowhere/x.md"], "there is no folder /nowhere"),
        (["shape", "x", "--markdown", "/proc/x.md"], "cannot write /proc/x.md: "),
        (["--markdown", "/"], "cannot write /: it is a folder"),
        (["--json", "x", "--markdown", "x"], "give two files"),
        (["engine", "--kept", "0.5"], "--kept"),
        (["shape", "x", "--world-sizes", "1"], "--world-sizes"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capfd.readouterr().err
