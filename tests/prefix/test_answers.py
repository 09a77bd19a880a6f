"""The engine with a prefix cache: whatever is found in it, answers are those of a fresh read."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Failed, Progress
from razor_dist.protocol.step_plan import StepPlan
from tests.engine.cores import make_core, prompt, run
from tests.prefix.engines import END, GREEDY, Ask, alone, assert_alike, engine_of, ids, serve
from tests.ranks import Ranks
from tests.tiny_models import Tiny


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
def test_questions_turns_and_documents_that_share_a_half(
    world: int, ranks: Ranks, tiny: Tiny
) -> None:
    path, document = tiny("qwen2"), (1, 150)
    asks = [Ask(f"q{n}", ids(document, (10 + n, 12))) for n in range(3)]
    first = ranks(1).run(serve, str(path), {"prefix_cache": False}, tuple(asks))[0][0]["q2"]
    turn = (*asks[-1].ids, *(token for token, _ in first))
    asks.append(Ask("turn", (*turn, *ids((20, 9)))))
    # The third that begins with this half finds it, for the second has left it there.
    asks += [Ask(f"half{n}", ids((2, 90), (30 + n, 60))) for n in range(3)]
    asks.append(Ask("again", asks[0].ids))
    roomy = {"max_num_seqs": 12}
    answers, cached, stats = ranks(world).run(serve, str(path), roomy, tuple(asks))[0]
    assert_alike(answers, alone(ranks, path, tuple(asks)))
    assert [cached[f"q{n}"] for n in range(3)] == [0, 150, 150]
    assert cached["turn"] == len(turn) - 1  # an answer's last token is sampled and never read
    assert cached["half0"] == cached["half1"] == 0
    assert 90 - 2 * world < cached["half2"] <= 90
    assert cached["again"] == 161
    found = stats["prefix_cache"]
    assert (found["queries"], found["hits"]) == (8, 5)
    assert found["hit_tokens"] == sum(cached.values())
    assert found["evictions"] == 0 and min(found["bytes_per_rank"]) > 0


@pytest.mark.parametrize("pin", [False, True])
def test_a_copy_can_be_cut_no_further_back_than_its_source(
    pin: bool, ranks: Ranks, tiny: Tiny
) -> None:
    """``b`` copies a cut of ``a``, which is in use; ``c`` needs a cut that neither has."""
    path, document = tiny("llama"), ids((1, 65))
    params = dataclasses.replace(GREEDY, max_tokens=30)
    asks = (
        Ask("a", document, params, pin=pin, wait=pin),
        Ask("meanwhile", ids((5, 20)), steps=8, wait=False),
        Ask("b", document[:50] + ids((2, 3))),
        Ask("c", document[:34] + ids((3, 3))),
    )
    answers, cached, _ = ranks(1).run(serve, str(path), {"prefix_tail_tokens": 24}, asks)[0]
    assert_alike(answers, alone(ranks, path, asks))
    assert (cached["b"], cached["c"]) == (50, 0)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_conversations_part_where_a_message_ends(world: int, ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    system, first = ids((1, 90)) + END, ids((2, 80)) + END
    asks = (
        Ask("a", system + first + ids((11, 100))),
        Ask("b", system + ids((12, 150))),
        Ask("c", system + first + ids((13, 120))),
        Ask("d", system + ids((14, 60))),
    )
    answers, cached, stats = ranks(world).run(serve, str(path), {"max_num_seqs": 12}, asks)[0]
    assert_alike(answers, alone(ranks, path, asks))
    ends = {"a": 0, "b": 91, "c": 172, "d": 91}
    assert all(ends[name] - 2 * world < n <= ends[name] for name, n in cached.items()), cached
    assert stats["prefix_cache"]["evictions"] == 0
    # Where there is no room to spare, copies that nobody asked for are not made.
    tight = {"max_num_seqs": 1, "max_model_len": 300}
    _, cached, stats = ranks(world).run(serve, str(path), tight, asks[:1])[0]
    assert stats["prefix_cache"]["entries"] == 1


@pytest.mark.parametrize("world", [1, 2])
def test_prompts_that_come_together_read_what_they_share_once(
    world: int, ranks: Ranks, tiny: Tiny
) -> None:
    path = tiny("llama")
    asks = (
        *(Ask(f"q{n}", ids((1, 120), (10 + n, 12)), wait=False) for n in range(3)),
        *(Ask(f"h{n}", ids((2, 70), (20 + n, 80)), wait=False) for n in range(3)),
    )
    answers, cached, _ = ranks(world).run(serve, str(path), {}, asks)[0]
    assert_alike(answers, alone(ranks, path, asks))
    assert [cached[f"q{n}"] for n in range(3)] == [0, 120, 120]
    assert cached["h0"] == 0
    assert all(70 - 2 * world < cached[f"h{n}"] <= 70 for n in (1, 2))


def test_salts_and_exact_prefill_share_nothing(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    salts = {"a": None, "b": "x", "c": "y", "d": "x"}
    asks = tuple(Ask(name, ids((1, 100)), salt=salt) for name, salt in salts.items())
    answers, cached, _ = ranks(1).run(serve, str(path), {}, asks)[0]
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 99}
    assert_alike(answers, alone(ranks, path, asks))
    exact = {"prefill": "exact"}
    answers, cached, stats = ranks(1).run(serve, str(path), exact, asks)[0]
    assert set(cached.values()) == {0} and stats["prefix_cache"]["entries"] == 0
    assert_alike(answers, alone(ranks, path, asks, **exact))


def test_a_long_answer_leaves_its_prompts_end(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    long = dataclasses.replace(GREEDY, max_tokens=60)
    asks = (Ask("a", ids((1, 100)), params=long), Ask("b", ids((1, 100), (2, 9))))
    answers, cached, _ = ranks(1).run(serve, str(path), {}, asks)[0]
    assert cached["b"] == 100
    assert_alike(answers, alone(ranks, path, asks))


def test_long_and_short_frequencies_are_kept_apart(ranks: Ranks, tiny: Tiny) -> None:
    """phi3's keys depend on whether the sequence may grow beyond 64 tokens (LongRoPE)."""
    path = tiny("phi3")
    short = dataclasses.replace(GREEDY, max_tokens=4)
    asks = (
        Ask("short", ids((1, 40)), params=short),
        Ask("long", ids((1, 40), (2, 60))),
        Ask("short again", ids((1, 40), (3, 5)), params=short),
        Ask("long again", ids((1, 40), (2, 60), (3, 5))),
    )
    answers, cached, _ = ranks(1).run(serve, str(path), {}, asks)[0]
    assert_alike(answers, alone(ranks, path, asks))
    assert (cached["long"], cached["short again"], cached["long again"]) == (0, 40, 100)


def test_an_answer_that_is_fitted_into_the_caches_has_the_frequencies_of_its_length(
    tiny: Tiny,
) -> None:
    """From 97 tokens on they are those of long texts: of the 140 that it may have, fewer fit."""
    core = engine_of(Communicator(None), str(tiny("phi3")), {"kv_tokens": 60}).core
    fitted = dataclasses.replace(GREEDY, max_tokens=100, fit_max_tokens=True)
    short = dataclasses.replace(GREEDY, max_tokens=4)
    for name, params in (("fitted", fitted), ("short", short)):
        core.add(name, ids((1, 40)), params)
    first, second = core.scheduler.waiting
    assert second.total < first.total < 97
    assert first.namespace == second.namespace


@pytest.mark.parametrize("world", [1, 2])
def test_a_prompt_takes_the_place_of_what_it_continues(
    world: int, ranks: Ranks, tiny: Tiny
) -> None:
    """In caches that hold one sequence there is no room for another beside it.

    One that is aborted as soon as it is admitted, or after a chunk, leaves what it continued.
    """
    path, one = tiny("llama"), {"max_num_seqs": 1, "max_model_len": 200, "chunked_prefill_size": 8}
    steps = {2: 1, 4: 2}
    asks = tuple(Ask(f"q{n}", ids((1, 150), (10 + n, 20)), steps=steps.get(n)) for n in range(6))
    answers, cached, stats = ranks(world).run(serve, str(path), one, asks)[0]
    assert_alike(answers, alone(ranks, path, asks, **one))
    assert cached == {"q0": 0} | {f"q{n}": 150 for n in range(1, 6)}
    assert stats["prefix_cache"]["evictions"] == 0


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_an_aborted_prompt_leaves_what_was_read(world: int, ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    text = ids((1, 380))
    asks = (
        Ask("gone", text, steps=6),
        Ask("again", text, dataclasses.replace(GREEDY, max_tokens=4)),
    )
    answers, cached, _ = ranks(world).run(serve, str(path), {}, asks)[0]
    assert_alike(answers, alone(ranks, path, asks))
    assert (
        cached["gone"] == 0 and 64 <= cached["again"] < 300 and cached["again"] % (2 * world) == 0
    )


def test_a_request_that_failed_leaves_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(tiny("llama"), prefix_cache=True)
    execute = core.runner.execute

    def spoil(plan: StepPlan) -> torch.Tensor | None:
        logits = execute(plan)
        return None if logits is None else torch.full_like(logits, torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "execute", spoil)
        core.add("a", prompt(100), GREEDY)
        assert isinstance(run(core)["a"][-1], Failed)
    assert core.stats().prefix_cache.entries == 0
    core.add("b", prompt(100), GREEDY)
    assert {m.cached for m in run(core)["b"] if isinstance(m, Progress)} == {0}


def test_a_hit_above_a_thousand_tokens_is_logged(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    asks = (Ask("a", ids((1, 1100))), Ask("b", ids((1, 1100), (2, 3))))
    with caplog.at_level(logging.INFO, "razor_dist.prefix.device"):
        serve(Communicator(None), str(tiny("llama")), {"max_model_len": 1200}, asks)
    told = [r.message for r in caplog.records if r.name == "razor_dist.prefix.device"]
    assert told == ["1100 of 1103 prompt tokens are cached"]


def test_prompts_begin_alike_beside_all_prefixes_that_may_be_pinned(tiny: Tiny) -> None:
    """Also with one sequence, which may have as many as four."""
    for sequences, most in ((1, 4), (2, 4), (4, 8)):
        pins = tuple(Ask(f"p{n}", ids((n, 5)), pin=True) for n in range(most))
        asks = tuple(Ask(f"q{n}", ids((50, 90), (60 + n, 9))) for n in range(4))
        changed = {"max_num_seqs": sequences}
        _, cached, _ = serve(Communicator(None), str(tiny("llama")), changed, pins + asks)
        assert [cached[ask.name] for ask in asks] == [0, 90, 90, 90]


def test_what_a_pinned_prefix_has_is_not_counted_as_found(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    doc = Ask("doc", ids((1, 1100)), pin=True)
    asks = (doc, *(Ask(name, ids((2, 21)), prefix="doc") for name in ("a", "b")))
    with caplog.at_level(logging.INFO, "razor_dist.prefix.device"):
        changed = {"max_model_len": 1200}
        _, cached, stats = serve(Communicator(None), str(tiny("llama")), changed, asks)
    said = [record for record in caplog.records if record.name == "razor_dist.prefix.device"]
    assert cached["b"] == 1100 + 20 and said == []
    found = stats["prefix_cache"]
    assert (found["query_tokens"], found["hit_tokens"]) == (1100 + 21 + 21, 20)
