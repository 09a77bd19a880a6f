"""What finding heads costs: the two probes agree, and failures are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from razor_dist import cli
from razor_dist.config.errors import ConfigError
from razor_dist.evals import identify_cost
from razor_dist.evals.bench_identify import in_process, run
from razor_dist.evals.identify_cost import Cost, CostSettings, measure
from tests.alibi_models import make_alibi
from tests.tiny_models import make_tiny


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_both_probes_find_the_same_scores(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    settings = CostSettings(model=str(path), tokens=60, threads=1)
    results = run(settings, ["probe", "materialised"], print, measure)
    costs = list(results.costs.values())
    assert all(isinstance(cost, Cost) and cost.tokens == 240 for cost in costs)
    assert results.difference is not None and results.difference < 1e-4


def test_matrices_are_held_by_the_baseline_alone(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    settings = CostSettings(
        model=str(path), random_weights=True, tokens=125, repeats=16, threads=1, dtype="fp32"
    )
    probe, matrices = (
        in_process(CostSettings(**{**settings.__dict__, "work": work}))
        for work in ("probe", "materialised")
    )
    assert isinstance(probe, Cost) and isinstance(matrices, Cost)
    assert probe.tokens == matrices.tokens == 2000
    # 8 query heads of 2000 x 2000 float32 are 122 MiB.
    assert matrices.peak_bytes - matrices.before_bytes > 122 << 20
    assert probe.peak_bytes - probe.before_bytes < 61 << 20


def test_a_length_beyond_the_context_is_measured(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)  # made for 4096 positions
    cost = measure(CostSettings(model=str(path), tokens=180, repeats=24, threads=1))
    assert cost.tokens == 4320


def test_training_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    path = make_tiny("llama", tmp_path)
    settings = CostSettings(
        work="training", model=str(path), random_weights=True, train_tokens=400, steps=2, threads=1
    )
    cost = in_process(settings)
    assert isinstance(cost, Cost) and cost.tokens == 800 and cost.seconds > 0
    assert cost.peak_bytes >= cost.before_bytes > 0


def test_the_command_says_and_writes_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_up(settings: CostSettings) -> Cost | str:
        if settings.work == "materialised":
            return "out of memory"
        return Cost(1.5, 100 << 20, 160 << 20, 10_000, {"echo": [[0.5]], "induction": [[0.25]]})

    monkeypatch.setattr("razor_dist.evals.bench_identify.in_process", made_up)
    file = tmp_path / "cost.json"
    assert cli.main(["bench-identify", "--training", "--steps", "3", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "materialised failed: out of memory" in shown
    table = " ".join(line for line in shown.splitlines() if line.startswith("│"))
    assert table.count("10,000") == 2 and table.count("1.5") == 2 and table.count("160") == 2
    stored = json.loads(file.read_text())
    assert stored["costs"]["probe"]["peak_bytes"] == 160 << 20
    assert stored["costs"]["materialised"] == {"failed": "out of memory"}
    assert stored["largest_difference_of_scores"] is None and "cpu" in stored["machine"]


@pytest.mark.parametrize("option", ["--model", "--shape"])
def test_models_without_a_probe_are_refused(
    option: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make_alibi("bloom", tmp_path / "tiny-bloom")
    assert cli.main(["bench-identify", option, str(path), "--training"]) == 2
    said = capfd.readouterr().err
    assert "not biased by distance (ALiBi), and tiny-bloom is" in said and "failed" not in said
    for work in ("probe", "materialised", "training"):
        settings = {"work": work, "model": str(path), "random_weights": option == "--shape"}
        assert identify_cost.main([json.dumps(settings)]) == 2
        assert "not biased by distance (ALiBi)" in capfd.readouterr().err


def test_mistakes_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench-identify", "--model", "a", "--shape", "b"]) == 2
    assert "give --model or --shape" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="no such folder"):
        run(CostSettings(), ["probe"], print, lambda _: "there is no such folder")
    for wrong in ({"steps": 0}, {"train_tokens": 300}, {"tokens": 1}, {"repeats": 1}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            CostSettings(**wrong)  # type: ignore[arg-type]
