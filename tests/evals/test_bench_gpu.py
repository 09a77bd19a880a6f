"""The GPU bench where there is none: every part has a status, and what can run is right."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from razor_dist import cli
from razor_dist.evals.bench import attention, gpu, measure, process
from razor_dist.evals.bench.measure import CeilingSizes
from razor_dist.evals.bench.settings import ShapeBenchSettings
from razor_dist.evals.bench.wheels import unpack_missing
from tests.tiny_models import make_tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.SIZES, "cpu", CeilingSizes(8 << 20, 128, seconds=0.01))
    monkeypatch.setitem(attention._SECONDS, "cpu", 0.01)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1024), (16, 512)])
def test_paths_agree_with_float64(queries: int, keys: int) -> None:
    figures, [table] = attention.measure_attention(CPU, (1, 2), queries, keys)
    found = {(one["path"], one["kv_heads"]): one for one in figures["paths"]}
    for heads in (1, 2):
        for path in ("kernels.attend", "kernels.attend, bias", "kernels.attend, torch_cpu"):
            one = found[path, heads]
            assert one["status"] == "done"
            assert one["lse_error"] < 1e-5 and one["out_error"] < 1e-5
            read = 2 * heads * keys * attention.HEAD_DIM * 4
            assert one["bytes_per_second"] == pytest.approx(read / one["seconds"])
            operations = 4 * heads * attention.GROUP * queries * keys * attention.HEAD_DIM
            assert one["operations_per_second"] == pytest.approx(operations / one["seconds"])
        for path in (
            "flash", "flash, seqused_k", "cuDNN", "FA3", "kernels.attend, torch_cuda",
            "Triton, block tables", "Triton, scattered pages",
        ):  # fmt: skip
            assert found[path, heads]["status"].startswith("skipped: ")
    assert str(table).count("skipped: ") == sum(
        "skipped" in one["status"] for one in found.values()
    )


def test_a_wrong_path_is_seen() -> None:
    q, k, v = (torch.randn(1, *size, 16) for size in ((8, 1), (64,), (64,)))
    want = attention.reference(q, k, v)

    def base_two(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention._own(*arguments)
        return out, lse / 0.6931

    assert attention._measure(base_two, q, [(k, v)], want)["lse_error"] > 1


def test_every_part_has_a_status_and_a_failure_costs_its_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ShapeBenchSettings(
        shape=str(make_tiny("glm", tmp_path / "tiny")),
        tokens="300",
        window_max="64",
        kept=0.5,
        new_tokens=4,
        repeats=1,
        device="cpu",
    )
    monkeypatch.setattr(gpu, "shape_settings", lambda device: small)

    def here(module: str, function: str, name: str, device: str, **_: Any) -> dict[str, Any]:
        if name == "prefill":
            return {"failed": "not done within 5 s"}
        found: dict[str, Any] = json.loads(json.dumps(gpu.run_part(name, device)))
        return found

    monkeypatch.setattr(gpu, "call", here)
    out = tmp_path / "out"
    assert cli.main(["bench", "gpu", "--out", str(out), "--device", "cpu"]) == 0
    found = json.loads((out / "gpu.json").read_text())
    parts = found["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "versions": "done",
        "correct": "skipped: needs a CUDA device",
        "launch": "done",
        "decode": "done",
        "prefill": "failed: not done within 5 s",
        "shape": "done",
        "replay": "done",
        "tests": "skipped: needs a CUDA device",
    }
    assert {path.name for path in out.iterdir()} == {"gpu.json", "gpu.md", "gpu.log"}
    assert "seqused_k" in parts["versions"]["versions"]["_flash_attention_forward"]
    assert 0 < parts["launch"]["seconds_per_kernel"]["eager"] < 1e-3
    assert parts["replay"]["launches"] == sum(parts["replay"]["count"].values()) > 10
    assert set(parts["shape"]["lengths"][0]["engines"]) == {"razor", "full"}
    page = (out / "gpu.md").read_text()
    assert page in capfd.readouterr().out + "\n"
    for word in (found["command"], "aten::", "razor / full", "replayed from a recording"):
        assert word in page


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert process.call("time", "sleep", 60, seconds=2, log=log) == {
        "failed": "not done within 2 s"
    }


def test_a_process_gives_its_result_or_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert process.call("json", "loads", '{"a": 1}', log=log) == {"a": 1}
    assert process.call("json", "loads", "{", log=log)["failed"].startswith("Expecting property")
    assert "Traceback" in log.read_text()
    assert process.call("os", "_exit", 3, log=log) == {"failed": "exit code 3"}
    assert process.call("os", "abort", log=log) == {"failed": "ended by signal 6"}


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


def test_every_test_for_a_gpu_is_in_the_files_that_are_run() -> None:
    root = Path(__file__).parents[2]
    marked = {
        str(path.relative_to(root))
        for path in (root / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b|\bDEVICES\b", path.read_text())
        and path != Path(__file__)
    }
    assert marked == {*gpu._TESTS, *gpu._KERNEL_TESTS}
