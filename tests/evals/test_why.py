"""Why answers were lost: attention mass beside transformers' own, variants, reasons, a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from razor_dist import cli
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.fidelity.model import Scored
from razor_dist.evals.methods import Method
from razor_dist.evals.suites.config import NonliteralConfig
from razor_dist.evals.suites.job import SuiteTask
from razor_dist.evals.suites.why import (
    WhyModel,
    WhyTask,
    attention_figures,
    config_of,
    other_heads,
    variants,
    verdict,
)
from razor_dist.evals.suites.why_report import _mean
from razor_dist.evals.watch import Mass
from tests.logits import stock_run

WINDOW = {"window_min": 16, "window_ratio": 4, "window_max": None, "sink_tokens": 2, "block": 8}
OWN = {"attention": "streaming", "prefill": "local", "compensation": True, **WINDOW}
STREAMING = Method("s", OWN)


def test_mass_is_of_transformers_attention(letters: Path) -> None:
    model = WhyModel(EngineConfig(model=str(letters), attention="full", chunked_prefill_size=32))
    ids = torch.randint(5, 60, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    places, begin = [range(10, 14), range(40, 41)], 70
    mass = model.watched(Scored(tuple(ids), 85), STREAMING, begin, places)
    assert model.replay.watch is None
    weights = stock_run(letters, ids, output_attentions=True).attentions
    whole = torch.stack(weights, 2)[0].permute(2, 1, 0, 3)  # [positions, layers, heads, keys]
    for row, position in enumerate(range(begin, 89)):
        own = whole[position]
        on_places = own[..., 10:14].sum(-1) + own[..., 40]
        # L(i) = max(16, ceil((i + 1) / 4)), s(i) = 8 floor((i + 1 - L(i)) / 8); two sinks.
        start = 8 * ((position + 1 - max(16, -(-(position + 1) // 4))) // 8)
        torch.testing.assert_close(mass.places[row], on_places, atol=1e-5, rtol=1e-4)
        dropped = own[..., 2:start].sum(-1)
        torch.testing.assert_close(mass.dropped[row], dropped, atol=1e-5, rtol=1e-4)
    assert len(mass.places) == 89 - begin and mass.dropped.max() > 0.1


def test_variants_change_one_thing() -> None:
    own = Method("m", STREAMING.settings | {"attention": "razor"}, ((True, False),))
    others = Method("m", own.settings, ((False, True),))
    found = variants(own, others, 80)
    assert list(found) == [
        "as it is",
        "longer windows",
        "exact prefill",
        "other heads",
        "other heads, exact prefill",
    ]
    wider = found["longer windows"].settings
    changed = {name: wider[name] for name in wider if wider[name] != own.settings[name]}
    assert changed == {"window_min": 40, "window_ratio": None}  # twice a quarter of 80
    assert found["exact prefill"].settings == own.settings | {"prefill": "exact"}
    assert found["other heads, exact prefill"].retrieval == ((False, True),)
    exact = Method("m", own.settings | {"prefill": "exact"}, None)
    assert list(variants(exact, None, 80)) == ["as it is", "longer windows"]


def test_other_heads_are_as_many_and_lose_most() -> None:
    dropped = torch.tensor([[[0.1, 0.2, 0.3, 0.0], [0.9, 0.0, 0.0, 0.8]]])  # 2 layers, groups of 2
    own = Method("m", {}, ((True, True), (False, False)))
    found = other_heads(own, dropped.expand(3, -1, -1), 2)
    assert found is not None and found.retrieval == ((False, False), (True, True))
    # The bytes stay: who keeps less gets the window of who keeps all now.
    own = replace(own, windows=((None, None), (16, 32)))
    found = other_heads(own, dropped.expand(3, -1, -1), 2)
    assert found is not None and found.windows == ((16, 32), (None, None))
    assert other_heads(Method("m", {}, None), dropped, 2) is None
    assert other_heads(Method("m", {}, ((True, True), (True, True))), dropped, 2) is None


def test_figures_of_attention() -> None:
    places = torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[0.6, 0.0, 0.2, 0.0]], [[0.4, 0.0, 0.6, 0.2]]])
    dropped = torch.tensor([[[0.9, 0.9, 0.1, 0.3]], [[0.9, 0.9, 0.5, 0.0]], [[0.9, 0.9, 0.7, 0.0]]])
    found = attention_figures(Mass(places, dropped), Method("m", {}, ((True, False),)), 2, 2)
    assert found["carriers"][:2] == [[0, 0, 0.5, True], [0, 2, 0.4, False]]
    assert found["steps"] == [[0, 0, 0.6, True], [0, 2, 0.6, False]]
    assert found["carried_by_retrieval"] == pytest.approx(0.5 / 1.0)
    assert found["dropped_answer"] == pytest.approx(0.3)
    assert found["dropped_question"] == pytest.approx(0.2)
    assert found["dropped_most"][0] == [0, 2, 0.6, False]


@pytest.mark.parametrize(
    ("kept", "full", "reason"),
    [
        ([], 0.1, "more than one of these"),
        ([], 1.0, "model"),
        (["other heads"], 1.0, "model"),
        (["other heads"], 0.1, "heads"),
        (["other heads", "longer windows"], 0.1, "heads or windows"),
        (["exact prefill"], 0.1, "local prefill"),
        (["other heads, exact prefill"], 0.1, "heads and local prefill"),
        (["as it is"], 0.1, "the answer's end"),
    ],
)
def test_reasons(kept: list[str], full: float, reason: str) -> None:
    names = ["as it is", "longer windows", "exact prefill", "other heads"]
    tried: dict[str, dict[str, Any]] = {
        name: {"kept": name in kept, "first": None if name in kept else 1, "loss_full": [9, full]}
        for name in (*names, "other heads, exact prefill")
    }
    for result in tried.values():
        result["loss"] = 9.9 + full
    assert verdict(tried)[0] == reason


def test_nats_decide_where_full_attention_was_unsure() -> None:
    """Its likeliest token is nearly chance there, but an answer that is lost by nats is not."""
    tried: dict[str, dict[str, Any]] = {
        name: {"kept": name == "other heads", "first": 1, "loss_full": [1.0, 2.0], "loss": loss}
        for name, loss in [
            ("as it is", 4.1),
            ("longer windows", 3.4),
            ("exact prefill", 3.6),
            ("other heads", 4.0),
        ]
    }
    assert verdict(tried) == ("windows", pytest.approx(0.135, abs=1e-3))
    tried["as it is"]["loss"] = 3.9
    assert verdict(tried)[0] == "model"


def test_questions_about_one_document_count_as_one() -> None:
    about = {"task": "t", "length": 1, "places": 1}
    found = [{**about, "number": 0, "dropped_answer": 0.2}] * 9
    found.append({**about, "number": 1, "dropped_answer": 0.4})
    mean = partial(_mean, name="dropped_answer", one_document=False)
    assert mean(found).startswith("30.0% (") and mean(found) == mean(found[-2:])
    of_tasks = [{**result, "task": task} for task in "ab" for result in found]
    assert mean(of_tasks) != mean(found)
    assert mean(of_tasks, one_document=True) == mean(found), "all tasks ask about one document"


def test_a_methods_own_dtype_and_blocks_are_not_full_attentions(letters: Path) -> None:
    own = {"attention": "full", "kv_dtype": "bf16", "retrieval_share": 0.1}
    methods = {"full": {"attention": "full"}, "own": own}
    config = NonliteralConfig(model=str(letters), haystack="reference", methods=methods)
    task = WhyTask(SuiteTask.plan(config), "own", (), "of its engine")
    [engine] = task.engines.values()
    assert (engine.attention, engine.kv_dtype, engine.retrieval_share) == ("full", "auto", 0)
    tried = task._tried.settings
    assert (tried["kv_dtype"], tried["retrieval_share"]) == ("bf16", 0.1)


@pytest.mark.parametrize("suite", ["nonliteral-50", "shared", "world"])
def test_a_run_of_an_earlier_version_is_asked_why(suite: str) -> None:
    folder = Path(__file__).parents[2] / "docs" / "benchmarks" / "suites" / suite
    task = WhyTask.plan(folder, config_of(folder), "razor", 10)
    assert {kind for kind, *_ in task.questions} == {"lost", "kept"}


@pytest.mark.long
def test_a_run(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "run", tmp_path / "why"
    # Twice the window is more than there is: the variant is full attention.
    flags = "--tasks near --lengths 1500 --samples 3 --window-min 800 --window-ratio none"
    assert evaluate("nonliteral", f"{flags} --methods full,streaming", folder) == 0
    with pytest.raises(ConfigError, match="holds no answer that full attention had and streaming"):
        WhyTask.plan(folder, config_of(folder), "streaming", 2)
    # A model of random weights answers nothing: let the first be lost, the second kept.
    results = folder / "results.jsonl"
    records = [json.loads(line) for line in results.read_text().splitlines()]
    for at, score in ((("full", 0), 1.0), (("full", 1), 1.0), (("streaming", 1), 1.0)):
        [own] = [r for r in records if (r["result"]["method"], r["result"]["number"]) == at]
        own["result"]["answers"][0]["score"] = score
    results.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = config_of(folder)
    assert (config.window_min, config.samples, config.task_names) == (800, 3, ("near",))
    for method, message in (("razor", "none of the folder's streaming"), ("full", "none of the")):
        with pytest.raises(ConfigError, match=message):
            WhyTask.plan(folder, config, method, 2)
    for changed in ({"haystack": "noise"}, {"seed": 1}):  # as where other essays are installed
        with pytest.raises(
            ConfigError, match=rf"cannot be made again: .*{next(iter(changed))}.* is "
        ):
            WhyTask.plan(folder, config.model_copy(update=changed), "streaming", 2)
    int8 = {"full": {"attention": "full"}, "streaming": {"attention": "streaming"}}
    int8["streaming"]["weight_dtype"] = "int8"
    for changed, message in (
        ({"methods": int8}, "streaming has another weight_dtype than full, but here one model"),
        ({"window_min": 900}, "is of another streaming: window_min is 800 there and 900 here"),
    ):
        with pytest.raises(ConfigError, match=message):
            WhyTask.plan(folder, config.model_copy(update=changed), "streaming", 2)
    task = WhyTask.plan(folder, config, "streaming", 2)
    assert task.questions == (("lost", "near", 1500, 0, 0), ("kept", "near", 1500, 1, 0))
    capsys.readouterr()
    assert cli.main(["eval", "why", str(folder), "--method", "streaming", "--out", str(out)]) == 0
    page = capsys.readouterr().out
    assert "# Why streaming lost 1 answers" in page and "| near 1500/0 |" in page
    lost, kept = json.loads((out / "why.json").read_text())["results"]
    assert (lost["kind"], kept["kind"], kept["variants"]) == ("lost", "kept", {})
    tried = lost["variants"]
    assert list(tried) == ["as it is", "longer windows", "exact prefill"]
    assert tried["longer windows"]["kept"]
    full = sum(tried["as it is"]["loss_full"])
    assert tried["longer windows"]["loss"] == pytest.approx(full, abs=1e-3)
    assert lost["places"] == 1 and 0 < lost["carriers"][0][2] < 1
    assert 0 < lost["dropped_answer"] < 1 and lost["carried_by_retrieval"] == 0
