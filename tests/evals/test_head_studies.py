"""razor-dist eval heads and ablations: what they run, what they say, end to end on a tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from razor_dist import cli
from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.methods import FULL
from razor_dist.evals.needle.results import NeedleResults
from razor_dist.evals.needle.studies import Ablations, HeadMapComparison, read_maps
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.jobs.results import read_job
from razor_dist.models.loader import read_config
from razor_dist.models.shape import ModelShape
from tests.tiny_models import make_tiny, save_head_map
from tests.tokenizer import write_letters

SMALL = EngineConfig(window_min=32, block=16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and two head maps of it, with random scores."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")
    write_letters(folder)
    config = read_config(folder)
    shape, draw = ModelShape.from_config(config), random.Random(0)

    def table(heads: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw.random() for _ in range(heads)) for _ in range(shape.layers))

    full = ((True,) * shape.kv_heads,) * shape.layers
    scores = {kind: table(shape.query_heads) for kind in ("induction", "echo")}
    save_head_map(folder, full, folder.parent / "razor.json", scores=scores)
    path, change = folder.parent / "onthefly.json", {"change": table(shape.kv_heads)}
    save_head_map(folder, full, path, method="onthefly", kv_scores=change)
    return folder


def _result(method: str, score: int, length: int = 2500) -> dict[str, Any]:
    cell = {"depth": 50, "needle": 0, "expected": "123456", "answer": "", "score": score}
    about = {"method": method, "length": length, "repeat": 0, "kv_bytes": 2**20}
    return {**about, "cells": [cell], "timing": {"prefill_seconds": 1.0}}


def test_a_comparison_counts_finds_and_overlaps() -> None:
    razor = HeadMap.load(shipped_head_map("smollm2"))
    comparison = HeadMapComparison({"razor": razor, "again": razor}, [25, 10], SMALL, ["exact"])
    names = [method.name for method in comparison.methods]
    assert names[:3] == [FULL, "streaming, exact", "razor 10 %, exact"] and len(names) == 6
    kept = {m.name: sum(map(sum, m.retrieval)) for m in comparison.methods if m.retrieval}
    assert set(kept.values()) == {9, 23}
    results = NeedleResults(
        [
            _result(FULL, 1),
            _result(FULL, 0, 5000),
            _result("razor 10 %, exact", 0),
            _result("razor 10 %, exact", 1, 5000),
        ]
    )
    page = comparison.page(results)
    assert "| full | 90 of 90 | 1/1 | 0/1 | 1/2 | 0 | 0 | 1 |" in page
    assert "| razor, 10 % | 9 of 90 | 0/1 | 1/1 | 1/2 | 1 | 1 | 1 |" in page
    assert "| 25 % | razor, again | 23 | 5.9 | 1.00 |" in page
    report = comparison.report(results)
    assert report["scores"]["razor 10 %, exact"]["lost"] == 1
    assert [len(chosen["kv_heads"]) for chosen in report["chosen"]] == [9, 23, 9, 23]
    json.dumps(report)


def test_maps_are_called_by_method_or_file(tiny: Path) -> None:
    razor, onthefly = (tiny.parent / f"{name}.json" for name in ("razor", "onthefly"))
    assert list(read_maps([razor, onthefly])) == ["razor", "onthefly"]
    shipped = shipped_head_map("smollm2")
    assert list(read_maps([razor, shipped, onthefly])) == ["razor", "smollm2", "onthefly"]
    with pytest.raises(ConfigError, match="same file name"):
        read_maps([shipped, shipped])


def test_the_ablations_of_the_paper() -> None:
    razor = HeadMap.load(shipped_head_map("smollm2-14-1"))
    study = Ablations(razor, SMALL, ["exact", "local"], seeds=2)
    variants = {variant.name: variant for variant in study.variants}
    first, second = (variants[f"random heads, draw {draw}"] for draw in (1, 2))
    whole = variants["14 % induction + 1 % echo"]
    assert first.kept == second.kept == whole.kept == 22
    assert first.retrieval != second.retrieval
    assert whole.retrieval == razor.retrieval
    growing = [variants[f"{percent} % induction + 1 % echo"].kept for percent in (5, 8, 11, 14)]
    assert growing == sorted(growing) and growing[0] < growing[-1]
    without_echo = variants["14 % induction, no echo heads"]
    assert without_echo.kept <= whole.kept and without_echo.retrieval != whole.retrieval
    bare = variants["14 % + 1 %, no compensation"]
    assert bare.retrieval == whole.retrieval and not bare.compensation
    methods = {method.name: method for method in study.methods}
    assert len(methods) == 1 + 2 * (1 + len(variants))
    assert methods["14 % + 1 %, no compensation, local"].settings["compensation"] is False
    assert methods["14 % induction + 1 % echo, exact"].settings["prefill"] == "exact"
    results = NeedleResults(
        [
            _result(FULL, 1),
            _result("random heads, draw 1, exact", 0),
            _result("random heads, draw 2, exact", 1),
        ]
    )
    page = study.page(results).splitlines()
    assert page[2] == "| all (full attention) |  | 90 | 1/1 | 0 | 0 | 1/1 | 0 | 0 |"
    assert "| random heads, mean | Table 1 | 22 | 0.5/1 | 0.5 | 0.0 | - | - | - |" in page
    with pytest.raises(HeadMapError, match="no induction and echo scores"):
        Ablations(HeadMap.uniform("full", ModelShape(2, 4, 2, 8, 99, 64)), SMALL, ["exact"])
    with pytest.raises(ConfigError, match="at least 1"):
        Ablations(razor, SMALL, ["exact"], seeds=0)


GRID = ["--lengths", "400", "--depths", "50", "--needles", "1", "--haystack", "reference"]


@pytest.mark.slow
def test_the_commands_write_results_tables_and_a_picture(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    maps = [str(tiny.parent / f"{name}.json") for name in ("razor", "onthefly")]
    shared = ["--model", str(tiny), "--window-min", "32", "--block", "16", "--threads", "1"]
    command = ["eval", "heads", *maps, "--out", str(tmp_path), "--percents", "25,50"]
    assert cli.main([*command, *shared, *GRID]) == 0
    out = capfd.readouterr().out
    assert "| onthefly, 25 % | 2 of 8 | " in out
    assert (tmp_path / "heads.md").read_text().strip() in out
    scores = json.loads((tmp_path / "heads.json").read_text())["scores"]
    assert len(scores) == 11 and all(score["cells"] == 1 for score in scores.values())
    with Image.open(tmp_path / "heads.png") as image:
        assert image.width > image.height > 400
    assert len(read_job(tmp_path).records) == 1 + 2 * (1 + 4)
    stored = (tmp_path / "results.jsonl").read_bytes()
    assert cli.main([*command, *shared, *GRID]) == 0
    assert (tmp_path / "results.jsonl").read_bytes() == stored

    # In the same folder, whose full attention and streaming need not be asked again.
    command = ["eval", "ablations", "--head-map", maps[0], "--out", str(tmp_path)]
    command += ["--prefill", "exact", "--random-draws", "1"]
    assert cli.main([*command, *shared, *GRID]) == 0
    assert capfd.readouterr().out.count("Table 4") == 4
    assert len(read_job(tmp_path).records) == 1 + 2 * (1 + 4) + 7
    assert cli.main([*command, *shared, *GRID, "--seed", "1"]) == 2
    assert "task.seed is 0 there and 1 here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--percents", "0,10"], "a budget must be a percentage above 0"),
        (["--percents", "a"], "percents must be a list of numbers, got 'a'"),
        (["--percents", "10,10"], "percents must be a list without repeats"),
        (["--depths", "101"], "depths must be a percentage from 0"),
        (["--needles", "0"], "needles must be at least 1"),
        (["--model", "smollm2"], "but the model has"),
    ],
)
def test_mistakes_are_named(
    option: list[str], message: str, tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "heads", str(tiny.parent / "razor.json"), "--out", str(tmp_path)]
    assert cli.main([*command, "--model", str(tiny), *option]) == 2
    assert message in capfd.readouterr().err
