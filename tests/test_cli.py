"""The command line's public surface."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

import razor_dist
from razor_dist import cli
from razor_dist.commands.batch import batch
from razor_dist.commands.bench import bench
from razor_dist.commands.eval import eval as eval_group
from razor_dist.commands.heads import heads
from razor_dist.commands.plan import plan
from razor_dist.commands.prefill import prefill
from razor_dist.commands.serve import serve
from razor_dist.commands.store import store
from razor_dist.commands.summarize import summarize
from razor_dist.config.errors import ClusterError, EngineError, ModelError
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.config.sources import load_config
from razor_dist.models.registry import config_folder

SERVE_OPTIONS = """
    --allowed-hosts --allowed-origins --api-key --api-key-file --attention --block
    --body-timeout --chunked-prefill-size --collective-timeout --compensation --config
    --cuda-graphs --decode --default-max-tokens --device --dtype --generation-config --head-map
    --header-timeout --repetition-detection --unknown-fields
    --heartbeat-timeout --host --kv-dtype --kv-tokens --log-format --log-level --max-body-mb
    --retrieval-share
    --max-connections --max-model-len --max-num-seqs --max-queue --max-requests-per-key
    --max-step-ms --max-tokens-per-key --max-total-body-mb --metrics-prefix --model
    --no-compensation --otlp-endpoint --pinned-gb
    --no-cuda-graphs --no-prefix-cache --no-shared-memory --no-trust-remote-code --page-size --port
    --prefill --prefix-cache --prefix-host-gb --prefix-store --prefix-store-gb --prefix-tail-tokens
    --share-prefixes --no-share-prefixes
    --request-timeout --ring --rope-scaling --scheduling-policy --seed --served-model-name
    --shared-memory
    --shutdown-timeout --sink-tokens --source-heads --speculative-config --ssl-certfile
    --ssl-keyfile --threads --trust-remote-code --url-file --weight-dtype --weights
    --window-max --window-min --window-ratio --world-size
"""


def options(command: Any) -> set[str]:
    """All option names of a typer command, --help and old names excepted."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    parameters = typer.main.get_command(app).params
    return {n for p in parameters if not is_hidden(p) for n in [*p.opts, *p.secondary_opts]}


def is_hidden(parameter: Any) -> bool:
    """Return whether it is an argument, or the old name of an option."""
    return parameter.param_type_name != "option" or parameter.hidden


def test_the_options_of_serve_are_frozen() -> None:
    """Renaming or dropping a flag breaks scripts: change this list on purpose only."""
    assert options(serve) == set(SERVE_OPTIONS.split())


@pytest.mark.parametrize("unit", ["razor-dist.service", "razor-dist-torchrun.service"])
def test_the_units_give_options_that_exist(unit: str) -> None:
    text = (Path(__file__).parents[1] / "deploy" / unit).read_text().replace("\\\n", " ")
    [start] = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    flags = re.split(r"/razor-dist serve |launch/serve\.py ", start)[1]
    given = re.findall(r"--[\w-]+", flags)
    assert "--api-key-file" in given and set(given) <= options(serve)
    patience = re.search(r"--shutdown-timeout (\d+)", flags)
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert patience and stop and int(stop[1]) > int(patience[1])


PLAN_OPTIONS = """
    --attention --block --compensation --config --context --decode --device --dtype --head-map
    --json --kv-dtype --kv-tokens --max-model-len --max-num-seqs --no-compensation
    --retrieval-share
    --no-prefix-cache --prefix-cache --prefix-tail-tokens
    --no-trust-remote-code --page-size --prefill --retrieval --rope-scaling --sink-tokens
    --trust-remote-code
    --chunked-prefill-size --weight-dtype --window-max --window-min --window-ratio --world-size
"""


def test_the_options_of_plan_are_frozen() -> None:
    assert {name for name in options(plan) if name.startswith("--")} == set(PLAN_OPTIONS.split())


HEADS_OPTIONS = {
    "import": {"--model", "--out", "--sparsity", "--threshold"},
    "export": set(),
    "compare": {"--json"},
    "show": {"--plot"},
}


GRID_OPTIONS = {"--lengths", "--depths", "--needles", "--haystack", "--seed", "--prefill", "--out"}
MODEL_OPTIONS = """
    --chunked-prefill-size --config --device --dtype --kv-dtype --model --threads
    --trust-remote-code
"""
ENGINE_OPTIONS = f"""
    {MODEL_OPTIONS} --block --sink-tokens --window-max --window-min --window-ratio
"""
NEEDLE_OPTIONS = """
    --attempts --block --chunked-prefill-size --cluster-timeout --collective-timeout --compensation
    --config --context-lengths --context-lengths-max --context-lengths-min
    --context-lengths-num-intervals --cpus-per-rank --cuda-graphs --decode --device
    --document-depth-percent-interval-type --document-depth-percent-intervals
    --document-depth-percent-max --document-depth-percent-min --document-depth-percents --dtype
    --default-max-tokens --repetition-detection
    --duo-head-map --engines --generation-config --haystack --head-map --heartbeat-timeout
    --kv-budget --kv-dtype --kv-tokens --max-model-len --max-num-seqs --max-step-ms --methods
    --retrieval-share
    --model --needles --new-folder --out --page-size --placement --prefill --preset --query --ray
    --prefix-cache --prefix-host-gb --prefix-store --prefix-store-gb --prefix-tail-tokens
    --ray-address --repeats --retry-failed --ring --rope-scaling --scheduling-policy --seed
    --share-depths
    --shared-memory --sink-tokens --source-heads --speculative-config --threads
    --trust-remote-code --weight-dtype
    --weight-dtype --weights --window-max --window-min --window-ratio --world-size
"""
SUITE_OPTIONS = {
    *("--out", "--config", "--tasks", "--lengths", "--samples", "--methods", "--haystack"),
    "--kv-budget",
    *("--" + name.replace("_", "-") for name in JobConfig.model_fields if name != "attention"),
}
EVAL_OPTIONS = {
    "needle": set(NEEDLE_OPTIONS.split()),
    "report": {"--out"},
    "grid": {
        *(GRID_OPTIONS - {"--prefill"} | {"--methods", "--preset", "--weight-dtype"}),
        *MODEL_OPTIONS.split(),
    },
    "sources": {
        *GRID_OPTIONS,
        *ENGINE_OPTIONS.split(),
        *("--attention", "--head-map", "--source-heads", "--absent-lengths"),
        *("--tasks", "--samples", "--squad", "--hotpotqa"),
    },
    "citations": {
        *GRID_OPTIONS,
        *ENGINE_OPTIONS.split(),
        *("--attention", "--head-map", "--source-heads", "--absent-lengths"),
        *("--kinds", "--weights", "--world-size"),
    },
    "heads": {*GRID_OPTIONS, *ENGINE_OPTIONS.split(), "--compensation", "--percents"},
    "ruler": {*SUITE_OPTIONS, "--squad", "--hotpotqa"},
    "shared": {*SUITE_OPTIONS, "--ask"},
    "published": {*SUITE_OPTIONS, "--data"},
    "why": {"--out", "--method", "--most"},
    **dict.fromkeys(("nonliteral", "graph", "world", "nth"), SUITE_OPTIONS),
    "fidelity": {
        *("--out", "--config", "--methods", "--tokens", "--prompt-tokens", "--ranges", "--steps"),
        *("--repeat-at", "--repeat-tokens"),
        *("--head-map", "--compensation", "--prefill", *ENGINE_OPTIONS.split()),
        *("--" + name.replace("_", "-") for name in JobConfig.__annotations__ if name != "group"),
    },
    "maps": {
        *(GRID_OPTIONS - {"--prefill"}),
        *(*ENGINE_OPTIONS.split(), "--compensation", "--tokens", "--budgets", "--middle-share"),
    },
    "ablations": {*GRID_OPTIONS, *ENGINE_OPTIONS.split(), "--head-map", "--random-draws"},
}


# The names of `vllm bench serve`, but for long requests, the window and the files.
BENCH_SERVE_OPTIONS = """
    --answers --arrival-window --base-url --burstiness --dataset --endpoint --ignore-eos --json
    --long-input-len --long-output-len --long-prompts --markdown --max-concurrency
    --metric-percentiles --model --num-prompts --percentile-metrics --plot --random-input-len
    --random-output-len --request-rate --seed --temperature
"""


def test_the_options_of_bench_serve_are_frozen() -> None:
    group: Any = typer.main.get_command(bench)
    found = {option for parameter in group.commands["serve"].params for option in parameter.opts}
    assert found == set(BENCH_SERVE_OPTIONS.split())


def test_the_benches_are_frozen() -> None:
    group: Any = typer.main.get_command(bench)
    wanted = "engine batch busy shape probe start serve prefix sources gpu drafts"
    assert group.commands.keys() == set(wanted.split())


SUMMARIZE_OPTIONS = {
    *("--out", "--words", "--language", "--template", "--max-tokens", "--temperature"),
    *("--markdown", "--encoding", "--sources"),
}


@pytest.mark.parametrize(
    ("command", "own"),
    [(summarize, SUMMARIZE_OPTIONS), (batch, {"--out", "--served-model-name", "--unknown-fields"})],
    ids=["summarize", "batch"],
)
def test_the_options_of_jobs_are_frozen(command: Any, own: set[str]) -> None:
    settings = {"--" + name.replace("_", "-") for name in JobConfig.model_fields} | {"--config"}
    found = {name for name in options(command) if name.startswith("--") and name[:5] != "--no-"}
    assert found == own | settings


def test_the_options_of_prefill_are_frozen() -> None:
    settings = {"--" + name.replace("_", "-") for name in EngineConfig.model_fields}
    own = {"--config", "--store", "--plain", "--encoding"}
    found = {name for name in options(prefill) if name.startswith("--") and name[:5] != "--no-"}
    assert found == own | settings - {"--prefix-store"}


STORE_OPTIONS = {"list": set(), "verify": set(), "prune": {"--max-gb", "--older-than"}}


@pytest.mark.parametrize(
    ("group", "wanted"),
    [(heads, HEADS_OPTIONS), (eval_group, EVAL_OPTIONS), (store, STORE_OPTIONS)],
    ids=["heads", "eval", "store"],
)
def test_the_commands_of_groups_are_frozen(group: typer.Typer, wanted: dict[str, set[str]]) -> None:
    commands: Any = typer.main.get_command(group)
    found = {
        name: {option for p in command.params if not is_hidden(p) for option in p.opts}
        for name, command in commands.commands.items()
    }
    assert found == wanted


def test_help_lists_the_commands_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    code = (
        "import sys; from razor_dist.cli import main; main(['--help']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'pydantic', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_serves_help_shows_the_classs_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Least window of a streaming head, in tokens. [default: the model's, else 4000]" in shown
    assert "[razor|full|streaming]" in shown
    assert "[default: --compensation]" in shown


@pytest.mark.parametrize("command", [["serve"], ["eval", "needle"]])
def test_flags_stand_under_headings(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "-h"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {"Options:", "Model:", "Ranks:", "Memory:", "Streaming heads:"} <= set(shown)
    assert max(map(len, shown)) <= 80


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"razor-dist {razor_dist.__version__}\n"


def test_shells_complete_the_flags_of_a_command() -> None:
    words = {"COMP_WORDS": "razor-dist serve --wor", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "razor_dist"],
        env={**os.environ, **words, "_RAZOR_DIST_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["--world-size"]


def test_the_model_may_stand_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/no/such/model"]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith("razor-dist: model '/no/such/model': there is no such folder")
    assert shown.count("\n") == 1  # refused before anything listens
    assert cli.main(["serve", "a", "--model", "b"]) == 2
    assert "the model is given twice: a and b" in capfd.readouterr().err


def test_flags_of_other_engines_are_answered_with_ours(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--tensor-parallel-size", "2"]) == 2
    assert "did you mean --world-size?" in capfd.readouterr().err
    assert set(cli.FOREIGN_FLAGS.values()) <= options(serve)


def test_serve_does_not_import_what_it_does_not_need() -> None:
    code = (
        "import sys; from razor_dist.cli import main; main(['serve', '--help']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_mistake_is_one_line_and_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--world-size", "0"]) == 2
    error = capfd.readouterr().err
    assert error == "razor-dist: world_size must be at least 1, got 0 (from --world-size)\n"


@pytest.mark.parametrize("error", [EngineError("a rank died"), ClusterError("no room")])
def test_a_failure_of_the_command_is_code_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "command_line", mock.Mock(side_effect=error))
    assert cli.main(["summarize"]) == 1
    assert capfd.readouterr().err == f"razor-dist: {error}\n"


def test_a_store_that_is_a_file_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    assert cli.main(["prefill", str(file), "--store", str(file)]) == 2
    wanted = f"razor-dist: --store: cannot make the folder {file}: File exists\n"
    assert capfd.readouterr().err == wanted


def test_a_store_by_the_engines_number_is_refused_where_there_is_no_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "{engine}")
    for command in (["prefill", __file__, "--store"], ["serve", "smollm2", "--prefix-store"]):
        assert cli.main([*command, store]) == 2
        assert f"prefix_store is {store}, but only jobs and Ray Serve" in capfd.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_mistyped_method_is_no_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["identify", "razr", "smollm2", "--out", "x.json"]) == 2
    assert capfd.readouterr().err == "razor-dist: unknown method 'razr'; did you mean 'razor'?\n"


def test_benchmarks_are_listed_and_none_is_run(capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["bench"])
    shown = capfd.readouterr()
    assert "Usage: razor-dist bench" in shown.out + shown.err


@pytest.mark.parametrize("name", ["glm-4-9b-chat-1m", "configs/glm-4-9b-chat-1m.yaml"])
def test_shipped_settings_are_named_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(EngineConfig, yaml_path=name).window_max == 8192
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/glm-4-9b-chat-1m.yaml").write_text("window_max: 9000")
    own = 9000 if name.endswith(".yaml") else 8192
    assert load_config(EngineConfig, yaml_path=name).window_max == own


@pytest.mark.parametrize("name", ["glm-quarter", "configs/shapes/glm-quarter"])
def test_shipped_shapes_are_named_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_folder(name).joinpath("config.json").is_file()
    with pytest.raises(ModelError, match="glm-4-9b-chat-1m, glm-quarter"):
        config_folder("glm-half")


def test_an_unknown_flag_suggests_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--wrld-size", "2"]) == 2
    assert "--world-size" in capfd.readouterr().err
    assert cli.main(["sevre"]) == 2
    assert "serve" in capfd.readouterr().err
