"""The bench's arithmetic and its command line; the bench itself is run by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from razor_dist import cli
from razor_dist.evals.bench.engine import OWN, STOCK, rank_name, ratios
from razor_dist.evals.bench.measure import TimedRun, Timing, random_tokens, take_turns
from razor_dist.evals.bench.settings import EngineBenchSettings, ProbeBenchSettings
from razor_dist.evals.run_notes import cpu_name
from razor_dist.heads.decision import spread


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
        (0.8, 0.6, False),
        (1.1, None, None),
        (1.2, None, None),
        (2.0, 1.5, False),
        (10.0, None, None),
        (1.0, 1.5, True),
        (1.5, 2.0, True),
    ]


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


@pytest.mark.parametrize("sizes", ["", "0", "1,x", "8,8", "8, 8", "-1"])
def test_world_sizes_are_checked_before_anything_runs(
    sizes: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--world-sizes", sizes]) == 2
    assert "world_sizes is" in capfd.readouterr().err


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
        (["--shape", "/nowhere"], "give a folder with a config.json"),
        (["shape", "/nowhere"], "give a folder with a config.json"),
        (["shape", "x", "--kept", "0"], "above 0 and at most 1"),
        (["shape", "x", "--window-max", "0"], "window_max must be at least 1"),
        (["--tokens", "1K,2K"], "takes one length"),
        (["--tokens", "1Q"], "'1Q'"),
        (["shape", "x", "--tokens", "1K,1024"], "each once"),
        (["shape", "x", "--markdown", "/nowhere/x.md"], "there is no folder /nowhere"),
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
