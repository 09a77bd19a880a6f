"""Suites as jobs: runs on a tiny model, resumed, with and without the prefix cache; the report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from razor_dist import cli
from razor_dist.config.errors import ConfigError
from razor_dist.evals.needle.model import HEAD_MAP, build_needle_model
from razor_dist.evals.report import interval, sign_test
from razor_dist.evals.suites.config import (
    GraphConfig,
    NonliteralConfig,
    NthConfig,
    SharedConfig,
    SuiteConfig,
    WorldConfig,
)
from razor_dist.evals.suites.job import SuiteTask
from razor_dist.evals.suites.report import Scores, report
from razor_dist.evals.suites.sample import Question, Sample
from razor_dist.evals.texts import Corpus, Prompter
from razor_dist.heads.head_map import shipped_head_map
from razor_dist.jobs.results import read_job
from razor_dist.jobs.task import job_settings
from razor_dist.models.tokenizer import load_tokenizer
from tests.tokenizer import smollm2_tokenizer

OWN = (SharedConfig, NonliteralConfig, GraphConfig, WorldConfig, NthConfig)


def results_of(folder: Path) -> list[dict[str, Any]]:
    return [record["result"] for record in read_job(folder).records]


def untimed(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: v for key, v in result.items() if key != "timing"} for result in results]


@pytest.mark.parametrize("config", OWN)
def test_settings(config: type[SuiteConfig]) -> None:
    own = config()
    every = [task for task in config.own_suite.tasks if task != "words"]  # the needle model's
    assert own.samples == 50 and own.task_names == tuple(every)
    last = list(config.own_suite.tasks)[-1]
    assert config(tasks=last).task_names == (last,)
    with pytest.raises(ConfigError, match=r"tasks: unknown task 'vt'; tasks are .*, or alone all"):
        config(tasks="vt")
    with pytest.raises(ConfigError, match=r"tasks: unknown task 'all'"):
        config(tasks=f"all,{last}")


@pytest.mark.long
def test_a_shared_context_is_read_once(evaluate: Callable[..., int], tmp_path: Path) -> None:
    """In turns and as requests, with the prefix cache the answers are those without it."""
    found = {}
    for ask, methods in (("turns", "full,streaming"), ("requests", "streaming")):
        for cache in ("--prefix-cache", "--no-prefix-cache"):
            out = tmp_path / f"{ask}{cache}"
            flags = f"--tasks counts --lengths 1800 --samples 2 --methods {methods}"
            assert evaluate("shared", f"{flags} --ask {ask} {cache}", out) == 0
            found[ask, cache] = results_of(out)
        with_cache, without = (found[ask, c] for c in ("--prefix-cache", "--no-prefix-cache"))
        assert untimed(with_cache) == untimed(without)
        assert all(result["timing"]["cached_tokens"] == 0 for result in without)
        for result in with_cache:
            tokens = [answer["prompt_tokens"] for answer in result["answers"]]
            assert len(tokens) == 5 and max(tokens) + 8 <= 1800
            # The longest is read; all that the others share with it, but for what their own is.
            own = 150 + 16 if ask == "requests" else 100
            assert result["timing"]["cached_tokens"] >= sum(sorted(tokens)[:-1]) - 4 * own
        page = (tmp_path / f"{ask}--prefix-cache" / "report.md").read_text()
        assert re.search(r"[\d,]+ of [\d,]+ prompt tokens came from the prefix cache", page)
    turns, requests = (found[ask, "--prefix-cache"] for ask in ("turns", "requests"))
    first, second = ([a["prompt_tokens"] for a in r[0]["answers"]] for r in (turns, requests))
    assert first == sorted(first) and first[4] > first[0] + 300
    assert max(second) - min(second) < 30


@pytest.mark.long
def test_tasks_read_a_document_once(evaluate: Callable[..., int], tmp_path: Path) -> None:
    """The second task finds nearly all of its prompts, the first all but one's; answers stay."""
    found = []
    for cache in ("--prefix-cache", "--no-prefix-cache"):
        out = tmp_path / cache
        flags = f"--tasks near,far --lengths 1200 --samples 2 --methods streaming {cache}"
        assert evaluate("nonliteral", flags, out) == 0
        found.append(results_of(out))
    assert untimed(found[0]) == untimed(found[1])
    assert [result["task"] for result in found[0]] == ["near", "far"] * 2
    for result in found[0]:
        tokens = sorted(answer["prompt_tokens"] for answer in result["answers"])
        known = tokens[:-1] if result["task"] == "near" else tokens
        assert result["timing"]["cached_tokens"] > 0.85 * sum(known)


@pytest.mark.long
@pytest.mark.parametrize("config", [NonliteralConfig, GraphConfig])
def test_a_run_goes_on_where_it_ended(
    config: type[SuiteConfig],
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, suite = tmp_path / "out", config.own_suite
    flags = f"--tasks {next(iter(suite.tasks))} --lengths 2000 --samples 2 --methods full,streaming"
    assert evaluate(suite.name, flags) == 0
    whole, page = (out / "results.jsonl").read_bytes(), (out / "report.md").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert [cell["samples"] for cell in summary["cells"]] == [2, 2]
    assert f"# {suite.title}" in page and "sample by sample" in page
    assert "questions on one document" in page and "came from the prefix cache" in page
    # Interrupted after the first two items.
    lines = whole.splitlines(keepends=True)
    (out / "results.jsonl").write_bytes(b"".join(lines[:2]))
    capsys.readouterr()
    assert cli.main(["eval", "report", str(out)]) == 0
    assert "2 of 4 samples have not been asked yet" in capsys.readouterr().out
    assert evaluate(suite.name, flags) == 0
    again = results_of(out)
    assert untimed(again) == untimed([json.loads(line)["result"] for line in lines])
    assert (out / "results.jsonl").read_bytes().startswith(b"".join(lines[:2]))
    assert (out / "scores.svg").read_text().startswith("<?xml")
    assert evaluate(suite.name, f"{flags} --seed 1") == 2, "other settings need another folder"


@pytest.mark.long
def test_a_folder_is_extended(evaluate: Callable[..., int], tmp_path: Path) -> None:
    first = "--tasks children --lengths 1200 --samples 1 --methods streaming"
    assert evaluate("graph", first) == 0
    more = "--tasks children,parents --lengths 1200,1500 --samples 2 --methods full,streaming"
    before = results_of(tmp_path / "out")
    assert evaluate("graph", more) == 0
    results = results_of(tmp_path / "out")
    assert len(results) == 16 and before[0] in results, "nothing is asked again"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [cell["samples"] for cell in summary["cells"]] == [2] * 8
    fresh = tmp_path / "fresh"
    assert evaluate("graph", more, fresh) == 0
    assert untimed(results_of(fresh)) == untimed(results)


@pytest.mark.parametrize(
    ("changed", "grows"),
    [
        ({}, True),
        ({"samples": 3, "lengths": (1200, 9000), "tasks": "all", "window_max": None}, True),
        ({"methods": ("full", "streaming", "razor")}, True),
        ({"samples": 1}, False),
        ({"lengths": (1500,)}, False),
        ({"tasks": "parents"}, False),
        ({"methods": ("full",)}, False),
        ({"methods": {"full": {"attention": "full", "kv_dtype": "int8"}, "streaming": {}}}, False),
        ({"seed": 1}, False),
        ({"window_min": 5000}, False),
    ],
)
def test_a_folder_grows_by_more_of_its_kind(
    changed: dict[str, Any], grows: bool, letters: Path
) -> None:
    def settings(**given: Any) -> dict[str, Any]:
        config = GraphConfig(model=str(letters), head_map=shipped_map, **given)
        return job_settings(SuiteTask(config, Corpus("essays", ""), {}))

    shipped_map = str(shipped_head_map("smollm2"))
    own = {"samples": 2, "lengths": (1200,), "tasks": "children", "methods": ("full", "streaming")}
    task = SuiteTask(GraphConfig(model=str(letters)), Corpus("essays", ""), {})
    assert task.extends(settings(**own), settings(**own | changed)) is grows
    assert not task.extends({"task": {"kind": "needle"}, "engines": {}}, settings(**own))


@pytest.mark.parametrize("ask", ["turns", "requests"])
def test_prompts(ask: str, letters: Path) -> None:
    questions = (Question("Who?", "It is", ("Ann", "Bo")), Question("Where?", "In the", ("attic",)))
    sample = Sample("A story.", questions)
    for tokenizer in (smollm2_tokenizer(), load_tokenizer(letters)):
        prompter = Prompter(tokenizer)
        task = SuiteTask(SharedConfig(ask=ask), Corpus("essays", ""), {})
        first, second = task.prompts(prompter, sample)
        shown = prompter.decode(second).replace(" ", "")
        assert shown.count("Astory.") == 1 and shown.endswith("Inthe")
        assert ("Who?" in shown) is ("ItisAnn,Bo" in shown) is (ask == "turns")
        if ask == "turns":
            assert second[: len(first)] == first, "all of the first prompt can be cached"


def test_a_models_configuration_is_not_replaced(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert evaluate("nonliteral", "--methods streaming --samples 1", tmp_path) == 2
    assert "holds a config.json that is no evaluation's" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}" and not (tmp_path / "job.json").exists()


@pytest.mark.long
def test_the_needle_model_remembers_all(tmp_path: Path) -> None:
    model, out = build_needle_model(tmp_path / "needle"), tmp_path / "out"
    command = f"eval shared --model {model} --head-map {model / HEAD_MAP} --no-ray --out {out}"
    command += " --tasks words --lengths 2000,4000 --samples 2 --methods full,razor,streaming"
    assert cli.main([*command.split(), "--window-min", "128", "--block", "16"]) == 0
    scores: dict[str, list[float]] = {method: [] for method in ("full", "razor", "streaming")}
    for result in results_of(out):
        scores[result["method"]].append(result["score"])
    assert scores["full"] == scores["razor"] == [1.0] * 4
    assert max(scores["streaming"]) < 1


def test_the_needle_models_task_is_its_own(letters: Path) -> None:
    config = SharedConfig(tasks="words", model=str(letters), lengths=1000)
    with pytest.raises(ConfigError, match="task words is for the needle model"):
        SuiteTask.plan(config)


def test_prose_is_wanted(letters: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Too short.")
    config = WorldConfig(model=str(letters), lengths=1000, haystack=str(tmp_path))
    with pytest.raises(ConfigError, match=r"the haystack .* has no prose: give texts with"):
        SuiteTask.plan(config)


def test_equal_scores_have_an_interval_as_well() -> None:
    """Resampling equal scores would give a point; Clopper and Pearson's bound is taken instead."""
    assert interval([1.0] * 10) == pytest.approx((0.6915, 1), abs=1e-4)
    assert interval([0.0] * 20, 0, 100) == pytest.approx((0, 16.84), abs=0.01)
    assert interval([0.0] * 10, -100, 100) == pytest.approx((-30.85, 30.85), abs=0.01)


def test_a_better_sample_narrows_no_interval_from_above() -> None:
    cells = [[0.0] * 10, [0.0] * 9 + [0.2], [0.0] * 9 + [1.0], [0.0] * 8 + [1.0] * 2, [0.5] * 10]
    found = [interval(cell) for cell in cells]
    for end in (0, 1):
        assert [pair[end] for pair in found] == sorted(pair[end] for pair in found)
    assert interval([0.0, 1.0] * 20) == (0.35, 0.65), "where samples differ, resampling decides"


def test_lost_and_gained_are_of_the_same_samples() -> None:
    about = {"model": "tiny", "tasks": ["a", "b"], "lengths": [100], "samples": 4, "seed": 0}
    about |= {"methods": ["full", "razor"], "haystack": "essays", "haystack_fingerprint": "0"}
    scores = {"full": [1.0, 0.5, 0.0, 1.0], "razor": [0.0, 0.5, 1.0]}
    results = [
        {"method": method, "task": "a", "length": 100, "number": number, "score": score}
        for method, values in scores.items()
        for number, score in enumerate(values)
    ]
    assert Scores(about, results).changes("razor", ["a"], 100) == [-100, 0, 100]
    page = report("Test", about, results[::-1], {}, {})
    assert "| razor | a | 1 | 1 | 1 | +0.0 (-100.0 to +100.0) |" in page
    assert "| a | 62.5 (25-100) | 62.5 |" in page and "| b | - | - |" in page
    found = Scores(about, results).as_json()
    [full, razor], [every] = found["cells"], found["all"]
    assert (every["lost"], every["gained"], every["change"], every["p"]) == (1, 1, 0, 1)
    assert (razor["lost"], razor["gained"], razor["samples"], razor["compared"]) == (1, 1, 3, 3)
    assert "lost" not in full and full["samples"] == 4
    alone = about | {"methods": ["razor"]}
    assert Scores(alone, results[4:]).as_json()["cells"][0]["compared"] == 0
    # All tasks' samples together say what no cell alone can.
    more = [one | {"task": "b"} for one in results if one["number"] < 2]
    page = report("Test", about, [*results, *more], {}, {})
    assert "| razor | b | 1 | 0 | 1 | -50.0 " in page
    assert "| razor | **all** | 2 | 1 | 1 | -20.0 " in page
    # Where tasks ask about the same documents, each counts once.
    shared = about | {"one_document": True}
    assert Scores(shared, [*results, *more]).changes("razor", ["a", "b"], 100) == [-100, 0, 100]
    assert "| razor | **all** | 1 | 1 | 1 | +0.0 " in report(
        "Test", shared, [*results, *more], {}, {}
    )
    assert razor["score"] == 50 and full["interval"] == pytest.approx((24.85, 100), abs=0.01)


def test_an_exact_tie_is_neither_lost_nor_gained() -> None:
    """Two thirds of a score up and two thirds down are no tie in floating point."""
    about = {"samples": 1, "methods": ["full", "razor"], "tasks": ["a", "b"], "lengths": [100]}
    scores = {"full": {"a": 0.0, "b": 1.0}, "razor": {"a": 2 / 3, "b": 1 / 3}}
    results = [
        {"method": method, "task": task, "length": 100, "number": 0, "score": score}
        for method, own in scores.items()
        for task, score in own.items()
    ]
    assert 100 * (2 / 3) + (100 * (1 / 3) - 100) != 0
    found = Scores(about | {"one_document": True}, results).beside_full("razor", ["a", "b"], 100)
    assert (found["compared"], found["lost"], found["gained"], found["p"]) == (1, 0, 0, 1)


def test_losses_where_few_samples_score_are_seen() -> None:
    assert sign_test(11, 1) == sign_test(1, 11) == pytest.approx(26 / 4096)
    assert sign_test(6, 0) == pytest.approx(1 / 32)
    assert sign_test(0, 0) == sign_test(3, 3) == 1


def test_an_earlier_answer_closes_its_quotation() -> None:
    assert Question("?", 'The value is "', ("ab",)).answered == 'The value is "ab"'
    assert Question("?", "The nodes are", ("a", "b")).answered == "The nodes are a, b"


def test_a_picture_names_a_method_that_lacks_the_first_cell(tmp_path: Path) -> None:
    about = {"samples": 1, "tasks": ["a", "b"], "lengths": [100, 200], "methods": ["full", "razor"]}
    cells = [("full", "a", 100), ("full", "b", 200), ("razor", "b", 200)]
    results = [{"method": m, "task": t, "length": n, "score": 1.0} for m, t, n in cells]
    Scores(about, results).draw(tmp_path / "scores.svg")
    drawn = (tmp_path / "scores.svg").read_text()
    assert drawn.count(">full<") == drawn.count(">razor<") == 1
