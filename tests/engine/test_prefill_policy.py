"""The order and the length of prefill chunks, on a simulated clock with a simulated cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Prefill
from razor_dist.engine.step_cost import StepWork
from razor_dist.protocol.sampling_params import SamplingParams
from tests.engine.simulated_prefill import CHUNK, STEP, learned, observe, prefill, request


@dataclass
class Simulation:
    """Prompts that arrive and are read by `PrefillPolicy`; every chunk takes what ``sab`` says."""

    arrivals: list[Prefill]
    sab: tuple[float, float, float] = (0.05, 0.002, 0.0)
    now: float = 0.0
    finished: dict[int, float] = field(default_factory=dict)  # when, by key
    # Of every chunk: the key, its seconds, whether others waited, its tokens.
    chunks: list[tuple[int, float, bool, int]] = field(default_factory=list)
    by_priority: bool = False
    joining: bool = False  # short prompts join the steps of a long one

    def run(self) -> Simulation:
        policy = PrefillPolicy(STEP, by_priority=self.by_priority)
        coming, present = sorted(self.arrivals, key=lambda p: p.request.arrived), []
        while coming or present:
            if not present:
                self.now = max(self.now, coming[0].request.arrived)
            while coming and coming[0].request.arrived <= self.now:
                present.append(coming.pop(0))
            self._step(policy, present)
        return self

    def _step(self, policy: PrefillPolicy, present: list[Prefill]) -> None:
        short = [prompt for prompt in present if self.joining and policy.joins(prompt)]
        long = [prompt for prompt in present if prompt not in short]
        chosen, joined = policy.together(short, part=0.5 if long else 1.0)
        step = [(prompt, prompt.end) for prompt in chosen]
        if long:
            first = policy.choose(long)
            others = [prompt for prompt in present if prompt is not first]
            tokens = max(2, int(policy.take(first, others, joined=joined)[0]))
            step.append((first, min(tokens, first.end - first.position)))
        s, a, b = self.sab
        seconds = s + sum(a * n + b * n * (of.position + n / 2) for of, n in step)
        self.now += seconds
        read = sum(n for _, n in step)
        for of, n in step:
            policy.took(long, of, seconds * n / read)
            self.chunks.append((of.key, seconds * n / read, len(present) > 1, n))
        policy.learn([(of, n, True) for of, n in step], seconds)
        for of, n in step:
            of.position += n
            if of.done:
                present.remove(of)
                self.finished[of.key] = self.now


def test_short_prompts_overtake_a_long_one_and_cost_it_their_own_time() -> None:
    def long() -> Prefill:
        return prefill(0, 40_000, 0.0)

    alone = Simulation([long()]).run().finished[0]
    shorts = [prefill(key, 50, 10.0 + 4 * key) for key in range(1, 11)]
    together = Simulation([long(), *shorts]).run()
    waits = [together.finished[r.key] - r.request.arrived for r in shorts]
    # Its own 0.15 s, and what is left of a lone prompt's chunk that had begun before it came.
    assert max(waits) <= 4 * STEP + 0.15 + 0.01
    assert together.finished[0] <= alone + 10 * (0.15 + STEP)


def test_shorts_that_come_together_are_served_in_between_chunks_of_one_step() -> None:
    shorts = [prefill(key, 50, 5.0) for key in range(1, 21)]
    found = Simulation([prefill(0, 40_000, 0.0), *shorts]).run()
    waits = sorted(found.finished[r.key] - 5.0 for r in shorts)
    # After the chunk that had begun, one of 0.15 s and one of the long prompt in turn.
    assert waits[-1] <= 4 * STEP + 0.01 + 20 * (0.15 + STEP * 1.2)
    contended = [seconds for key, seconds, waited, _ in found.chunks if key == 0 and waited]
    assert max(contended) <= STEP * 1.1


def beside_chats(until: float, came: float) -> float:
    """Seconds that 2,000 tokens wait that come beside 400,000, with chats for half of the time."""
    chats = [prefill(key, 300, 0.3 * key) for key in range(2, int(until / 0.3))]
    prompts = [prefill(0, 400_000, 0.0), prefill(1, 2000, came), *chats]
    found = Simulation(prompts, (0.03, 0.0005, 0.0), joining=True).run()
    assert max(found.finished[chat.key] - chat.request.arrived for chat in chats) < 6 * STEP
    return found.finished[1] - came


def test_prompts_that_join_steps_take_nobodys_turn() -> None:
    """The oldest has a piece in the same step: it is owed nothing for what joined."""
    assert beside_chats(until=100.0, came=50.0) < 8.0
    assert beside_chats(until=100.0, came=105.0) < 2 * (1 + STEP)


def test_a_lone_prompts_chunk_is_longer_where_every_step_costs_much() -> None:
    # A step costs 0.2 s: 5 % of what 20 such take, and so chunks are of 4 s, not of 1 s, once that
    # is known, but not before the prompt has been alone for 16 s.
    # Every other one is shorter, so that it stays known.
    for cost, long, short in ((0.2, 1900, 1300), (0.05, 475, 325)):
        found = Simulation([prefill(0, 60_000, 0.0)], sab=(cost, 0.002, 0.0)).run()
        lengths = sorted(chunk[3] for chunk in found.chunks[-6:-2])
        assert lengths == pytest.approx([short, short, long, long], rel=0.1)
        spent = found.chunks[0][1]
        for _, seconds, _, _ in found.chunks[1:]:
            assert seconds <= max(4 * STEP, spent / 4) * 1.15
            spent += seconds


def test_one_request_a_minute_does_not_make_chunks_short() -> None:
    def waited(*arrivals: float) -> tuple[list[float], list[float]]:
        """Return short prompts' waits, and the long one's chunks after the first came."""
        shorts = [prefill(key, 50, at) for key, at in enumerate(arrivals, 1)]
        found = Simulation([prefill(0, 150_000, 0.0), *shorts], sab=(0.2, 0.002, 0.0)).run()
        ends = np.cumsum([seconds for _, seconds, _, _ in found.chunks])
        steps = zip(ends, found.chunks, strict=True)
        late = [s for end, (key, s, _, _) in steps if key == 0 and arrivals[0] + 10 < end < 300]
        return [found.finished[r.key] - r.request.arrived for r in shorts], late

    _, chunks = waited(*(60.0 * n for n in range(1, 6)))
    # 0.2 s is 5 % of 4 s; beside such chunks, one of each minute is shared and short.
    assert np.quantile(chunks, 0.2) > 2.5
    assert max(chunks) <= 4.6
    # Who comes often does not wait that long, from the second time on.
    waits, _ = waited(*(60.0 + 5 * n for n in range(1, 12)))
    assert max(waits[2:]) <= 0.3 + 5 / 4 * 1.15 + STEP


def test_a_prompt_is_short_if_all_ranks_may_as_well_read_it() -> None:
    def short(tokens: int, ranks: int) -> bool:
        return learned(ranks).is_short(request(0, tokens, 0.0), 0)

    # Alone, whatever fits into a step; of several ranks all but one repeat 2 ms a token, which a
    # step of its own would cost 0.05 s.
    for ranks, most in ((1, 187), (2, 24), (4, 8), (8, 3)):
        assert [short(n, ranks) for n in (1, most, most + 2)] == [True, True, False]
    explained = request(0, 5, 0.0, params=SamplingParams(prompt_logprobs=0))
    policy = learned()
    assert not policy.is_short(explained, 0)
    assert not policy.is_short(request(0, 5, 0.0, chunked_prefill_size=4), 0)
    assert not PrefillPolicy(math.inf).is_short(request(0, 513, 0.0), 0)


def test_what_stays_sharded_is_not_repeated() -> None:
    """Each rank reads a question itself, but attends to its own part of a million tokens before."""
    policy = PrefillPolicy(STEP, 8)
    for tokens, context in ((1000, 0), (4000, 500_000), (2000, 10**6), (500, 10**5)) * 15:
        policy.cost.learn(StepWork(answers=0), 0.01)
        seconds = 0.03 + 5e-5 * tokens + 8e-10 * tokens * (context + tokens / 2)
        observe(policy.cost, tokens, context, seconds, chunk=1)
    prefix = request(0, 10**6, 0.0, max_tokens=0)
    for tokens, short in ((10, True), (50, True), (100, False)):
        question = request(1, tokens, 0.0, prefix=prefix)
        assert policy.is_short(question, prefix.end) is short  # 7 times 50 us a token, of 20 ms


def test_prompts_share_a_step_as_far_as_it_goes() -> None:
    prompts = [prefill(key, 50, 0.0) for key in range(5)]
    for ranks in (1, 2, 8):
        # 0.1 s each, of several ranks 0.15 s, in chunks; on one rank also if they are short.
        many, one = (1, 0.15) if ranks > 1 else (2, 0.1)
        found = learned(ranks).together(prompts)
        assert found == (prompts[:many], pytest.approx(many * one, rel=0.01))
        assert learned(ranks).together(prompts, part=0.5)[0] == prompts[:1]  # beside a chunk
    short = [prefill(key, 50, 0.0, short=True) for key in range(5)]
    assert learned(1).together(short)[0] == short[:2]
    assert learned(2).together(short)[0] == short[:1]  # 0.2 s each
    policy = learned(8)
    assert policy.together([prefill(0, 4000, 0.0)])[0] != []  # one at least
    assert policy.together([]) == ([], 0)
    urgent = PrefillPolicy(STEP, by_priority=True)
    first = prefill(9, 50, 0.0, priority=-1)
    assert urgent.together([*prompts, first])[0] == [first]


def test_a_chunk_takes_the_time_that_joining_prompts_leave() -> None:
    policy, long = learned(), prefill(0, 40_000, 0.0)
    # Of 0.25 s, 0.05 are for the step, and 2 ms for each token; at least half is for the chunk.
    for joined, tokens in ((0.0, 100), (0.1, 50), (0.25, 37.5), (9.0, 37.5)):
        found, _ = policy.take(long, [], answering=[0], joined=joined)
        assert found == pytest.approx(tokens, rel=0.02)


def test_a_chunk_beside_prompts_that_join_every_step_stays_as_long() -> None:
    """Recent steps show what fits into a whole one, not into what is left of it."""
    policy, long, read = learned(), prefill(0, 40_000, 0.0), []
    for key in range(1, 101):
        chats = [prefill(key, 50, 0.0)]
        _, joined = policy.together(chats)
        tokens = int(policy.take(long, chats, joined=joined)[0])
        parts = [(chats[0], 50, True), (long, tokens, True)]
        policy.learn(parts, 0.05 + 0.002 * (50 + tokens))
        read.append(tokens)
    assert np.median(read) == pytest.approx(50, rel=0.1)


def test_chunks_of_several_prompts_in_a_step_cost_as_many() -> None:
    policy, random = PrefillPolicy(STEP, 8), np.random.default_rng(0)

    def step(prompts: list[Prefill]) -> float:
        seconds = 0.003 + sum(0.03 + 5.6e-6 * prompt.end for prompt in prompts)
        policy.learn([(prompt, prompt.end, True) for prompt in prompts], seconds)
        return seconds

    def some(count: int, least: int, most: int) -> list[Prefill]:
        return [prefill(key, int(random.integers(least, most)), 0.0) for key in range(count)]

    for _ in range(40):
        policy.learn([], 0.003)
        step(some(1, 600, 4000))
    for _ in range(20):
        joining, seconds = policy.together(some(12, 513, 700))
        assert seconds <= STEP
        assert step(joining) == pytest.approx(seconds, rel=0.1)
        assert policy.cost.chunk == pytest.approx(0.03, rel=0.1)
    assert policy.is_short(request(0, 512, 0.0), 0)


def test_prompts_that_join_a_step() -> None:
    policy = learned(2)
    assert policy.joins(prefill(0, 187, 0.0)) and not policy.joins(prefill(0, 189, 0.0))  # 0.375 s
    begun = prefill(0, 100, 0.0)
    begun.advance(50)
    assert not policy.joins(begun)
    assert policy.joins(prefill(0, 200, 0.0, short=True))
    assert not policy.joins(prefill(0, 100, 0.0, chunked_prefill_size=99))
    fast = PrefillPolicy(math.inf, 2)
    assert fast.joins(prefill(0, 1024, 0.0)) and not fast.joins(prefill(0, 1025, 0.0))


def test_long_prompts_are_not_cut_for_each_other() -> None:
    found = Simulation([prefill(key, 20_000, 0.0) for key in range(4)]).run()
    usual = [seconds for _, seconds, _, tokens in found.chunks[1:] if tokens > 300]
    assert np.median(usual) == pytest.approx(4 * STEP, rel=0.1)
    # They are read one after the other, but for the oldest's half of the time.
    assert sorted(found.finished.values()) == pytest.approx([42, 84, 126, 168], rel=0.2)
    policy = learned()
    answered = policy.take(prefill(0, 20_000, 0.0), [], answering=[0])[0]
    assert answered == pytest.approx(100, abs=1)


def test_a_lone_prompt_is_not_cut_into_more_chunks_beside_other_programs() -> None:
    policy, quiet, long = learned(), learned(), prefill(0, 20_000, 0.0)
    policy.slowdown = 4.0
    for beside in ([], [0]):  # nothing else to do, and one sequence that decodes
        slowed = policy.take(long, [], answering=beside)[0]
        usual = quiet.take(long, [], answering=beside)[0]
        # While something waits for the step, it takes `max_step`, whatever slows it down.
        assert slowed == pytest.approx(usual if beside else 4 * usual, rel=0.1)


arrivals = st.lists(
    st.tuples(st.integers(1, 20_000), st.floats(0, 60)), min_size=1, max_size=12
).map(lambda found: [prefill(key, n, at) for key, (n, at) in enumerate(found)])


@settings(max_examples=60, deadline=None)
@given(arrivals)
def test_nobody_starves_and_work_is_conserved(prompts: list[Prefill]) -> None:
    found = Simulation(prompts).run()
    assert found.finished.keys() == {prompt.key for prompt in prompts}
    for prompt in prompts:
        assert sum(n for key, _, _, n in found.chunks if key == prompt.key) == prompt.end
    # The clock stands still only when there is nothing to read.
    busy = sum(seconds for _, seconds, _, _ in found.chunks)
    last = max(prompt.request.arrived for prompt in prompts)
    assert found.now <= last + busy + 1e-6


@settings(max_examples=60, deadline=None)
@given(arrivals)
def test_the_oldest_gets_at_least_half_of_the_time(prompts: list[Prefill]) -> None:
    """Counted from when it becomes the oldest until it is read, and short of half by one step."""
    turns_of = Simulation(prompts).run()
    present: dict[int, Prefill] = {p.key: p for p in prompts}
    now, own, others, oldest = 0.0, 0.0, 0.0, -1
    for key, seconds, _, _ in turns_of.chunks:
        here = [p for p in present.values() if p.request.arrived <= now] or [present[key]]
        now = max(now, present[key].request.arrived)
        first = min(here, key=lambda p: (p.request.arrived, p.key))
        if first.key != oldest:
            own, others, oldest = 0.0, 0.0, first.key
        if key == oldest:
            own += seconds
        else:
            others += seconds
            longest = max(seconds, STEP * 2, 0.05 + 0.002 * CHUNK)
            assert others <= own + longest + 1e-9
        now += seconds
        if abs(now - turns_of.finished[key]) < 1e-6:
            del present[key]


def test_priority_goes_before_everything_else() -> None:
    prompts = [prefill(0, 9_000, 0.0, priority=1), prefill(1, 9_000, 1.0, priority=0)]
    found = Simulation(prompts, by_priority=True).run()
    begun = next(i for i, (key, *_) in enumerate(found.chunks) if key == 1)
    assert begun == 1  # after the chunk that had begun
    assert [key for key, *_ in found.chunks[begun:]][:3] == [1, 1, 1]
    assert found.finished[1] < found.finished[0]


def test_ranks_that_share_read_a_long_prompt_without_chunks_beside_others() -> None:
    long, policy = prefill(0, 40_000, 0.0), learned(2, shared=True)
    # Of 0.25 s, 0.05 are for the step, and would be as many for a chunk.
    assert policy.take(long, [], answering=[0]) == (pytest.approx(100, rel=0.02), False)
    assert learned(2).take(long, [], answering=[0]) == (pytest.approx(75, rel=0.02), True)
    assert policy.take(long, [prefill(1, 50, 0.0)])[1] is False
    assert policy.take(long, [])[1] and policy.take(long, [prefill(1, 9_000, 0.0)])[1]
    assert learned(1, shared=True).take(long, [], answering=[0])[1]
    fast = PrefillPolicy(math.inf, 2, shared=True)
    # Every other piece is shorter, so that it shows what each costs whatever its length.
    assert [fast.take(long, [], answering=[0]) for _ in "ab"] == [(0.7 * 512, False), (512, False)]
