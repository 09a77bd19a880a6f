"""The bench of several answers at once: its arithmetic, and one small run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import pytest

from razor_dist.evals.bench import batch
from razor_dist.evals.bench.settings import BatchBenchSettings
from razor_dist.protocol.sampling_params import SamplingParams


class Clock:
    """Seconds that pass where an engine computes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Engine:
    """An `LLM` whose prompts take 3 seconds each, but for cached ones, and whose steps take 0.1."""

    clock = Clock()
    caches = True

    def __init__(self, model: str, **settings: Any) -> None:
        self._read: set[tuple[int, ...]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        assert params.max_tokens is not None and params.ignore_eos
        outputs = []
        for prompt in prompts:
            known = self.caches and tuple(prompt) in self._read
            self.clock.now += 0 if known else 3
            self._read.add(tuple(prompt))
            answer = SimpleNamespace(token_ids=[1] * params.max_tokens)
            cached = len(prompt) - 1 if known else 0
            outputs.append(SimpleNamespace(outputs=[answer], num_cached_tokens=cached))
        self.clock.now += 0.1 * params.max_tokens
        return outputs


def test_answers_are_timed_without_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "LLM", Engine)
    monkeypatch.setattr(batch, "time", Engine.clock)
    settings = BatchBenchSettings(tokens="20", new_tokens=11, answers_at_once="1,8", repeats=2)
    record = batch.run(settings)
    for engine in ("razor", "razor, int8"):
        speeds = record.figures["tokens_per_second"][engine]
        assert speeds == {1: pytest.approx(10), 8: pytest.approx(80)}
        turns = record.figures["seconds"][engine][8]
        assert [turn["whole"] for turn in turns] == [pytest.approx(8 * 3 + 1.1)] * 2
    page = record.page()
    assert "80.0 (8.00 x)" in page and "≥ 5 x" in page and "25.1" in page
    monkeypatch.setattr(Engine, "caches", False)
    with pytest.raises(AssertionError):  # what is subtracted would be prompts that are read
        batch.run(settings)


@pytest.mark.long
def test_a_run() -> None:
    settings = BatchBenchSettings(tokens="200", new_tokens=4, answers_at_once="1,2", repeats=1)
    record = batch.run(settings)
    seconds = record.figures["seconds"]
    assert seconds.keys() == {"razor", "razor, int8"}
    for turns in seconds.values():
        assert turns.keys() == {1, 2}
        assert all(turn["whole"] > 0 for [turn] in turns.values())
    assert "2 at once" in record.page()
