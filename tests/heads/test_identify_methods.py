"""The methods of the identify command that hide passkeys, end to end on a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.commands.identify import method_first
from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.heads.head_map import HeadMap
from razor_dist.models.loader import model_fingerprint, read_config
from razor_dist.models.shape import ModelShape
from tests.alibi_models import make_alibi
from tests.heads.command import identify_heads
from tests.tiny_models import make_tiny

SMALL = ["--passkeys", "2", "--max-tokens", "1500", "--sink-tokens", "4", "--recent-tokens", "16"]


def _run(method: str, model: Path, out: Path, *options: str) -> str:
    return identify_heads(method, model, "--out", out, *options)


TEXTS = ["--tokens", "300"]


@pytest.mark.parametrize(
    ("method", "own"), [("onthefly", SMALL), ("kvzip", TEXTS), ("reach", TEXTS)]
)
def test_methods_write_a_map(method: str, own: list[str], letters: Path, tmp_path: Path) -> None:
    out, again, other = (tmp_path / f"{name}.json" for name in ("map", "again", "other"))
    options = [*own, "--samples", "2", "--sparsity", "0.6"]
    text = _run(method, letters, out, *options)
    found = HeadMap.load(out)
    config = read_config(letters)
    found.validate(ModelShape.from_config(config), model_fingerprint(config))
    assert found.method == method
    assert sum(map(sum, found.retrieval)) == 3  # ceil(0.6 x 7) of 8 are local
    assert "2 samples; " in text and "kept 3 of 8 KV heads (37.5%)" in text
    _run(method, letters, again, *options)
    assert HeadMap.load(again) == found
    if method == "onthefly":
        assert found.settings["passkeys"]["passkeys"] == 2
        return
    assert found.settings["tokens"] == 300
    (tmp_path / "prose.txt").write_text("A sentence that is not in any reference of Python. " * 9)
    _run(method, letters, other, *options, "--haystack", str(tmp_path))
    assert HeadMap.load(other).kv_scores != found.kv_scores


def test_a_budget_decides_heads_and_windows(letters: Path, tmp_path: Path) -> None:
    out, two = tmp_path / "map.json", tmp_path / "two.json"
    shape = ModelShape.from_config(read_config(letters))
    token = 2 * shape.head_dim * 4  # bytes
    most = 8 * 350 * token
    options = ["--samples", "2", "--tokens", "300", "--device", "cpu", "--budget", str(most)]
    options += ["--budget-tokens", "1000", "--short-window", "100"]
    # Of 100, 200, 400 and 800, such texts measure two.
    text = _run("reach", letters, out, *options, "--mass-tokens", "500")
    found = HeadMap.load(out)
    assert found.windows is not None
    flat = [window for row in found.windows for window in row]
    assert {*flat} == {None, 100, 200}
    # Of a streaming head, the sinks, a block until the window moves, the compensation token.
    policy = StreamingPolicy()
    beside = policy.sinks + policy.block
    kept = token * sum(1000 if window is None else window + beside for window in flat)
    assert kept <= most < kept + 1000 * token
    assert found.settings["budget"]["bytes"] == most and found.kv_scores.keys() == {"reach"}
    assert f"{kept:,} of {most:,} bytes at 1,000 tokens" in text and "a window of 200" in text
    assert "2 texts of 500 tokens, windows of [100, 200]" in text and "mass dropped: 0." in text
    text = _run("reach", letters, two, *options, "--middle-share", "0")
    found = HeadMap.load(two)
    assert found.windows is not None
    assert {window for row in found.windows for window in row} == {None, 100}
    assert "mass dropped" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--short-window", "9"], "--short-window needs --budget"),
        (["--budget", "1G", "--sparsity", "0.3"], "--sparsity is of no use with --budget: bytes"),
        (["--budget", "9"], "budget is 9 bytes, but short windows of 4000 tokens alone take"),
        (["--budget", "1G", "--budget-tokens", "8K"], "budget_tokens is 8192, but the model holds"),
        (
            ["--budget", "1G", "--short-window", "3000", "--middle-window", "3500"],
            "texts of 4096, which are too short: give --mass-tokens 7000",
        ),
        (
            ["--budget", "1G", "--short-window", "600", "--mass-tokens", "2399"],
            "beyond a window of 1200 tokens is measured on texts of 2399, which are too short",
        ),
        (["--budget", "1G", "--middle-window", "9"], "middle_window is 9 tokens, but must be"),
    ],
)
def test_budgets_that_are_refused(
    options: list[str],
    message: str,
    letters: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the work, which takes hours for some methods."""
    loads = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr("razor_dist.commands.identify_run.load_model", loads)
    out = tmp_path / "map.json"
    with pytest.raises(ConfigError, match=re.escape(message)):
        _run("reach", letters, out, "--samples", "1", "--tokens", "300", *options)
    assert not out.exists()


def test_a_map_is_not_replaced_by_its_picture(letters: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    with pytest.raises(ConfigError, match=r"--out and --plot both name .*map\.json"):
        _run("reach", letters, out, "--plot", str(out))


def test_sharded_weights_and_a_budget_are_refused_before_the_training(
    letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masses are measured on one device."""
    loads = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr("razor_dist.commands.identify_run.load_model", loads)
    options = [*SMALL, "--zero-stage", "3", "--budget", "1G", "--short-window", "600"]
    with pytest.raises(ConfigError, match="--zero-stage 3 excludes --budget, unless"):
        _run("duo", letters, tmp_path / "map.json", *options)


@pytest.mark.slow
def test_duo_trains_on_torchruns_ranks_and_resumes(letters: Path, tmp_path: Path) -> None:
    """In processes of its own: a process group lasts as long as its process."""
    train = [str(letters), *SMALL, "--device", "cpu"]
    train += ["--steps", "4", "--learning-rate", "0.2", "--checkpoint-every", "2"]
    state, out, again = tmp_path / "run", tmp_path / "map.json", tmp_path / "again.json"
    command = Path(sys.executable).with_name("torchrun")
    ranks = [str(command), "--standalone", "--nproc-per-node", "2", "--no-python"]
    ranks += [str(command.with_name("razor-dist"))]
    said, log = _process(
        [*ranks, "identify", "duo", *train, "--out", str(out), "--checkpoint", str(state)]
    )
    assert "4 steps; " in said and said.count("wrote") == 1
    assert log.count("step 2 of 4: ") == log.count("step 4 of 4: ") == 1
    found = HeadMap.load(out)
    assert found.method == "duo" and set(found.kv_scores) == {"gate"}
    assert found.settings["training"]["steps"] == 4
    # Resumed where it is done, on one rank and with another rule: the gates are the same. The
    # command's older form.
    resumed = [*train, "--out", str(again), "--resume", str(state), "--threshold", "0.5"]
    older = ["identify", *resumed, "--method", "duo"]
    _process([sys.executable, "-c", _MAIN, *older])
    assert HeadMap.load(again).kv_scores == found.kv_scores
    for options, problem in (
        (["--checkpoint", str(state)], "holds the state of a run; continue it with --resume"),
        (["--resume", str(state), "--l1", "0.5"], "has l1 0.05, this one 0.5"),
        (["--resume", str(tmp_path / "no")], "there is no run to resume"),
        (["--resume", str(state), "--checkpoint", str(state)], "--checkpoint or --resume"),
    ):
        with pytest.raises(ConfigError, match=problem):
            _run("duo", letters, again, *train[1:], *options)


_MAIN = "import sys; from razor_dist.cli import main; sys.exit(main())"


def _process(command: list[str]) -> tuple[str, str]:
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**alone, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout, result.stderr


@pytest.mark.parametrize(
    ("method", "options", "problem"),
    [
        ("onthefly", ["--max-tokens", "50"], "max_tokens is 50, but 10 passkeys"),
        ("duo", ["--steps", "0"], "steps must be at least 1"),
        ("duo", ["--haystack", "/nowhere"], "haystack: /nowhere holds no .txt files"),
        ("duo", [*SMALL, "--checkpoint", f"{__file__}/run"], f"cannot make the folder {__file__}"),
        ("duo", ["--verify-window", "9"], "--verify-window needs --verify"),
    ],
)
def test_mistakes(
    letters: Path, tmp_path: Path, method: str, options: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        _run(method, letters, tmp_path / "map.json", *options)


def test_only_duo_uses_several_ranks(
    letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="only duo uses torchrun's ranks"):
        _run("onthefly", letters, tmp_path / "map.json")


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    bare = make_tiny("llama", tmp_path / "bare")
    for method in ("onthefly", "kvzip", "reach"):
        with pytest.raises(ModelError, match="has no tokenizer, and this method reads text"):
            _run(method, bare, tmp_path / "map.json")


@pytest.mark.parametrize(
    ("flags", "trusted"),
    [
        ([], False),
        (["--trust-remote-code"], True),
        (["--trust-remote-code", "--no-trust-remote-code"], False),
    ],
)
def test_a_method_is_chosen_by_remote_code_if_it_is_trusted(
    flags: list[str], trusted: bool, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = mock.Mock(wraps=read_config)
    monkeypatch.setattr("razor_dist.models.loader.read_config", read)
    assert method_first([str(letters), *flags]) == ["razor", str(letters), *flags]
    assert read.call_args.kwargs["trust_remote_code"] is trusted


def test_the_older_form_is_understood(letters: Path, tmp_path: Path) -> None:
    assert method_first(["m", "--method", "duo", "--l1", "1"]) == ["duo", "m", "--l1", "1"]
    assert method_first(["--out", "x", "--method=razor", "m"]) == ["razor", "--out", "x", "m"]
    bloom = make_alibi("bloom", tmp_path / "bloom")
    for folder, method in ((letters, "razor"), (bloom, "alibi")):
        rest = ["--verify", str(folder), "--out", "x"]
        assert method_first(rest) == [method, *rest]
        assert method_first(["--method", "auto", "--out=x", *rest]) == [method, "--out=x", *rest]
