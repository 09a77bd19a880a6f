"""RULER: its settings, its report, and a run of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from razor_dist import cli
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.suites.config import RulerConfig
from razor_dist.evals.suites.qa import read_squad
from razor_dist.evals.suites.report import report
from razor_dist.evals.suites.ruler import RULER
from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
from razor_dist.jobs.results import read_job
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.protocol.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": "vt,niah"}, "unknown task 'niah'; tasks are niah_single_1"),
        ({"tasks": 5}, "tasks must be a list of names, got 5"),
        ({"tasks": "vt,vt"}, "tasks must be a list without repeats"),
        ({"lengths": "4x"}, "lengths must be a list of integers such as 8192 or 8K, got '4x'"),
        ({"lengths": [0]}, "lengths must be at least 1 each"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"methods": "full,snap"}, "unknown method 'snap'; give full, razor, streaming"),
        ({"methods": {"a": {"windw": 3}}}, "methods: a: windw is not an engine setting"),
        ({"methods": {"a": {"model": "b"}}}, "methods: a: model is the same for all methods"),
        ({"methods": {"a": {"block": 0}}}, "methods: a: block must be"),
        ({"methods": {}}, "methods must be a list without repeats, got []"),
        ({"attention": "full"}, "attention is what methods differ in"),
        ({"tasks": "all"}, "task qa_1 needs squad, the path of its data"),
        ({"squad": "dev.json"}, "squad is for task qa_1, which is not among the tasks"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RulerConfig(**settings)


def test_settings_from_text_and_lists_are_the_same() -> None:
    text = RulerConfig(tasks="fwe,vt", lengths="512,256", methods="razor,full")
    lists = RulerConfig(
        tasks=("fwe", "vt"),
        lengths=(512, 256),
        methods={"razor": {"attention": "razor"}, "full": {"attention": "full"}},
    )
    for config in (text, lists):
        assert config.task_names == ("vt", "fwe") and sorted(config.lengths) == [256, 512]
        assert config.engine("full").attention == "full"
        assert config.engine("razor").max_model_len == 512
    assert text.method_settings == lists.method_settings
    assert len(RulerConfig().task_names) == 11


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("[", "is not SQuAD's JSON"), ('{"data": []}', "holds no question")],
)
def test_wrong_data(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "squad.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_squad(file)


def test_a_table_has_means_over_tasks_and_none_that_lacks_a_cell() -> None:
    about = {
        "model": "tiny",
        "tasks": ["vt", "cwe"],
        "lengths": [100, 200],
        "samples": 2,
        "methods": ["full"],
        "seed": 0,
        "haystack": "essays",
        "haystack_fingerprint": "0123",
    }
    scores = {("vt", 100): [1.0, 0.5], ("cwe", 100): [0.25, 0.0], ("vt", 200): [1.0, 1.0]}
    results = [
        {"method": "full", "task": task, "length": length, "score": value}
        for (task, length), values in scores.items()
        for value in values
    ]
    why = "ConfigError: cwe cannot be made"
    lost = {f"full/cwe/200/{n}": why for n in range(2)}
    page = report("RULER", about, results, lost, {"full": {"attention": "full"}})
    assert "| vt | 75.0 (12-100) | 100.0 (16-100) | 87.5 |" in page
    assert "| cwe | 12.5 (0-86) | - | - |" in page
    assert "| **average** | 43.8 | - | - |" in page
    assert "2 of 8 samples failed" in page and "not been asked" not in page
    assert "kvpress" not in page
    page_of_press = report(
        "RULER", about, results, {}, {"full": {"press": "tova", "kv_budget": 0.25}}
    )
    assert "| full | TOVAPress | 0.25 of full attention | yes |" in page_of_press
    assert "The question is part of what is read here" in page_of_press
    assert "## Failed\n\n- `full/cwe/200/0`, `full/cwe/200/1`: ConfigError: cwe cannot" in page
    page = report("RULER", about, results[1:], {"full/cwe/200/0": why}, {})
    assert "2 of 8 samples have not been asked yet" in page
    # The mean of one of two samples is not beside others' means.
    assert "| vt | 50.0 (1-99, 1 of 2) | 100.0 (16-100) | - |" in page
    assert "| **average** | - | - | - |" in page


@pytest.mark.long
def test_a_run_on_a_tiny_model(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = "--tasks niah_single_1,fwe --lengths 1200 --samples 1 --methods full,streaming"
    assert evaluate("ruler", flags) == 0
    shown = capsys.readouterr().out
    assert "## full" in shown and "## streaming" in shown and "| niah_single_1 |" in shown
    settings, records = read_job(out)
    assert settings["task"]["kind"] == "ruler"
    assert [record["id"] for record in records] == [
        f"{method}/{task}/1200/0"
        for method in ("full", "streaming")
        for task in ("niah_single_1", "fwe")
    ]
    results = [record["result"] for record in records]
    # Every letter is a token, so a line of noise is about 90 of them, and a coded word 7.
    for result in results:
        task, [given] = RULER.tasks[result["task"]], result["answers"]
        assert 1200 - 100 <= given["prompt_tokens"] + task.answer_tokens <= 1200
        assert result["score"] == task.score(given["answer"], given["wanted"])
        assert given["answer"]
    [[full], _, [streaming], _] = (result["answers"] for result in results)
    assert full["wanted"] == streaming["wanted"], "methods answer the same questions"
    assert full["answer"] != streaming["answer"]
    assert (out / "report.md").read_text().strip() in shown
    before = (out / "results.jsonl").read_bytes()
    assert evaluate("ruler", flags) == 0
    assert (out / "results.jsonl").read_bytes() == before, "nothing is asked again"
    page = (out / "report.md").read_text()
    (out / "report.md").unlink()
    assert cli.main(["eval", "report", str(out)]) == 0
    assert (out / "report.md").read_text() == page
    runs = json.loads((out / "environment.json").read_text())["runs"]
    assert len(runs) == 2 and json.loads((out / "config.json").read_text())["samples"] == 1


class Mute:
    """In an engine's place, for what is told of samples that never reach one."""

    failed, info = False, None

    def __init__(self, config: EngineConfig, *_: Any) -> None:
        self._tokenizer = load_tokenizer(Path(config.model))

    def close(self) -> None:
        pass

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._tokenizer

    def generate(self, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        return [RequestOutput("r", None, prompt, outputs=[CompletionOutput()])]


def test_samples_that_fail_are_told(
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", Mute)
    flags = "--tasks niah_single_1,cwe --lengths 1000 --samples 2 --methods streaming"
    assert evaluate("ruler", flags) == 1
    shown = capsys.readouterr().out
    assert "2 of 4 samples failed" in shown
    for number in range(2):
        assert f"- `streaming/cwe/1000/{number}`: ConfigError: cwe cannot be made" in shown
    assert "| cwe | - | - |" in shown


def test_a_length_beyond_the_model(
    evaluate: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("ruler", "--lengths 5000") == 2
    assert "lengths: 5000 is beyond" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
