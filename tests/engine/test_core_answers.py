"""The settings of one request: several answers, sampling, log-probabilities, stop conditions."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from razor_dist.config.errors import RequestError
from razor_dist.engine import build
from razor_dist.protocol.messages import Progress, PromptLogprobs, Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.engine.cores import GREEDY, make_core, prompt, run, tokens
from tests.logits import stock_logits
from tests.tiny_models import Tiny


@pytest.mark.parametrize(
    "settings",
    [{"attention": "full"}, {"attention": "streaming"}, {"prefill": "exact"}],
    ids=lambda settings: next(iter(settings.values())),
)
@pytest.mark.parametrize("length", [20, 150])
def test_several_answers_share_a_prompt_and_are_those_of_requests_of_their_own(
    settings: dict[str, Any], length: int, tiny: Tiny
) -> None:
    core = make_core(tiny("llama"), max_num_seqs=4, **settings)
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=2**63 - 2, repetition_penalty=1.2)
    alone = []
    for index in range(3):
        core.add("alone", prompt(length), params.for_answer(index))
        alone.append(tokens(run(core)["alone"]))
    assert len({tuple(answer) for answer in alone}) == 3
    read = core.stats().prompt_tokens
    core.add("other", prompt(30, 7), GREEDY)
    core.add("a", prompt(length), dataclasses.replace(params, n=3))
    messages = run(core)
    assert [tokens(messages[name]) for name in ("a", "a/1", "a/2")] == alone
    assert core.stats().prompt_tokens - read == length + 30
    told = {name for name, found in messages.items() if any(isinstance(m, Progress) for m in found)}
    assert told == {"a", "other"}
    assert core.runner.sequences.kv_bytes == 0
    assert (core.scheduler.room.accounts.free == core.scheduler.room.accounts.sizes).all()


@pytest.mark.long
def test_each_of_several_answers_may_be_aborted_at_any_time(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), max_num_seqs=4, max_step_ms=1e6)
    params = dataclasses.replace(GREEDY, n=3)
    for steps in range(12):
        for gone in (["a"], ["a/1"], ["a", "a/2"], ["a/1", "a", "a/2"]):
            core.add("busy", prompt(20), GREEDY)
            core.add("a", prompt(150), params)
            for _ in range(steps):
                core.step()
            for name in gone:
                core.abort(name)
            found = run(core)
            if steps <= 5:  # before the first token of any
                left = {"a", "a/1", "a/2"} - set(gone)
                assert {name for name in found if name != "busy" and tokens(found[name])} == left
            assert core.runner.sequences.kv_bytes == 0
            accounts = core.scheduler.room.accounts
            assert (accounts.free == accounts.sizes).all()


@pytest.mark.parametrize("attention", ["full", "streaming"])
def test_counters_may_be_asked_for_while_several_answers_wait_for_their_prompt(
    attention: str, tiny: Tiny
) -> None:
    core = make_core(tiny("llama"), attention=attention, max_num_seqs=4)
    core.add("a", prompt(150), dataclasses.replace(GREEDY, n=3))
    core.add("b", prompt(30), GREEDY)
    running = []
    while core.has_work:
        core.step()
        running.append(core.stats().running)  # an `EngineError` if rank 0 counts something else
    assert running[0] == 4 and running[-1] == 0


def test_more_answers_than_there_is_room_for_are_refused(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), max_num_seqs=3, attention="full", kv_tokens=400)
    with pytest.raises(RequestError, match="n is 4, and the engine has 3 sequences") as refused:
        core.add("a", prompt(20), dataclasses.replace(GREEDY, n=4))
    assert (refused.value.param, refused.value.code) == ("n", "max_num_seqs_exceeded")
    with pytest.raises(RequestError, match="for 3 answers"):
        core.add("a", prompt(100), dataclasses.replace(GREEDY, n=3, max_tokens=200))
    core.add("a", prompt(100), dataclasses.replace(GREEDY, n=2, max_tokens=100))
    core.add("b", prompt(30), dataclasses.replace(GREEDY, n=2))  # waits for the others' sequences
    found = run(core)
    assert {name: len(tokens(found[name])) for name in ("a", "a/1", "b", "b/1")} == {
        "a": 100,
        "a/1": 100,
        "b": 8,
        "b/1": 8,
    }


def test_the_context_limit_names_both_numbers(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    with pytest.raises(RequestError, match=r"holds 400 tokens; the prompt has 395 and 8") as error:
        core.add("a", prompt(395), GREEDY)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=r"holds 400 tokens; the prompt has 393 and 8"):
        core.add("a", prompt(393), GREEDY)
    core.add("b", prompt(392), GREEDY)
    assert len(tokens(run(core)["b"])) == 8
    core.add("c", prompt(392), dataclasses.replace(GREEDY, max_tokens=None))
    assert len(tokens(run(core)["c"])) == 8


@pytest.mark.parametrize(("ids", "words"), [([], "at least one token"), ([192], "token id 192")])
def test_bad_prompts_are_refused(ids: list[int], words: str, tiny: Tiny) -> None:
    with pytest.raises(RequestError, match=words):
        make_core(tiny("llama")).add("a", ids, GREEDY)


def test_prompt_logprobs_are_stock_logprobs(tiny: Tiny) -> None:
    path = tiny("llama")
    core = make_core(path, attention="full")
    ids = prompt(100, 3)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, prompt_logprobs=3)
    core.add("a", ids, params)
    messages = run(core)["a"]
    entries = [e for m in messages if isinstance(m, PromptLogprobs) for e in m.logprobs]
    assert entries[0] is None
    assert len(entries) == 100
    want = stock_logits(path, ids).log_softmax(-1)
    for i, (logprob, rank, top) in enumerate(entries[1:]):
        assert logprob == pytest.approx(want[i, ids[i + 1]].item(), abs=1e-3)
        assert rank == int((want[i] > want[i, ids[i + 1]]).sum()) + 1
        assert [t for t, _ in top] == want[i].topk(3).indices.tolist()
    [token] = [m for m in messages if isinstance(m, Token)]
    assert token.logprob == pytest.approx(want[-1].max().item(), abs=1e-3)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens_are_refused(
    field: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tiny("llama"))
    monkeypatch.setattr(core.runner, "shape", SimpleNamespace(vocab_size=10))
    with pytest.raises(RequestError, match="holds 10 tokens") as refused:
        core.add("a", [5], SamplingParams(**{field: 11}))
    assert refused.value.param == field


def test_stop_tokens_and_end_of_sequence(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(tiny("llama"))
    core.add("a", [5, 6, 7], GREEDY)
    first = tokens(run(core)["a"])
    stop = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(first[2],))
    core.add("b", [5, 6, 7], stop)
    messages = run(core)["b"]
    assert tokens(messages) == first[: first.index(first[2]) + 1]
    assert messages[-1].finish == "stop"
    monkeypatch.setattr(build, "eos_token_ids", lambda path: (first[1],))
    core = make_core(tiny("llama"))
    core.add("c", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8))
    assert tokens(run(core)["c"]) == first[: first.index(first[1]) + 1]


def test_end_ids_without_logits_are_ignored(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(tiny("llama"), tmp_path / "llama")
    last = make_core(path).runner.shape.vocab_size - 1
    ids = {"eos_token_id": [5, -1, 10**6]}
    (path / "generation_config.json").write_text(json.dumps(ids))
    core = make_core(path)
    assert "eos_token_id -1, 1000000 is ignored" in caplog.text
    bias = {last: 100.0, 5: 90.0}
    core.add("a", [5, 6, 7], dataclasses.replace(GREEDY, logit_bias=bias, min_tokens=1))
    assert tokens(run(core)["a"]) == [last] * 8
    ends = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=1, logit_bias={5: 90.0})
    core.add("b", [5, 6, 7], ends)
    found = run(core)["b"]
    assert tokens(found)[0] != 5 and tokens(found)[1:] == [5]
    assert found[-1].finish == "stop"


@pytest.mark.parametrize("token", [-1, 10**6])
def test_unknown_stop_tokens_are_refused(token: int, tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    with pytest.raises(RequestError, match=f"token id {token} in stop_token_ids") as refused:
        core.add("a", [5], SamplingParams(stop_token_ids=(token,), min_tokens=1))
    assert refused.value.param == "stop_token_ids"
