"""The command line's public surface."""

from __future__ import annotations

import errno
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
from razor_dist.commands.serve import serve
from razor_dist.config.errors import ClusterError, EngineError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import load_config
from razor_dist.models.registry import config_folder
from razor_dist.prefix.store import write_title


def options(command: Any) -> set[str]:
    """All flags of a command, without old names, which ``--help`` hides."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    parameters = typer.main.get_command(app).params
    shown = [p for p in parameters if p.param_type_name == "option" and not p.hidden]
    return {name for p in shown for name in [*p.opts, *p.secondary_opts]}


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
    assert "OOMPolicy=continue" in text.splitlines()


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


def test_a_home_folder_is_known_behind_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["identify", "duo", "smollm2", "--out=~/none/map.json"]) == 2
    assert f"there is no folder {tmp_path}/none\n" in capfd.readouterr().err


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


@pytest.mark.parametrize("closed", ["store", "store/0af1"])
def test_a_store_of_another_user_is_said_to_be_closed(
    closed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "0af1").mkdir(parents=True)
    command, listed = ["store", "list", str(tmp_path / "store")], os.listdir
    assert cli.main(command) == 2
    assert capfd.readouterr().err.endswith("store holds no stored prefixes\n")

    def deny(path: str) -> list[str]:
        if Path(path) == tmp_path / closed:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", deny)  # root may read everything
    assert cli.main(command) == 2
    assert (
        capfd.readouterr().err
        == f"razor-dist: cannot read {tmp_path / closed}: Permission denied\n"
    )


def test_a_store_shows_documents_names_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0af1" / "damaged").mkdir(parents=True)
    (tmp_path / "0af1" / "about.json").write_text("{}")
    write_title(tmp_path / "0af1" / "damaged", "[draft] a[/b] :smile:.txt")
    assert cli.main(["store", "list", str(tmp_path)]) == 0
    assert "[draft] a[/b] :smile:.txt" in capfd.readouterr().out


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
