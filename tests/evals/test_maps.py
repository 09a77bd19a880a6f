"""``eval maps`` on a tiny model: one command from maps to a table, gone on with where it ended."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from razor_dist import cli
from razor_dist.commands import maps_run
from razor_dist.commands.identify_options import CommonOptions
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals import maps
from razor_dist.evals.needle.config import MapsConfig
from razor_dist.heads.head_map import FOLDER_HEAD_MAP, HeadMap, shipped_head_map
from razor_dist.jobs.results import read_job
from razor_dist.models.registry import display_name

SHAPE = (4, 2)
WINDOW = ["--window-min", "40", "--window-ratio", "none", "--block", "8"]


def _options(letters: Path, out: Path) -> list[str]:
    documents = ["--lengths", "300", "--depths", "50", "--needles", "1", "--haystack", "reference"]
    sizes = ["--tokens", "400", "--budgets", "40,60", "--threads", "1"]
    return ["--model", str(letters), "--out", str(out), *documents, *sizes, *WINDOW]


@pytest.mark.long
def test_maps_at_equal_bytes(
    letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tuple(tuple((2 * i + j) / 8 for j in range(2)) for i in range(4))
    own = HeadMap.of_model(
        display_name(str(letters)),
        AutoConfig.from_pretrained(letters),
        method="mine",
        settings={},
        retrieval=((True, True),) * 4,
        kv_scores={"score": table},
    )
    own.save(tmp_path / "mine.json")
    # By its file a map of a method that is found here; not by a name that rows have.
    replace(own, method="razor").save(tmp_path / "default.json")
    clash = ["eval", "maps", str(tmp_path / "default.json"), *_options(letters, tmp_path / "run")]
    assert cli.main(clash) == 2
    assert "another head map is named default here" in capsys.readouterr().err
    model = tmp_path / "model"
    shutil.copytree(letters, model)
    last = replace(own, method="given", retrieval=((False, False),) * 3 + ((True, False),))
    last.save(model / FOLDER_HEAD_MAP)
    out = tmp_path / "run"
    command = ["eval", "maps", str(tmp_path / "mine.json"), "fidelity", *_options(model, out)]
    assert cli.main(command) == 0
    page = capsys.readouterr().out
    found = json.loads((out / "maps.json").read_text())
    *rows, default = found["rows"]
    keys = [(row["map"], row["percent"], row["classes"]) for row in rows]
    assert (default["map"], default["percent"], default["classes"]) == ("default", 0, 2)
    names = ("mine", "fidelity")
    assert keys == [
        key
        for percent in (40, 60)
        for key in (
            *((name, percent, classes) for classes in (2, 3) for name in names),
            ("streaming", percent, 2),
        )
    ]
    # As it is served: its head keeps all, the others have what the settings give without flags.
    shipped = EngineConfig(model=str(model)).window_min
    assert [one for row in default["windows"] for one in row] == [shipped] * 6 + [None, shipped]
    assert page.count("| default |") == 2 and default["part"] == 1  # its windows hold the text
    for row in rows:
        texts = [row[name] for name in ("prose", "code", "copies")]
        assert row["mean"] == pytest.approx(sum(texts) / 3) and row["worst"] == max(texts) > 0
        # At most one head of 400 tokens is left of 3,200.
        assert row["percent"] / 100 - 0.125 < row["part"] <= row["percent"] / 100
        assert row["needles"] in ("0/1", "1/1") and row["footprint"] > row["part"] - 0.125
        windows = [window for line in row["windows"] for window in line]
        assert len(windows) == 8 and (None in windows) is (row["map"] != "streaming")
        classes = {*windows} - {None}
        assert 1 <= len(classes) <= (2 if row["classes"] == 3 else 1)
    # By the first budget's bytes, 1,280 tokens: (1280 - 8 * 52) / (400 - 52) = 2.5 heads.
    assert [[w is None for w in line] for line in rows[0]["windows"]] == [[False] * 2] * 3 + [
        [True] * 2
    ]
    assert "| streaming | 2 | all of" in page and found["seconds"].keys() == {"fidelity"}
    for percent in (40, 60):
        own_rows = sorted((r for r in rows if r["percent"] == percent), key=lambda r: r["mean"])
        best, last_row = own_rows[0], own_rows[-1]
        assert f"{last_row['mean'] - best['mean']:+.4f} (" in page
        assert len(best["groups"]) == 3 * (119 // 32)
    # The measured bytes of the text are the plan's, but for blocks that are not full.
    for record in read_job(out / "fidelity").records:
        result = record["result"]
        if result["method"] == "default":
            continue
        [row] = [r for r, key in zip(rows, keys, strict=True) if _named(result["method"], key)]
        assert result["kv_bytes"] / result["kv_bytes_full"] <= row["part"] + 1e-9
    # All is there already.
    assert cli.main(command) == 0
    assert json.loads((out / "maps.json").read_text()) == found
    capsys.readouterr()
    # Not the masses of other windows.
    assert cli.main([*command, "--window-min", "48"]) == 2
    said = capsys.readouterr().err
    assert "masses.json was made with other settings (window_min is 40 there and 48 here)" in said


def test_a_found_map_is_taken_for_its_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def identify(name: str, options: CommonOptions, *_: Any) -> None:
        runs.append(name)
        HeadMap.load(shipped_head_map("smollm2")).save(options.out)

    monkeypatch.setattr(maps_run, "identify", identify)
    options = CommonOptions(model="smollm2", out=tmp_path / "razor.json")
    clock = tmp_path / "razor.seconds"
    clock.touch()  # as a kill can leave it
    found, seconds = maps_run._found("razor", options, {"seed": 0})
    assert maps_run._found("razor", options, {"seed": 0}) == (found, seconds) and runs == ["razor"]
    for older, there in ((False, "0"), (True, "not set")):
        if older:
            clock.write_text("12.5")
        with pytest.raises(ConfigError, match=f"seed is {there} there and 1 here"):
            maps_run._found("razor", options, {"seed": 1})


def test_no_middle_window_holds_the_passage_that_is_repeated(letters: Path) -> None:
    config = MapsConfig(
        model=str(letters), tokens=400, window_min=40, window_ratio=None, block=8, threads=1
    )
    [copies] = [text for text in maps.texts_of(config) if text.name == "copies"]
    ids, copy, away = copies.scored.ids, range(copies.scored.prompt, 400), 270
    assert ids[copy.start : copy.stop] == ids[copy.start - away : copy.stop - away]
    # With 320 tokens, which the bytes hold as well, copies would test no distance.
    assert maps.budget_of(config, maps.shape_of(config), 60, 0.5).middles == (80, 160)


def _named(method: str, key: tuple[str, float, int]) -> bool:
    return method == f"{key[0]} {key[1]:g} % {key[2]}"


@pytest.mark.long
def test_the_upper_bound_orders_heads_by_their_gain(letters: Path, tmp_path: Path) -> None:
    config = MapsConfig(
        model=str(letters), tokens=400, window_min=40, window_ratio=None, block=8, threads=1
    )
    found, seconds = maps.upper_bound(config, tmp_path / "kl")
    none, *alone = (record["result"]["all"]["kl"] for record in read_job(tmp_path / "kl").records)
    scores = [score for row in found.kv_scores["kl"] for score in row]
    assert scores == pytest.approx([none - kl for kl in alone], rel=1e-4) and seconds > 0
    assert found.retrieval == tuple(
        tuple(score > 0 for score in row) for row in found.kv_scores["kl"]
    )


def test_an_unknown_criterion_is_refused(
    letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "maps", "duo", *_options(letters, tmp_path)]) == 2
    assert "unknown criterion 'duo'; give razor, onthefly, kvzip, reach, fidelity, or paths" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lengths", "401"], "documents of 401 tokens, but budgets are of 400"),
        (["--lengths", "200"], "windows of up to 228 hold shorter ones whole"),
    ],
)
def test_what_would_test_nothing_is_refused_before_the_work(
    letters: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    options = [*_options(letters, tmp_path), *options, "--window-ratio", "5"]
    assert cli.main(["eval", "maps", "fidelity", *options]) == 2
    error = capsys.readouterr().err
    assert "short windows have 80 tokens by window_ratio 5, not the 40 of window_min" in error
    assert said in error and not (tmp_path / "alone").exists()


def test_a_map_of_another_model_is_refused_before_the_work(
    letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(shipped_head_map("smollm2"))
    assert cli.main(["eval", "maps", "fidelity", path, *_options(letters, tmp_path)]) == 2
    assert "smollm2" in capsys.readouterr().err and not (tmp_path / "alone").exists()


def test_a_folder_that_cannot_be_made_is_refused(
    letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["eval", "maps", *_options(letters, tmp_path / "file")]) == 2
    said = f"cannot make the folder {tmp_path}/file/maps: Not a directory"
    assert said in capsys.readouterr().err
