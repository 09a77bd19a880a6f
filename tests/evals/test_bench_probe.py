"""Cost of finding heads: the two probes agree, and failures are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from razor_dist import cli
from razor_dist.config.errors import ConfigError
from razor_dist.evals.bench import probe
from razor_dist.evals.bench.probe import measure, run
from razor_dist.evals.bench.settings import ProbeBenchSettings
from razor_dist.jobs import process
from razor_dist.jobs.process import call
from tests.alibi_models import make_alibi
from tests.tiny_models import make_tiny


def in_process(work: str, values: dict[str, Any]) -> dict[str, Any]:
    return call(measure, work, ProbeBenchSettings(**values))


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_both_probes_find_the_same_scores(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny(family, tmp_path)
    settings = ProbeBenchSettings(model=str(path), tokens=60, threads=1)
    monkeypatch.setattr(probe, "call", lambda function, *arguments: function(*arguments))
    figures = run(settings).figures
    assert [cost["tokens"] for cost in figures["costs"].values()] == [240, 240]
    assert 0 <= figures["largest_difference_of_scores"] < 1e-4


@pytest.mark.slow
def test_matrices_are_held_by_the_baseline_alone(tmp_path: Path) -> None:
    shape = str(make_tiny("llama", tmp_path))
    values = {"shape": shape, "tokens": 125, "repeats": 16, "threads": 1, "dtype": "fp32"}
    light, matrices = (in_process(work, values) for work in ("probe", "materialised"))
    assert light["tokens"] == matrices["tokens"] == 2000
    # 8 query heads of 2000 x 2000 float32 are 122 MiB.
    assert matrices["peak_bytes"] - matrices["before_bytes"] > 122 << 20
    assert light["peak_bytes"] - light["before_bytes"] < 61 << 20


def test_a_length_beyond_the_context_is_measured(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)  # made for 4096 positions
    settings = ProbeBenchSettings(model=str(path), tokens=180, repeats=24, threads=1)
    cost = measure("probe", settings)
    assert cost["tokens"] == 4320


@pytest.mark.slow
def test_training_is_measured(tmp_path: Path) -> None:
    shape = str(make_tiny("llama", tmp_path))
    cost = in_process("training", {"shape": shape, "train_tokens": 400, "steps": 2, "threads": 1})
    assert cost["tokens"] == 800 and cost["seconds"] > 0
    assert cost["peak_bytes"] >= cost["before_bytes"] > 0


def test_the_command_says_and_writes_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_up(function: Any, work: str, settings: ProbeBenchSettings) -> dict[str, Any]:
        if work == "materialised":
            return {"failed": "out of memory"}
        cost = {"before_bytes": 100 << 20, "peak_bytes": 160 << 20, "tokens": 10_000}
        scores = {"echo": [[0.5]], "induction": [[0.25]]}
        return {"seconds": 1.5, **cost, **({"scores": scores} if work == "probe" else {})}

    monkeypatch.setattr(probe, "call", made_up)
    file = tmp_path / "cost.json"
    assert cli.main(["bench", "probe", "--training", "--steps", "3", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "materialised failed: out of memory" in shown
    table = " ".join(line for line in shown.splitlines() if line.startswith("|"))
    assert table.count("10,000") == 2 and table.count("1.5") == 2 and table.count("160") == 2
    stored = json.loads(file.read_text())
    assert stored["costs"]["probe"]["peak_bytes"] == 160 << 20
    assert stored["costs"]["materialised"] == {"failed": "out of memory"}
    assert stored["largest_difference_of_scores"] is None and "cpu" in stored["machine"]


@pytest.mark.parametrize("option", ["model", "shape"])
def test_models_without_a_probe_are_refused(
    option: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(make_alibi("bloom", tmp_path / "tiny-bloom"))
    assert cli.main(["bench", "probe", f"--{option}", path, "--training"]) == 2
    said = capfd.readouterr().err
    assert "not biased by distance (ALiBi), and tiny-bloom is" in said and "failed" not in said


def test_mistakes_are_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["bench", "probe", "--model", "a", "--shape", "b"]) == 2
    assert "give --model or --shape" in capfd.readouterr().err
    monkeypatch.setattr(probe, "call", lambda *_: {"failed": "there is no such folder"})
    with pytest.raises(ConfigError, match="no such folder"):
        run(ProbeBenchSettings())
    for wrong in ({"steps": 0}, {"train_tokens": 320}, {"tokens": 1}, {"repeats": 1}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            ProbeBenchSettings(**wrong)


def test_a_process_that_ends_before_it_begins_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "guarded", lambda *_: ["sh", "-c", "exit 7"])
    assert call(print, "x" * 100_000) == {"failed": "exit code 7"}
