"""Answers that must match something, and do; a grammar that fails ends its request alone."""

from __future__ import annotations

import json
import random
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import llguidance
import pytest

from razor_dist.config.errors import ModelError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import build
from razor_dist.engine.build import make_engine
from razor_dist.engine.core import EngineCore
from razor_dist.engine.worker import follow
from razor_dist.heads.decision import HeadRoles
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import CacheScope, Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import StepPlan
from razor_dist.protocol.structured_outputs import Grammar
from tests.cases import model_and_shape
from tests.engine.cores import evict_all, make_core, prompt, run, tokens
from tests.logits import split_of
from tests.prefix.engines import SETTINGS
from tests.ranks import Ranks
from tests.schemas import answers, random_schema, validate
from tests.tiny_models import Tiny
from tests.tokenizer import copy_with_letters


@pytest.mark.long
@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_every_answer_to_a_random_schema_is_valid(count: int) -> None:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(count)]
    for at in range(0, count, 16):
        texts, _ = answers(schemas[at : at + 16], seed=at)
        for schema, text in zip(schemas[at : at + 16], texts, strict=True):
            validate(schema, text)


@pytest.fixture(scope="module")
def core(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    """An engine whose tokens are printable letters, 4 to 98; 2 ends a sequence."""
    folder = tmp_path_factory.mktemp("letters") / "llama"
    return make_core(copy_with_letters(tiny("llama"), folder), max_num_seqs=4)


def texts(core: EngineCore, structured: Any, **settings: Any) -> list[str]:
    """Ask for three answers; they end by themselves."""
    params = SamplingParams(n=3, max_tokens=200, structured_outputs=structured, **settings)
    core.add("a", [50, 60, 70], params)
    found = run(core)
    assert core.runner.sequences.kv_bytes == 0
    ends = [found[name][-1] for name in ("a", "a/1", "a/2")]
    assert [getattr(end, "finish", None) for end in ends] == ["stop"] * 3, ends
    return ["".join(chr(t + 28) for t in tokens(messages)[:-1]) for messages in found.values()]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_whatever_kind_is_asked_for_is_matched(core: EngineCore, ignore_eos: bool) -> None:
    settings: dict[str, Any] = {"temperature": 1.5, "ignore_eos": ignore_eos, "seed": 1}
    choice = ["yes", "no", 'say "maybe"', "maybe not"]
    assert all(text in choice for text in texts(core, {"choice": choice}, **settings))
    many = [f"[{n}]" for n in range(3000)]
    assert all(text in many for text in texts(core, {"choice": many}, **settings))
    pattern = "(ab|c[0-9]{2,4}){2}!"
    found = texts(core, {"regex": pattern}, frequency_penalty=0.5, **settings)
    assert all(re.fullmatch(pattern, text) for text in found) and len(set(found)) > 1
    gbnf = 'root ::= "(" inner ")"\ninner ::= [a-c] | "x" [0-9] [0-9]?'
    assert all(re.fullmatch(r"\(([a-c]|x\d\d?)\)", t) for t in texts(core, {"grammar": gbnf}))
    lark = 'start: "<" WORD ">"\nWORD: /[a-f]{3}/'
    assert all(re.fullmatch("<[a-f]{3}>", t) for t in texts(core, {"grammar": lark}))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for form in (schema, json.dumps(schema)):
        for text in texts(core, {"json": form}, **settings):
            validate(schema, text)
    for text in texts(core, {"json": schema, "disable_any_whitespace": True}, **settings):
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
    for text in texts(core, {"json": schema, "whitespace_pattern": " "}, **settings):
        assert text.count(" ") and json.loads(text)
    for text in texts(core, {"json": schema, "whitespace_pattern": ""}, **settings):
        assert " " not in text and json.loads(text)


def test_a_greedy_answer_in_company_is_the_one_alone(core: EngineCore) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=30, structured_outputs={"regex": "[a-z]{5}[0-9]{5}"}
    )
    core.add("alone", [50, 60], params)
    alone = run(core)["alone"]
    core.add("a", [50, 60], params)
    core.add("free", [50, 60], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    found = run(core)
    assert tokens(found["a"]) == tokens(alone)
    assert len(tokens(found["free"])) == 30


def test_a_grammar_that_fails_ends_its_request_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=9, structured_outputs={"regex": "[a-z]{20}"})
    core.add("good", [50], params)
    core.add("bad", [50], SamplingParams(structured_outputs={"grammar": "start: <|none|>"}))
    accept, begun = Grammar.accept, []

    def spoil(grammar: Grammar, token: int) -> None:
        begun.append(grammar)
        accept(grammar, 9 if len(begun) > 4 else token)  # a bracket

    found = run(core)
    assert len(tokens(found["good"])) == 9
    assert found["bad"][-1].param == "structured_outputs"
    monkeypatch.setattr(Grammar, "accept", spoil)
    core.add("spoilt", [50], params)
    [*_, last] = run(core)["spoilt"]
    assert last.param == "structured_outputs"
    assert "the answer cannot go on" in last.message
    assert core.runner.sequences.kv_bytes == 0


def asked_again(
    comm: Communicator, path: str, fails_at: int, drafted: bool
) -> tuple[list[Any], list[int], list[list[int]]]:
    """Ask a question whose grammar fails with the answer's token ``fails_at``, and ask it again.

    Rank 0 returns the messages about the failure; the cached tokens of the same question, asked
    after a whole answer and after the failure; and the tokens of the first answer and of these two.
    """
    config = EngineConfig(model=path, world_size=comm.size, **SETTINGS)
    model, _ = model_and_shape(path)
    roles = HeadRoles(split_of(Path(path)))
    engine = make_engine(model, config, roles, comm, eos_token_ids=(2,))
    if comm.rank:
        follow(engine)
        return [], [], []
    core, accept, accepted = engine.core, Grammar.accept, []
    params = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "[a-z]{20}"})

    def spoil(grammar: Grammar, token: int) -> None:
        accepted.append(token)
        accept(grammar, 9 if len(accepted) == fails_at else token)  # a bracket

    def ask(name: str, salt: str | None = None) -> list[Any]:
        core.add(name, prompt(150), params, scope=CacheScope(salt))
        return run(core)[name]

    core.scheduler.batch.drafter = None
    whole = tokens(ask("whole", "salt"))
    if drafted:
        core.scheduler.batch.drafter = lambda answers, beside: [
            whole[len(answer.generated) :][: most - 1] for answer, most in answers
        ]
    with mock.patch.object(Grammar, "accept", spoil):
        spoilt = ask("spoilt")
    again = [ask("whole again", "salt"), ask("again")]
    core.stats()  # compares the ranks' free pages and places with rank 0's
    evict_all(core)
    assert (core.scheduler.room.accounts.free == core.scheduler.room.accounts.sizes).all()
    core.stop()
    cached = [next(m.cached for m in found if isinstance(m, Progress)) for found in again]
    return spoilt, cached, [whole, *map(tokens, again)]


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("fails_at", "drafted"), [(1, False), (5, False), (5, True)])
def test_a_prompt_stays_cached_when_its_grammar_fails(
    fails_at: int,
    drafted: bool,
    world: int,
    ranks: Ranks,
    tiny: Tiny,
    tmp_path: Path,
) -> None:
    path = copy_with_letters(tiny("llama"), tmp_path / "llama")
    spoilt, cached, found = ranks(world).run(asked_again, str(path), fails_at, drafted)[0]
    assert "the answer cannot go on" in spoilt[-1].message
    assert tokens(spoilt) == found[0][: fails_at - 1]
    assert not drafted or spoilt[-2].accepted  # it failed within a draft that was right so far
    assert cached[0] == cached[1] > 100
    assert found[0] == found[1] == found[2]


def test_a_refused_grammar_reads_no_prompt(core: EngineCore) -> None:
    """A frontend compiles grammars first, but rank 0 refuses what it cannot compile itself."""
    bad = SamplingParams(n=2, structured_outputs={"grammar": "start: <|none|>"})
    core.add("bad", prompt(300), bad)
    core.add("good", [50], SamplingParams(max_tokens=2, structured_outputs={"regex": "[a-z]{9}"}))
    before = core.stats().prompt_tokens
    found = run(core)
    for name in ("bad", "bad/1"):
        [failed] = found[name]
        assert failed.param == "structured_outputs"
    assert len(tokens(found["good"])) == 2
    assert core.stats().prompt_tokens == before + 1
    core.add("pinned", [50], bad, pin=True)  # for others to continue: it has no answer
    [*_, progress] = run(core)["pinned"]
    assert progress.processed == 1
    core.abort("pinned")


def test_nobody_waits_for_a_grammar(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, may = llguidance.LLMatcher, threading.Event()

    def slow(*given: Any, **settings: Any) -> Any:
        assert may.wait(60)
        return compile_(*given, **settings)

    compiled = mock.Mock(wraps=compile_, side_effect=slow)
    monkeypatch.setattr(llguidance, "LLMatcher", compiled)
    params = SamplingParams(n=3, max_tokens=9, structured_outputs={"regex": "[c-z]{4}"})
    with pytest.raises(RequestError):  # nothing is compiled for who is refused
        core.add("long", [5] * (core.max_model_len - 8), params)
    core.add("a", [50], params)
    core.add("gone", [50], SamplingParams(structured_outputs={"regex": "[0-9]"}))
    core.abort("gone")
    core.add("free", [50], SamplingParams(max_tokens=3, ignore_eos=True))
    free = [m for _ in range(9) for m in core.step() if isinstance(m, Token)]
    assert [m.id for m in free] == ["free"] * 3
    may.set()
    assert all(len(tokens(found)) == 5 for found in run(core).values())
    core.add("again", [50], params)
    run(core)
    compiled.assert_called_once()


def test_a_grammar_may_be_ready_while_a_step_is_scheduled(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=9, structured_outputs={"regex": "[a-z]{4}"})
    assert params.structured_outputs is not None
    compiled = core.grammars.compile(params.structured_outputs).result()
    ready: Future[Grammar] = Future()
    monkeypatch.setattr(core.grammars, "compile", lambda _: ready)
    next_plan = core.scheduler.next

    def plan() -> StepPlan | None:
        if not ready.done():
            ready.set_result(compiled)
        return next_plan()

    monkeypatch.setattr(core.scheduler, "next", plan)
    core.add("a", [50], params)
    assert len(tokens(run(core)["a"])) == 5


@pytest.mark.parametrize("error", [ModelError("it is broken"), FileNotFoundError("it is gone")])
def test_a_tokenizer_that_is_gone_fails_its_request_alone(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    core = make_core(copy_with_letters(tiny("llama"), tmp_path / "llama"))
    load = mock.Mock(side_effect=error)
    monkeypatch.setattr(build, "load_tokenizer", load)
    params = SamplingParams(n=2, max_tokens=9, structured_outputs={"regex": "[a-z]{4}"})
    core.add("free", [50], SamplingParams(max_tokens=3, ignore_eos=True))
    core.add("a", [50], params)
    found = run(core)
    assert len(tokens(found["free"])) == 3
    for name in ("a", "a/1"):
        [failed] = found[name]
        assert failed.code == "engine_error" and failed.message.endswith(f"loaded: {error}")
    load.side_effect = load_tokenizer
    core.add("again", [50], params)
    assert len(tokens(run(core)["again"])) == 5
