"""Budgets of kvpress's methods, and what is refused; nothing here needs kvpress itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist import LLM, cli
from razor_dist.config.errors import ConfigError, HeadMapError, ModelError
from razor_dist.evals.baselines import presses
from razor_dist.evals.baselines.model import Budget, compression_ratio
from razor_dist.evals.baselines.presses import KVPRESS, PRESSES, BaselineConfig, check_installed
from razor_dist.evals.needle.config import NeedleConfig
from razor_dist.evals.needle.documents import Question, Reading, Spot, with_questions
from razor_dist.evals.needle.task import NeedleTask
from razor_dist.evals.suites.config import RulerConfig
from razor_dist.evals.suites.job import SuiteTask
from razor_dist.jobs.host_engine import settings_of
from tests.tiny_models import make_tiny


@pytest.mark.long
def test_the_budget_is_what_an_engine_of_one_rank_measures(settings: dict[str, Any]) -> None:
    config = NeedleConfig(methods="h2o", **settings).engine("h2o", 900)
    assert isinstance(config, BaselineConfig)
    budget = Budget(config, "cpu")
    with LLM(**settings_of(config)) as llm:
        for tokens in (60, 333, 800):
            with llm.prefill([3 + n % 180 for n in range(tokens)]):
                [measured] = llm.stats()["kv_bytes_per_rank"]
            assert budget.nbytes(tokens) == measured
    full = 4 * 2 * 2 * 16 * 4  # layers, KV heads, key and value, their size, float32
    assert budget.token_bytes == full
    assert budget.tokens(800) == measured // full < 800
    assert budget.tokens(20) == 20, "a short text is kept whole"


def test_a_budget_may_be_a_part_of_full_attention(settings: dict[str, Any]) -> None:
    config = NeedleConfig(methods="h2o", kv_budget=0.25, **settings | {"head_map": None})
    budget = Budget(config.engine("h2o", 900), "cpu")
    assert budget.tokens(800) == 200
    with pytest.raises(ConfigError, match=r"kv_budget 0\.25 leaves nothing of 3 tokens"):
        budget.tokens(3)
    config = NeedleConfig(methods="h2o", **settings | {"head_map": None})
    with pytest.raises(HeadMapError):
        Budget(config.engine("h2o", 900), "cpu")


@pytest.mark.parametrize("name", ["weight_dtype", "kv_dtype"])
def test_settings_that_transformers_own_model_lacks_are_refused(
    name: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is int8, but the method h2o runs on"):
        NeedleConfig(methods="h2o", **settings, **{name: "int8"})


@given(st.integers(1, 2**20), st.data())
def test_kvpress_keeps_what_its_ratio_was_chosen_for(read: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, read))
    ratio = compression_ratio(read, kept)
    assert 0 <= ratio < 1
    assert int(read * (1 - ratio)) == kept, "as `kvpress.utils.compute_n_kept` has it"


def test_a_press_has_the_engines_settings_on_one_rank() -> None:
    config = NeedleConfig(methods="full,h2o", world_size=4, window_min=512)
    press = config.engine("h2o", 4096)
    assert isinstance(press, BaselineConfig)
    assert (press.world_size, press.window_min, press.max_model_len) == (1, 512, 4096)
    assert (press.press, press.kv_budget, press.attention) == ("h2o", None, "razor")
    ruler = RulerConfig(methods={"a": {"press": "tova", "window_min": 9}}, kv_budget=0.5)
    own = ruler.engine("a")
    assert isinstance(own, BaselineConfig)
    assert (own.press, own.kv_budget, own.attention, own.window_min) == ("tova", 0.5, "full", 9)
    assert ruler.presses == ["tova"] and RulerConfig(methods="full,h2o").presses == ["h2o"]


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (NeedleConfig, {"kv_budget": 0.5}, "kv_budget is for kvpress's methods"),
        (RulerConfig, {"kv_budget": 0.5}, "kv_budget is for kvpress's methods"),
        (NeedleConfig, {"methods": "h2o", "kv_budget": 0}, "kv_budget must be greater than 0"),
        (NeedleConfig, {"methods": "h2o", "kv_budget": 1.5}, "kv_budget must be at most 1"),
        (
            NeedleConfig,
            {"methods": "h2o", "kv_budget": 0.5, "head_map": "r.json"},
            "head_map is for the method razor",
        ),
        (NeedleConfig, {"methods": "tova", "weights": "zero3"}, "weights is zero3, but the method"),
        (NeedleConfig, {"methods": "tova", "kv_dtype": "bf16"}, "kv_dtype is bf16, but the method"),
        (
            RulerConfig,
            {"methods": {"a": {"press": "snapkv-query-aware"}}},
            "methods: a: press must be one of h2o, snapkv, tova",
        ),
    ],
)
def test_mistakes_are_named(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**values)
    assert message in str(caught.value)


def test_what_is_not_installed_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_installed(["full", "razor"])
    monkeypatch.setattr(presses, "version", lambda name: "0.4.0")
    with pytest.raises(ConfigError, match=r"release 0\.5\.5 is needed and 0\.4\.0 installed"):
        check_installed(["full", "tova"])
    monkeypatch.setattr(presses, "version", lambda name: KVPRESS)
    monkeypatch.setattr(presses, "find_spec", lambda name: None if name == "fire" else name)
    with pytest.raises(ConfigError, match="tova is kvpress's, which needs fire; install"):
        check_installed(["full", "tova"])

    def absent(name: str) -> str:
        raise presses.PackageNotFoundError(name)

    monkeypatch.setattr(presses, "version", absent)
    for test in ("needle", "ruler"):
        command = ["eval", test, "--out", str(tmp_path / "out"), "--methods", "full,h2o"]
        assert cli.main([*command, "--no-ray"]) == 2
        said = capfd.readouterr().err
        assert "the method h2o is kvpress's" in said and "the extra baselines" in said
        assert "pip install --no-deps kvpress==0.5.5" in said
    assert not (tmp_path / "out").exists()


def test_a_model_that_kvpress_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(presses, "check_installed", lambda methods: None)
    model = str(make_tiny("glm", tmp_path / "glm"))
    own = {"methods": "full,tova", "kv_budget": 0.5, "model": model}
    for plan, config in ((NeedleTask.plan, NeedleConfig), (SuiteTask.plan, RulerConfig)):
        with pytest.raises(ModelError, match=r"tova is kvpress's, which knows .* is of type 'glm'"):
            plan(config(**own))


def test_a_question_that_is_seen_is_read_with_its_document() -> None:
    spots = [Spot(10, 0), Spot(90, 0)]
    asked = [Question(spots[0], "one", [7, 8, 9]), Question(spots[1], "two", [5])]
    assert with_questions([Reading([1, 2], asked)]) == [
        Reading([1, 2, 7, 8], [Question(spots[0], "one", [9])]),
        Reading([1, 2], [Question(spots[1], "two", [5])]),
    ]


def test_the_methods_are_those_of_the_table() -> None:
    assert set(PRESSES) < set(NeedleConfig(methods=(*PRESSES, "full")).methods)
