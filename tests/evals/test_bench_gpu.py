"""The GPU bench where there is none: every part has a status, and what can run is right."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from packaging.requirements import Requirement
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from razor_dist.config.errors import ConfigError
from razor_dist.evals.bench import attention, gpu, gpu_parts, measure, one_of_eight
from razor_dist.evals.bench.gpu import Bench
from razor_dist.evals.bench.measure import CeilingSizes, Rates
from razor_dist.evals.bench.one_of_eight import RankAlone
from razor_dist.evals.bench.settings import GpuBenchSettings
from razor_dist.evals.bench.wheels import hide_kernels, unpack_missing
from razor_dist.jobs.process import call
from razor_dist.plan.compute import collectives, traffic
from tests.tiny_models import make_tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.SIZES, "cpu", CeilingSizes(8 << 20, 128, seconds=0.01))
    fastest = measure.fastest
    monkeypatch.setattr(attention, "fastest", lambda of, device, _: fastest(of, device, 0.01))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1024), (16, 512)])
def test_paths_agree_with_float64(queries: int, keys: int) -> None:
    ceilings = Rates(1e9, 1e12)
    figures, [table] = attention.measure_attention(CPU, ceilings, (1, 2), queries, keys)
    found = {(one["path"], one["kv_heads"]): one for one in figures["paths"]}
    for heads in (1, 2):
        for path in ("kernels.attend", "kernels.attend, torch_cpu"):
            one = found[path, heads]
            assert one["status"] == "done"
            assert one["lse_error"] < 1e-5 and one["out_error"] < 1e-5
            read = 2 * heads * keys * attention.HEAD_DIM * 4
            assert one["bytes_per_second"] == pytest.approx(read / one["seconds"])
            operations = 4 * heads * attention.GROUP * queries * keys * attention.HEAD_DIM
            assert one["operations_per_second"] == pytest.approx(operations / one["seconds"])
        for path in (
            "flash", "cuDNN", "kernels.attend, torch_cuda",
            "Triton, block tables", "Triton, scattered pages",
        ):  # fmt: skip
            assert found[path, heads]["status"].startswith("skipped: ")
    assert str(table).count("skipped: ") == sum(
        "skipped" in one["status"] for one in found.values()
    )


def test_no_path_of_cpus_is_taken_on_cuda() -> None:
    """It would compile C++ for 20 s of the nine minutes."""
    here, there = (attention.paths(torch.device(kind)) for kind in ("cpu", "cuda"))
    cpus = {f"kernels.attend, {name}" for name in ("many_cpu", "torch_cpu")}
    assert here.keys() - there.keys() == cpus


def test_a_wrong_path_is_seen() -> None:
    q, k, v = (torch.randn(1, *size, 16) for size in ((8, 1), (64,), (64,)))
    want = attention.reference(q, k, v)

    def base_two(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention.paths(CPU)["kernels.attend"](*arguments)
        return out, lse / 0.6931

    assert attention.measure(base_two, q, [(k, v)], want)["lse_error"] > 1


@pytest.mark.long
def test_a_failure_costs_its_part_only(tmp_path: Path) -> None:
    """With real processes: what failing parts had said is kept, and the next begin in another."""
    settings = GpuBenchSettings(out=tmp_path / "out", device="cpu", patience=2)
    record = gpu.run(settings, "tests.evals.gpu_parts_that_fail")
    parts = record.figures["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "good": "done",
        "raises": "failed: CUDA error: an illegal memory access",
        "absent": "skipped: needs a CUDA device",
        "good again": "done",
        "crashes": "failed: ended with -6",
        "hangs": "failed: not done within 2 s",  # of its own: the process was just begun
        "last": "done",
    }
    assert all(parts[name]["before"] == 1 for name in ("raises", "absent", "crashes", "hangs"))
    assert parts["good"]["more"] == 2
    assert 20 < parts["good"]["left"] < 2 * 20 - 1  # it is asked to end before it is ended
    processes = [parts[name]["process"] for name in ("good", "good again", "last")]
    assert len(set(processes)) == 3
    assert {path.name for path in settings.out.iterdir()} == {"gpu.json", "gpu.md", "gpu.log"}
    assert json.loads((settings.out / "gpu.json").read_text())["parts"] == parts
    page = (settings.out / "gpu.md").read_text()
    assert page.count("first row") == 3 and "an illegal memory access" in page
    assert "Traceback" in (settings.out / "gpu.log").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_what_cannot_begin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        gpu.run(GpuBenchSettings(out=tmp_path, device="cuda"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make the folder .*file: File exists"):
        gpu.run(GpuBenchSettings(out=tmp_path / "file"))


@pytest.mark.long
def test_parts_without_time_are_said_to_be_skipped(tmp_path: Path) -> None:
    settings = GpuBenchSettings(out=tmp_path, device="cpu", minutes=0.0001)
    parts = gpu.run(settings, "tests.evals.gpu_parts_that_fail").figures["parts"]
    assert {part["status"] for part in parts.values()} == {"skipped: no time was left"}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_whole_command_runs_on_cpu(tmp_path: Path) -> None:
    """With `make gpu`'s own processes; the tests that it would run need a GPU."""
    root = Path(__file__).parents[2]
    out = tmp_path / "out"
    variables = {
        "GPU_PYTHON": sys.executable,
        "GPU_OUT": out,
        "GPU_UNPACKED": tmp_path / "unpacked",
        "GPU_OPTIONS": "--device cpu --patience 4",  # other tests run beside it
    }
    command = ["make", "gpu", *(f"{name}={value}" for name, value in variables.items())]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=540)
    assert not said.returncode, said.stderr
    assert {path.name for path in out.iterdir()} == {"gpu.json", "gpu.md", "gpu.log"}
    assert "razor-dist bench gpu" in (out / "gpu.md").read_text()
    found: dict[str, dict[str, Any]] = json.loads((out / "gpu.json").read_text())["parts"]
    no_gpu = dict.fromkeys(("correct", "tests"), "skipped: needs a CUDA device")
    if find_spec("triton") is None:
        no_gpu["decode"] = "skipped: the sweep needs triton"
    assert {name: part["status"] for name, part in found.items()} == {
        name: no_gpu.get(name, "done") for name in gpu_parts.PARTS
    }
    schema = found["versions"]["versions"]["_scaled_dot_product_cudnn_attention"]
    assert "compute_log_sumexp" in schema
    assert 0 < found["ceilings"]["seconds_per_kernel"]["eager"] < 1e-2
    for batch in (1, 2):
        one = found["rank decode"][f"batch_{batch}"]
        assert one["in_graphs"] and one["replay_differs_by"] < 1e-6
        assert one["host_seconds"] == one["step_seconds"] - one["replay_seconds"]
        assert found["rank decode"][f"profile_{batch}"]["launches"] > 10
    for tokens in gpu_parts.CPU.chunks:
        one = found["rank prefill"][f"tokens_{tokens}"]
        assert set(one["seconds"]) == {"first", "again", "16 fewer", "again, 16 fewer"}
        assert one["operations_per_second"] > 0
    assert found["shape"]["in_graphs"] and found["shape"]["replay_differs_by"] < 1e-6
    assert found["shape"]["profile"]["launches"] > 10
    assert len(found["sampler"]["seconds"]) == 6
    for queries, _ in gpu_parts.CPU.choosing:
        assert len(found["chosen blocks"][f"queries_{queries}"]) == 4


@pytest.mark.long
def test_the_parts_need_no_other_packages_than_make_gpu_wheels_fetches(tmp_path: Path) -> None:
    """Nor do the tests for a GPU, which load models."""
    root, model = Path(__file__).parents[2], make_tiny("llama", tmp_path / "tiny")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    makefile = (root / "Makefile").read_text()
    needs = " ".join(re.findall(r"^GPU_NEEDS(?:_ALONE)? := (.*)$", makefile, re.MULTILINE))
    # What transformers brings, and what the machine has.
    there = {*needs.split(), "torch", "transformers", "numpy", "safetensors", "tokenizers"}
    there |= {"httpx", "huggingface-hub"}
    others = {Requirement(one).name for one in project["dependencies"]} - there
    assert {"matplotlib", "fastapi", "uvicorn"} <= others
    absent = dict.fromkeys(name.replace("-", "_") for name in others)
    code = f"import sys; sys.modules |= {absent}; import razor_dist.evals.bench.gpu_parts, "
    code += (
        f"razor_dist.cli, razor_dist.commands.bench, tests.cases as c; c.all_full({str(model)!r})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert not said.returncode, said.stderr


def test_a_rank_alone_reads_and_sends_what_a_rank_of_eight_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequences have the whole context, its shard an eighth; its weights are its own part."""
    folder = str(make_tiny("glm", tmp_path / "tiny"))
    bench = Bench(CPU, time.monotonic() + 100)
    context = 1024
    rank = RankAlone(bench, folder, context, 2)
    with torch.inference_mode():
        steps = rank.steps_of(2, context, 3)
        for _ in range(5):
            next(steps)
        sequences = list(rank.runner.sequences.values())
        assert len(sequences) == 2
        for sequence in sequences:
            assert context - 40 < sequence.length < context
            assert max(sequence.shard_tokens) - min(sequence.shard_tokens) <= 4
            assert sequence.table.tokens == sequence.shard_tokens[0]
        sent = rank.runner.comm.bytes_sent
        before = sent["tensor"]
        next(steps)
    assert rank.runner.decode == "tensor"
    comm, counted = rank.runner.comm, {}
    for name in ("_all_gather", "_sum", "_exchange"):
        counted[name] = Mock(wraps=getattr(comm, name))
        monkeypatch.setattr(comm, name, counted[name])
    assert rank.runner.graphs is not None
    rank.runner.graphs.enabled = False
    with torch.inference_mode():
        next(steps)
    assert sum(calls.call_count for calls in counted.values()) == collectives(rank.d, context)
    assert counted["_sum"].call_count == 2 * rank.d.shape.layers
    # In two steps of two sequences: the hidden state and the logits, as the planner counts them.
    planned = traffic(rank.d, context).decode[0]["tensor"]
    assert sent["tensor"] - before == 2 * 2 * planned


def test_a_step_that_cannot_be_recorded_is_timed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Mock(side_effect=RuntimeError("operation not permitted"))
    monkeypatch.setattr(one_of_eight.Tape, "record", record)
    folder, bench = str(make_tiny("glm", tmp_path / "tiny")), Bench(CPU, time.monotonic() + 100)
    [(found, table, _)] = one_of_eight.decode(bench, folder, 1024, (1,), 3)
    assert record.called and not found["in_graphs"]
    assert found["step_seconds"] > 0 and found["replay_seconds"] is None
    assert table.rows[1][2:5] == ["", "", "False"]


@pytest.mark.long
def test_constants_are_swept_and_held_against_float64() -> None:
    command = [sys.executable, "-m", "tests.evals.gpu_parts_that_fail"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert not said.returncode, said.stderr
    found: list[dict[str, Any]]
    found, late = json.loads(said.stdout.splitlines()[-1])
    assert late == [{"sweep_bf16": {"tried": []}}, {"sweep_int8": {"tried": []}}]
    for figures in found:
        [(name, one)] = figures.items()
        variants = [(tried["variant"], tried["kv_heads"]) for tried in one["tried"]]
        best = "64, 3, 4"
        assert variants == [("as shipped", 1), (best, 1), ("as shipped", 2), (best, 2)]
        for tried in one["tried"]:
            assert tried["status"] == "done"
            assert tried["lse_error"] < 1e-3
            width = 128 + 4 if name == "sweep_int8" else 256
            assert tried["bytes"] == 2 * tried["kv_heads"] * 128 * width
        assert one["best"] == {"tile": 64, "stages": 3, "warps": 4, "split": 0}


def test_constants_are_those_that_the_kernel_has() -> None:
    """The sweep changes names that the kernel's module reads."""
    text = (Path(__file__).parents[2] / "kernels" / "decode_triton.py").read_text()
    for name in ("TILES", "WARPS", "STAGES", "_SPLITS"):
        assert len(re.findall(rf"\b{name}\b", text)) >= 2


@pytest.mark.long
def test_a_process_gives_its_result_or_the_reason(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        assert call(json.loads, '{"a": 1}', output=log) == {"a": 1}
        assert call(json.loads, "{", output=log)["failed"].startswith(
            "JSONDecodeError: Expecting property"
        )
        assert "Traceback" in (tmp_path / "log").read_text()
    assert call(os._exit, 3) == {"failed": "exit code 3"}
    assert call(os.abort) == {"failed": "ended by signal 6"}


def test_without_an_answer_of_nvidia_smi_there_are_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Mock(side_effect=subprocess.TimeoutExpired("nvidia-smi", 10))
    monkeypatch.setattr(subprocess, "run", late)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: "a device")
    [(figures, _)] = gpu_parts.versions(Mock(cuda=True, device=CPU))
    assert "timed out after 10 s" in figures["versions"]["nvidia-smi"]


def make_wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "there = True\n")


def test_missing_packages_come_from_wheels_and_installed_ones_stay(tmp_path: Path) -> None:
    for name in ("pytest", "nobody_has_this"):
        make_wheel(tmp_path, name)
    target = tmp_path / "unpacked"
    assert unpack_missing(tmp_path, target) == ["nobody_has_this"]
    assert [path.name for path in target.iterdir()] == ["nobody_has_this"]
    assert unpack_missing(tmp_path / "nothing", target) == []


def test_transformers_leaves_our_kernels_alone(tmp_path: Path) -> None:
    """Though Hugging Face's package of that name is installed, too."""
    installed, target = tmp_path / "installed", tmp_path / "target"
    metadata = f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
    (installed / "kernels-1.dist-info").mkdir(parents=True)
    (installed / "kernels-1.dist-info" / "METADATA").write_text(metadata)
    path = os.pathsep.join(map(str, (Path(__file__).parents[2], target, installed)))
    code = "from transformers.utils import import_utils; print(import_utils.is_kernels_available())"
    command, found = [sys.executable, "-c", code], []
    for prepare in (lambda _: None, hide_kernels):
        prepare(target)
        env = os.environ | {"PYTHONPATH": path}
        found.append(subprocess.check_output(command, env=env, text=True).strip())
    assert found == ["True", "False"]


def test_every_test_for_a_gpu_is_in_the_files_that_are_run() -> None:
    root = Path(__file__).parents[2]
    marked = {
        str(path.relative_to(root))
        for path in (root / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b|\bDEVICES\b", path.read_text())
        and not path.name.startswith("test_bench_gpu")
    }
    assert marked == {*gpu_parts.TESTS, *gpu_parts.KERNEL_TESTS}
