"""Measured costs of steps, and the length of a prompt's chunks beside answers."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Answer
from razor_dist.engine.step_cost import StepCost, StepWork
from tests.engine.simulated_prefill import STEP, SimulatedStep, observe, on_eight_h200, prefill


@settings(max_examples=50, deadline=None)
@given(
    st.floats(1e-4, 0.5),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e-6),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 10**6)), min_size=12, max_size=40),
)
def test_costs_are_learnt(s: float, a: float, b: float, steps: list[tuple[int, int]]) -> None:
    """After some steps, an estimate of one of them is right within a tenth."""
    cost = StepCost()

    def true(n: int, c: int) -> float:
        return s + a * n + b * n * (c + n / 2)

    for n, c in steps * 3:
        observe(cost, n, c, true(n, c))
    for n, c in steps[-5:]:
        assert cost.seconds(n, c) == pytest.approx(true(n, c), rel=0.1)


def test_chunks_of_about_one_length_tell_what_each_costs_anyway() -> None:
    """The machine's speed varies by more than the 0.05 of 2.05 s that are to be found."""
    cost, speeds = StepCost(), np.random.default_rng(0).uniform(0.7, 1.4, 60)
    cost.learn(StepWork(answers=1), 0.03)
    for speed, tokens in zip(speeds, (900, 1100) * 30, strict=True):
        observe(cost, tokens, 0, speed * (0.05 + 0.002 * tokens))
    assert cost.seconds(0, 0) <= 0.091
    assert cost.seconds(1000, 0) == pytest.approx(2.05, rel=0.1)


def test_chunks_stay_long_when_every_step_becomes_slow() -> None:
    """Another program may slow the machine: a step then costs much, and each token little more."""
    policy, random = PrefillPolicy(STEP), np.random.default_rng(0)

    def cuts(s: float, a: float) -> int:
        """Read a hundred prompts of 94 tokens beside an answer; return how often one was cut."""
        count = 0
        for key in range(100):
            prompt = prefill(key, 94, 0)
            policy.cost.learn(StepWork(answers=1), s * random.uniform(0.8, 1.2))
            while not prompt.done:
                left = prompt.end - prompt.position
                tokens = min(left, max(2, int(policy.take(prompt, [], answering=[0])[0])))
                seconds = random.uniform(0.8, 1.2) * (s + a * tokens)
                observe(policy.cost, tokens, prompt.position, seconds)
                prompt.position += tokens
                count += tokens < left
        return count

    assert cuts(0.08, 0.002) < 10
    assert cuts(2.0, 0.004) < 10
    assert cuts(0.08, 0.002) < 40
    assert policy.cost.seconds(80, 0) == pytest.approx(0.24, rel=0.25)


def seconds_of(steps: list[SimulatedStep]) -> float:
    return sum(step.seconds for step in steps)


@pytest.mark.parametrize("eager", [0.01, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("answers", [1, 8])
@pytest.mark.parametrize("max_step", [0.25, 0.3, 0.5, 1.0])
def test_answers_do_not_cut_a_million_tokens_into_small_pieces(
    max_step: float, answers: int, eager: float
) -> None:
    """With CUDA graphs: it would be 2,049 pieces of 512 tokens, and 160 s with an eager 50 ms.

    Nor does an answer wait for much longer than ``max_step`` because cuDNN's blocks, which begin
    at 262,144 tokens, are faster than all before.
    """
    alone = seconds_of(on_eight_h200(1 << 20, 0, eager, max_step))
    beside = on_eight_h200(1 << 20, answers, eager, max_step)
    assert alone <= 36
    assert seconds_of(beside) <= 1.2 * alone
    assert len(beside) < 200
    longest = sorted(step.seconds for step in beside)
    assert longest[-4] <= 1.2 * max_step and longest[-1] <= 1.5 * max_step
    assert seconds_of(on_eight_h200(1 << 17, answers, eager, max_step)) < 2.0


def test_what_answers_cost_is_not_put_down_to_the_prompt_beside_them() -> None:
    """Nor is the fixed cost of a chunk: chunks would become ever shorter."""
    policy, random = PrefillPolicy(STEP, 2), np.random.default_rng(0)

    def noise() -> float:
        return random.uniform(0.9, 1.1)

    for _ in range(8):
        policy.cost.learn(StepWork(answers=1), 0.09 * noise())
        observe(policy.cost, 2000, 4000, 5.33 * noise(), 1)
    long, lengths = prefill(0, 40_000, 0.0), []
    for answers in [1, 2, 4, 6, 8, 9] + [9] * 60:
        tokens, sharded = policy.take(long, [], answering=[0] * answers)
        assert sharded
        seconds = (0.08 + 0.25 + 0.01 * answers + 0.0024 * tokens) * noise()
        policy.cost.learn(StepWork(1, 1, 0, answers, 0, tokens, 4000 * tokens), seconds)
        lengths.append(tokens)
    # 0.17 s are answers, and 0.25 the chunk's: it has 0.42 s of its own, or 0.7 times that.
    assert np.median(lengths[-40:]) == pytest.approx(150, rel=0.25)
    assert min(lengths[-40:]) > 60


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_answers_do_not_starve_a_prompt(ranks: int) -> None:
    """40 answers of 8 ms each take more of a step than the prompt may, and are not the prompt's."""
    policy, random = PrefillPolicy(STEP, ranks), np.random.default_rng(0)
    running = [mock.Mock(spec=Answer, length=1000) for _ in range(40)]
    prompt, steps = prefill(0, 7000, 0.0), 0
    for _ in range(20):
        policy.learn([(answer, 1, False) for answer in running], 0.08 + 40 * 0.008)
    # A chunk that nobody waited for is four times as long as those beside answers may be.
    policy.learn([(prompt, 475, True)], 1.0)
    while not prompt.done:
        tokens, sharded = policy.take(prompt, [], answering=[1000] * 40)
        n = min(max(2, int(tokens)), prompt.end - prompt.position)
        seconds = (0.08 + 40 * 0.008 + 0.002 * n) * random.uniform(0.9, 1.1)
        policy.learn([(prompt, n, sharded), *((answer, 1, False) for answer in running)], seconds)
        prompt.position += n
        steps += 1
    # 0.25 s are 85 to 125 tokens, and so 56 to 82 steps. It was 3,500 of two tokens.
    assert steps < 110


def test_a_chunk_takes_what_it_may() -> None:
    cost = StepCost()
    for n, c in [(64, 0), (512, 512), (2048, 4096), (128, 9000), (32, 100)] * 4:
        observe(cost, n, c, 0.05 + 0.002 * n + 1e-7 * n * (c + n / 2))
    assert cost.work(int(cost.tokens(0.25, 4000)), 4000) == pytest.approx(0.25, rel=0.02)


def test_the_first_chunk_of_a_prompt_is_bounded_if_attention_seems_to_take_all_the_time() -> None:
    """As at the end of a long text, of which a chunk takes longer than in proportion to it."""
    cost = StepCost()
    for context in range(100_000, 600_000, 8192):
        observe(cost, 8192, context, 1e-14 * 8192 * context**2)
    assert cost.work(cost.tokens(0.25, 0), 0) == pytest.approx(0.25)
