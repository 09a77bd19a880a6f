"""The engine in process: many requests, pinned prefixes, exact admission, nothing left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from razor_dist.config.errors import ConfigError, EngineError, HeadMapError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import capacity
from razor_dist.engine.build import build_engine
from razor_dist.engine.core import EngineCore
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.counters import Counters, PrefixCounters, TierCounters
from razor_dist.protocol.messages import EngineInfo, Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import Compute, StepPlan
from tests.engine.cores import GREEDY, evict_all, make_core, prompt, run, tokens
from tests.tiny_models import Tiny


@pytest.mark.parametrize("attention", ["full", "streaming"])
def test_requests_in_flight_together_answer_as_if_alone(attention: str, tiny: Tiny) -> None:
    core = make_core(tiny("qwen2"), attention=attention, max_num_seqs=2)
    prompts = {f"r{i}": prompt(30 + 37 * i, i) for i in range(4)}
    alone = {}
    for name, ids in prompts.items():
        core.add(name, ids, GREEDY)
        alone[name] = tokens(run(core)[name])
    for name, ids in prompts.items():
        core.add(name, ids, GREEDY)
    together = run(core)
    assert {name: tokens(together[name]) for name in prompts} == alone
    assert core.runner.sequences.kv_bytes == 0
    assert core.scheduler.room.accounts.free[0].tolist() == [core.runner.config.num_pages]


def test_a_requests_sampling_settings_reach_the_sampler(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))

    def drawn(**values: Any) -> list[int]:
        core.add("a", [5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True, **values))
        return tokens(run(core)["a"])

    greedy = drawn(temperature=0)
    assert drawn(temperature=2.0, seed=1) not in (greedy, drawn(temperature=2.0, seed=2))
    for only in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-40}):
        assert drawn(**{"temperature": 2.0, "seed": 1} | only) == greedy, only


@pytest.mark.parametrize("attention", ["full", "streaming"])
def test_many_short_requests_run_at_once_in_the_caches_of_few_long_ones(
    attention: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def core_of(room: float, **settings: Any) -> EngineCore:
        monkeypatch.setattr(capacity, "cache_room", lambda *_: room)
        return make_core(tiny("llama"), attention=attention, max_model_len=4000, **settings)

    one = core_of(0.0, max_num_seqs=1).runner.caches.reserved_bytes
    core = core_of(3 * one)
    assert one < core.runner.caches.reserved_bytes <= 3 * one
    for index in range(64):
        core.add(f"r{index}", prompt(20 + index % 7, index), GREEDY)
    alone = core_of(0.0)
    core.step()
    assert core.scheduler.sequences == 64
    together = run(core)
    for name in ("r0", "r63"):
        index = int(name[1:])
        alone.add(name, prompt(20 + index % 7, index), GREEDY)
        assert tokens(together[name]) == tokens(run(alone)[name])
    assert core.runner.sequences.kv_bytes == 0
    core.add("long", prompt(100), dataclasses.replace(GREEDY, max_tokens=3900))
    core.step()
    core.abort("long")


@pytest.mark.parametrize("prefill", ["local", "exact"])
def test_one_pinned_prefix_answers_many_questions(prefill: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"), prefill=prefill)
    document = prompt(150, 1)
    core.add("doc", document, GREEDY, pin=True)
    progress = run(core)["doc"]
    assert [m.processed for m in progress] == [0, 40, 80, 120, 150]
    assert {(m.cached, m.total) for m in progress} == {(0, 150)}
    used = core.runner.sequences.kv_bytes
    questions = {f"q{i}": prompt(11, 10 + i) for i in range(3)}
    answers = {}
    for _ in range(2):  # a question asked twice gets the same answer: the document is unharmed
        for name, ids in questions.items():
            core.add(name, ids, GREEDY, prefix_id="doc")
        messages = run(core)
        found = {name: tokens(m) for name, m in messages.items()}
        told = [m for m in messages["q2"] if isinstance(m, Progress)]
        assert [(m.processed, m.total, m.cached) for m in told] == [
            (150, 161, 150),
            (161, 161, 150),
        ]
        assert answers in ({}, found)
        answers = found
        assert core.runner.sequences.kv_bytes == used
    if prefill == "local":
        core.add("whole", document + questions["q1"], GREEDY)
        assert tokens(run(core)["whole"]) == answers["q1"]
    core.add("last", questions["q0"], GREEDY, prefix_id="doc")
    core.abort("doc")  # while a question waits for it
    assert tokens(run(core)["last"]) == answers["q0"]
    assert core.runner.sequences.kv_bytes == 0
    with pytest.raises(RequestError, match=r"no pinned prefix 'doc'"):
        core.add("late", [5], GREEDY, prefix_id="doc")


def test_prefill_seconds_leave_out_the_wait(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(tiny("llama"), max_step_ms=1e6)
    chunks, execute = [0], core.runner.execute

    def count(plan: StepPlan) -> torch.Tensor | None:
        chunks[0] += isinstance(plan, Compute)
        return execute(plan)

    monkeypatch.setattr(core, "_clock", lambda: float(chunks[0]))  # a chunk takes a second
    monkeypatch.setattr(core.runner, "execute", count)
    core.add("a", prompt(120), GREEDY, pin=True)
    core.add("b", prompt(80), GREEDY, pin=True)  # shorter, so that it is read first
    messages = run(core)
    # "a" has its turn after a chunk of "b", and the rest when "b" is done.
    assert [m.seconds for m in messages["b"]] == [0, 1, 3]
    assert [m.seconds for m in messages["a"]] == [0, 1, 3, 4]


def test_the_time_that_is_left_falls_from_request_to_request(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tiny("llama"), max_num_seqs=2)
    cost = core.scheduler.prefill_policy.cost
    monkeypatch.setattr(cost, "learn", lambda *_: None)
    monkeypatch.setattr(cost, "seconds", lambda tokens, _: float(tokens))
    monkeypatch.setattr(cost, "step", lambda *_, **__: 1.0)
    assert core.seconds_left() == {}
    core.add("doc", prompt(50), GREEDY, pin=True)
    core.add("a", prompt(20), GREEDY, prefix_id="doc")
    assert core.seconds_left() == {"doc": 50, "a": 50 + 20 + 8}
    left = []
    while core.has_work:
        core.step()
        left.append(max(core.seconds_left().values(), default=0))
    assert left == sorted(left, reverse=True) and left[-1] == 0
    core.add("b", prompt(20), SamplingParams(max_tokens=300))
    assert core.seconds_left() == {"b": 20 + (256 + 8) / 2}  # as long as answers are, nearly
    core._draws.runs = 2  # drafts: eight tokens in two steps
    assert core.seconds_left() == {"b": pytest.approx(20 + (256 + 8) / 2 / 3)}


def test_pinned_prefixes_leave_places_for_answers(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), max_num_seqs=2, prefix_cache=True, max_step_ms=1e6)
    plain = {f"r{i}": prompt(40, i) for i in range(6)}
    for i in range(4):
        core.add(f"p{i}", prompt(40, i)[:30], GREEDY, pin=True)
    for name, ids in plain.items():
        core.add(name, ids, GREEDY)
    with pytest.raises(RequestError, match=r"4 of .* 4 pref.*: p0, p1, p2, \.\.\.\)$") as error:
        core.add("p4", prompt(30, 4), GREEDY, pin=True)
    assert error.value.code == "pinned_prefixes_hold_cache"
    found = run(core)
    assert core.stats().running == 0 and core.stats().prefix_cache.entries <= 4
    for i in range(4):  # each is still there, with two answers at once
        core.add(f"q{i}", prompt(40, i)[30:], GREEDY, prefix_id=f"p{i}")
    found |= run(core)
    for i in range(4):
        assert tokens(found[f"q{i}"]) == tokens(found[f"r{i}"])
        assert next(m.cached for m in found[f"q{i}"] if isinstance(m, Progress)) >= 30
    core.add("last", prompt(20, 7), GREEDY, prefix_id="p0")
    core.abort("p0")  # its place is free when what continues it has ended
    core.add("p4", prompt(30, 4), GREEDY, pin=True)
    assert [m.processed for m in run(core)["p4"]][-1] == 30
    for i in range(1, 5):
        core.abort(f"p{i}")
    evict_all(core)
    accounts = core.scheduler.room.accounts
    assert (accounts.free == accounts.sizes).all() and not core.runner.sequences


@pytest.mark.parametrize("attention", ["full", "streaming"])
def test_a_released_prefix_counts_while_another_continues_it(tiny: Tiny, attention: str) -> None:
    core = make_core(tiny("llama"), prefix_cache=True, attention=attention)

    def pin(name: str, count: int, most: int, **more: Any) -> int:
        core.add(name, prompt(count), GREEDY, pin=True, quota=("key", most), **more)
        nbytes: int = run(core)[name][-1].nbytes
        return nbytes

    first = pin("a", 150, 10**9)
    second = pin("b", 20, 10**9, prefix_id="a")
    core.abort("a")  # its full pages stay; the last one and its windows go
    need, accounts = core.scheduler.admission.need, core.scheduler.room.accounts
    windows = need._bytes(accounts.in_slots(total=150))
    held = first + second - windows - need.page_bytes(1)
    most = held + first - 1
    assert windows == (first if attention == "streaming" else 0)
    with pytest.raises(RequestError, match=f"hold {held} of the {most}") as error:
        pin("c", 150, most)
    assert (error.value.code, error.value.param) == ("pinned_contexts_full", "context")
    core.abort("b")
    assert pin("c", 150, most) == first


def test_the_documents_name_every_counter() -> None:
    names = [*EngineInfo.__struct_fields__, *Counters.__struct_fields__]
    names += [*PrefixCounters.__struct_fields__, *TierCounters.__struct_fields__]
    text = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    table = text.partition("**Counters.**")[2].partition("**Traces.**")[0]
    assert [name for name in names if f"`{name}`" not in table] == ["prefix_folder"]


def test_a_priority_needs_the_scheduling_policy_priority(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    first = dataclasses.replace(GREEDY, priority=-1)
    with pytest.raises(RequestError, match="under scheduling_policy: priority") as error:
        core.add("a", prompt(20), first)
    assert (error.value.param, error.value.code) == ("priority", "priority_not_heard")
    core = make_core(tiny("llama"), scheduling_policy="priority", max_num_seqs=1)
    core.add("a", prompt(20), GREEDY)
    core.step()  # admitted: a place that is taken stays taken
    core.add("b", prompt(20), GREEDY)
    core.add("c", prompt(20), first)
    ended = []
    while core.has_work:
        ended += [m.id for m in core.step() if isinstance(m, Token) and m.finish]
    assert ended == ["a", "c", "b"]


def test_a_short_prompt_overtakes_a_long_one_and_answers_alike(
    tiny: Tiny,
) -> None:
    core = make_core(tiny("llama"), max_step_ms=1e6)
    alone = {}
    for name, length in (("long", 380), ("short", 30)):
        core.add(name, prompt(length), GREEDY)
        alone[name] = tokens(run(core)[name])
    core.add("long", prompt(380), GREEDY)
    core.step()  # admitted
    core.step()  # a chunk of it
    core.add("short", prompt(30), GREEDY)
    ended, answers = [], {"long": [], "short": []}
    while core.has_work:
        for message in core.step():
            if isinstance(message, Token):
                answers[message.id].append(message.token)
                ended += [message.id] * (message.finish is not None)
    assert ended == ["short", "long"]
    assert answers == alone


def test_a_request_waits_for_pages_rather_than_failing(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), attention="full", kv_tokens=200, max_num_seqs=4)
    for i in range(3):
        core.add(f"r{i}", prompt(150, i), GREEDY)
    core.step()
    assert core.scheduler.sequences == 1
    assert {name: len(tokens(m)) for name, m in run(core).items()} == {f"r{i}": 8 for i in range(3)}
    with pytest.raises(RequestError, match="on a rank") as refused:
        core.add("big", prompt(300), GREEDY)
    assert refused.value.code == "kv_capacity_exceeded"


def test_a_long_prompt_is_read_in_the_answers_steps(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*names: str) -> tuple[dict[str, list[int]], list[int]]:
        core = make_core(tiny("llama"))
        core.scheduler.prefill_policy.is_short = lambda request, _: len(request.prompt) < 100
        execute, shared = core.runner.execute, []

        def watch(plan: StepPlan) -> torch.Tensor | None:
            if isinstance(plan, Compute):
                shared.append(sum(len(entry.tokens) > 1 for entry in plan.entries))
            return execute(plan)

        monkeypatch.setattr(core.runner, "execute", watch)
        for name in names:
            core.add(name, prompt({"a": 8, "b": 30, "long": 170}[name], 1), GREEDY)
        return {name: tokens(found) for name, found in run(core).items()}, shared

    alone = [ask(name)[0] for name in ("a", "b", "long")]
    together, shared = ask("a", "b", "long")
    assert together == alone[0] | alone[1] | alone[2]
    # Two short prompts and a chunk; then chunks beside two answers.
    assert shared[0] == 3 and shared[1] == 1


def test_a_request_without_a_distribution_fails_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tiny("llama"))
    core.add("a", [5, 6, 7], GREEDY)
    alone = tokens(run(core)["a"])
    core.add("a", [5, 6, 7], GREEDY)
    core.add("b", [8, 9], GREEDY)
    runner = core.runner
    execute, bad = runner.execute, []

    def spoil(plan: StepPlan) -> torch.Tensor | None:
        logits = execute(plan)
        if isinstance(plan, Compute) and len(plan.entries) == 2 and not bad:
            assert logits is not None
            bad.append(plan)
            logits = logits.clone()
            logits[1, 3] = torch.nan
        return logits

    monkeypatch.setattr(runner, "execute", spoil)
    messages = run(core)
    assert bad
    assert tokens(messages["a"]) == alone
    assert messages["b"][-1].code == "engine_error"
    assert runner.sequences.kv_bytes == 0


def test_a_head_map_of_another_model_is_refused(tiny: Tiny) -> None:
    with pytest.raises(HeadMapError, match=r"configs|layers|fingerprint|identify"):
        make_core(tiny("llama"), attention="razor")
    shipped = Path(__file__).parents[2] / "configs" / "head_maps" / "smollm2.json"
    with pytest.raises(HeadMapError, match=r"layers|fingerprint"):
        make_core(tiny("llama"), attention="razor", head_map=str(shipped))


def test_a_context_longer_than_the_model_is_refused(tiny: Tiny) -> None:
    config = EngineConfig(model=str(tiny("llama")), attention="full", max_model_len=5000)
    with pytest.raises(ConfigError, match=r"5000, but .* 4096 positions"):
        build_engine(config, Communicator(None), torch.device("cpu"))


@pytest.mark.parametrize("shared", [False, True])
def test_caches_that_differ_from_rank_0s_account_are_an_error(tiny: Tiny, shared: bool) -> None:
    core = make_core(tiny("llama"))
    core.add("a", prompt(20), SamplingParams(temperature=0.0, max_tokens=20))
    while not core.scheduler.running:
        core.step()
    core.idle()
    pages, [sequence] = core.runner.caches.pages, core.runner.sequences.values()
    if shared:
        pages.fork(sequence.table, 8, 8)  # holds the sequence's first page, and no other
    else:
        pages.allocate(8)
    with pytest.raises(
        EngineError, match=r"rank 0 has \[\d+, \d+, 0, \d+, \d+\] pages and places free"
    ):
        core.stats()
