"""kvpress's methods on a tiny model: what they keep, what they answer, and a job of them.

They need kvpress, which pip does not install beside our transformers (docs/needle.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from razor_dist import SamplingParams, cli
from razor_dist.config.errors import ConfigError
from razor_dist.evals.baselines.presses import PRESSES, BaselineConfig, check_installed
from razor_dist.evals.needle.config import NeedleConfig
from razor_dist.evals.needle.results import NeedleRun
from razor_dist.jobs.process import call
from razor_dist.jobs.results import read_job
from tests.evals.baselines.text import MORE, NEW_TOKENS, TEXT

try:
    check_installed(list(PRESSES))
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

TOKEN_BYTES = 4 * 2 * 2 * 16 * 4
"""Bytes of one token: layers, KV heads, key and value, their size, float32."""
BUDGETS = (None, 0.3, 1.0)


@pytest.fixture(scope="module")
def found(settings: dict[str, Any]) -> dict[str, Any]:
    """Each press with each budget, and what transformers' ``generate`` says."""
    engine = NeedleConfig(**settings).engine("razor", 1000).model_dump(mode="json")
    runs = [(method, engine, budget) for method in PRESSES for budget in BUDGETS]
    command = [sys.executable, "-m", "tests.evals.baselines.all_presses", json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    keys = [(method, budget) for method, _, budget in runs]
    return {"stock": out["stock"], **dict(zip(keys, out["presses"], strict=True))}


@pytest.mark.long
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("method", PRESSES)
def test_the_cache_holds_what_the_budget_says(
    method: str, budget: float | None, found: dict[Any, Any]
) -> None:
    own = found[method, budget]
    layers = own["layers"]
    assert own["bytes"] == sum(layers) * TOKEN_BYTES // 4, "tensors hold no more than their rows"
    if budget == 1.0:
        assert layers == [700] * 4
        return
    assert own["budget"] < 0.8 * 700 * TOKEN_BYTES
    # All heads keep whole tokens: less than a token's bytes of the budget are left. PyramidKV's
    # layers are rounded each for itself.
    slack = own["budget"] - own["bytes"]
    assert (-TOKEN_BYTES if method == "pyramidkv" else 0) <= slack < 2 * TOKEN_BYTES
    if method == "pyramidkv" and budget is None:
        assert layers == sorted(layers, reverse=True) and layers[0] > layers[-1] + 100
    else:
        assert len(set(layers)) == 1


@pytest.mark.parametrize("method", PRESSES)
def test_nothing_dropped_is_transformers_own_answer(method: str, found: dict[Any, Any]) -> None:
    for answer in found[method, 1.0]["answers"]:
        assert answer == found["stock"]
    less = found[method, 0.3]["answers"]
    assert less[0] == less[1], "an answer leaves nothing in the cache"
    assert less[0] != found["stock"], "this text shows what was dropped"


def test_a_pressed_model_is_asked_like_an_engine(settings: dict[str, Any]) -> None:
    config = NeedleConfig(methods="h2o", **settings).engine("h2o", 1000)
    assert call(_ask_all, config, output=sys.stderr) == {}


def _ask_all(config: BaselineConfig) -> dict[str, Any]:
    llm = config.open()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    [whole] = llm.generate([[*TEXT, MORE[0]]], params)
    text = whole.outputs[0].text
    stopping = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop=(text[-1],))
    for output in llm.generate([[*TEXT, MORE[0]]] * 2, stopping):
        [answer] = output.outputs
        assert (answer.text, answer.finish_reason) == (text.partition(text[-1])[0], "stop")
    with llm.prefill(TEXT) as prefix:
        [again] = llm.generate([{"prompt_token_ids": MORE[:1]}], params, prefix=prefix)
        assert again.outputs[0].token_ids == whole.outputs[0].token_ids
        assert llm.stats()["kv_bytes_per_rank"][0] > 0
    assert llm.stats()["kv_bytes_per_rank"] == [0]
    with pytest.raises(ConfigError, match="leaves nothing"), llm.prefill([]):
        pass
    return {}


@pytest.mark.long
def test_a_job_of_ours_and_theirs(settings: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    values = {
        **{key: value for key, value in settings.items() if key != "head_map"},
        **{"methods": "full,snapkv-query-aware,snapkv", "kv_budget": 1, "haystack": "noise"},
        **{"context_lengths": 900, "document_depth_percents": "20,80", "needles": 2},
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    assert cli.main(["eval", "needle", "--no-ray", "--out", str(out), *flags]) == 0
    run = NeedleRun(out)
    said = {m: [cell.answer for cell in run.cells if cell.method == m] for m in run.methods}
    assert len(said["full"]) == 4 and all(said["full"])
    assert said["snapkv"] == said["snapkv-query-aware"] == said["full"]
    # Questions are read with the document where they are seen, and kept with it.
    results = [record["result"] for record in read_job(out).records]
    full, aware, blind = (next(r for r in results if r["method"] == m) for m in run.methods)
    assert blind["kv_bytes"] == blind["kv_bytes"] // TOKEN_BYTES * TOKEN_BYTES
    assert 0 <= full["kv_bytes"] - blind["kv_bytes"] < 16 * TOKEN_BYTES, "but for the last page"
    assert aware["kv_bytes"] > blind["kv_bytes"] + 20 * TOKEN_BYTES
    page = (out / "report.md").read_text()
    assert "| snapkv-query-aware | SnapKVPress | 1 of full attention | yes |" in page
    assert "| snapkv | SnapKVPress | 1 of full attention | no |" in page
    assert "Seeing the question is an advantage" in page


def test_rulers_questions_are_answered_by_theirs(settings: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = {"model": settings["model"], "threads": 1, "kv_budget": 1, "methods": "full,tova"}
    own |= {"tasks": "niah_single_1", "lengths": 900, "samples": 2, "out": out}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    assert cli.main(["eval", "ruler", "--no-ray", *flags]) == 0
    answers = [record["result"]["answers"] for record in read_job(out).records]
    assert len(answers) == 4 and all(answers) and answers[:2] == answers[2:]
