"""The benches of the prefix cache and of sources at small sizes: counts, and right answers."""

from __future__ import annotations

import itertools
import random

import pytest

from razor_dist.evals.bench import prefix, sources
from razor_dist.evals.bench.settings import PrefixBenchSettings, SourcesBenchSettings


def most_hits(trace: list[int], room: int, held: frozenset[int] = frozenset()) -> int:
    """Try every choice of what to keep."""
    if not trace:
        return 0
    first, *rest = trace
    kept = held | {first}
    choices = [kept] if len(kept) <= room else map(frozenset, itertools.combinations(kept, room))
    return (first in held) + max(most_hits(rest, room, choice) for choice in choices)


def test_belady_is_the_most_that_any_choice_gets() -> None:
    for seed in range(20):
        trace = random.Random(seed).choices(range(4), k=9)
        for room in (1, 2, 3):
            assert prefix.belady(trace, room) == most_hits(trace, room)


def test_hits_under_load_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_REQUESTS", 30)
    figures = prefix.run(PrefixBenchSettings(load="zipf")).figures
    assert 0 < figures["hits"] <= figures["optimum"] < 30


@pytest.mark.long
def test_a_store_answers_after_a_kill() -> None:
    record = prefix.run(PrefixBenchSettings(load="needle", tokens="1500"))
    assert record.figures["same_after_the_kill"] and record.figures["right"] == 6
    cached = [answer["cached_tokens"] for answer in record.figures["answers"]]
    assert cached[0] == 0 and min(cached[1:]) > 1400
    assert record.figures["disk"]["bytes"] > 0 and "after a kill, question 3" in record.page()


@pytest.mark.long
def test_handles_after_a_kill_and_pins_that_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    record = prefix.run(PrefixBenchSettings(load="needle-contexts", tokens="1500"))
    cached = [answer["cached_tokens"] for answer in record.figures["answers"]]
    assert record.figures["same"] and cached[0] == 0 and min(cached[1:]) > 1400
    monkeypatch.setattr(prefix, "_PINS", 4)
    monkeypatch.setattr(prefix, "_ROUNDS", 1)
    monkeypatch.setattr(prefix, "wait_until", lambda *_: True)  # not for the expiry
    [_, row] = prefix.run(PrefixBenchSettings(load="pins")).figures["rounds"]
    assert row["kept"] == 4 and row["kv of them"] > 0


@pytest.mark.long
def test_the_cost_of_sources_is_of_as_many_tokens() -> None:
    record = sources.run(SourcesBenchSettings(tokens="60", new_tokens=4, repeats=1))
    figures = record.figures
    assert figures["token_cost"] == figures["token_ms_sources"] / figures["token_ms"] - 1
