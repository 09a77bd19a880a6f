"""Drafts by lookup: their source, their length, and the setting `speculative_config`."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import load_config
from razor_dist.config.speculative import SpeculativeConfig
from razor_dist.engine.drafts import Drafts, HitRates, Lookup, Ngram
from razor_dist.engine.ngram_index import NgramIndex
from razor_dist.engine.step_cost import StepCost, StepWork
from razor_dist.kernels.linear import ALIKE
from razor_dist.parallel.zigzag import Chunk
from razor_dist.protocol.step_plan import Compute, StepPlan
from tests.engine import pages_only

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def best_match(tokens: list[int], n: int, longest: int) -> tuple[int, int]:
    """`NgramIndex.find`, by comparing with every earlier place."""
    best = (0, -1)
    for end in range(len(tokens) - 1):
        backwards = zip(tokens[end::-1], reversed(tokens), strict=False)
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], backwards)
        length = min(longest, len(list(alike)))
        if length >= n:
            best = max(best, (length, end + 1))
    return (best[1], best[0]) if best[0] else (-1, 0)


@settings(max_examples=200, deadline=None)
@given(prompt=TEXTS, answer=TEXTS, n=st.integers(1, 3), longest=st.integers(3, 9))
def test_the_index_finds_the_longest_and_latest_match(
    prompt: list[int], answer: list[int], n: int, longest: int
) -> None:
    index, tokens = NgramIndex(np.array(prompt, np.int32), n), list(prompt)
    for token in [*answer, None]:
        at, length = index.find(longest)
        want_at, want_length = best_match(tokens, n, longest)
        # Only the latest 16 places are compared: with four tokens there may be more.
        assert length <= want_length and (length == 0) == (want_length == 0)
        ends = [
            e for e in range(n - 1, len(tokens) - 1) if tokens[e - n + 1 : e + 1] == tokens[-n:]
        ]
        if len(ends) <= 16:
            assert (at, length) == (want_at, want_length)
        if token is not None:
            index.add(token)
            tokens.append(token)
    assert len(index) == len(tokens)


@given(shared=TEXTS, before=TEXTS, answer=TEXTS, after=TEXTS, n=st.integers(1, 3))
def test_an_index_that_begins_as_another_is_one_of_its_text(
    shared: list[int], before: list[int], answer: list[int], after: list[int], n: int
) -> None:
    index, tokens = NgramIndex(np.array(shared + before, np.int32), n), np.array(shared + after)
    for token in answer:
        index.add(token)
    same = index.shared(tokens)
    assert same >= len(shared) and [*shared, *before, *answer][:same] == tokens[:same].tolist()
    begun, whole = index.begun(tokens.astype(np.int32), same), NgramIndex(tokens, n)
    assert len(begun) == len(whole) == len(tokens)
    for token in [*answer, None]:
        assert begun.find(9) == whole.find(9)
        assert (begun._last == whole._last).all()
        if token is not None:
            begun.add(token)
            whole.add(token)


def test_an_index_that_grows_is_one_of_the_whole_text() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(40) for _ in range(5000)]
    whole = NgramIndex(np.array(tokens, np.int32), 2)
    grown = NgramIndex(np.array(tokens[:7], np.int32), 2)
    for token in tokens[7:]:
        grown.add(token)
    assert grown.find(16) == whole.find(16)
    assert grown.following(3, 5) == tokens[3:8]
    # Behind the end comes what was copied: a text with a period goes on with it.
    assert whole.following(4998, 5) == [*tokens[4998:], *tokens[4998:], tokens[4998]]


def test_a_lookup_goes_on_where_it_copies_from_and_behind_a_replaced_word() -> None:
    text = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    index = NgramIndex(np.array([*text, 99, 11, 12], np.int32), SpeculativeConfig().lookup_min)
    other = Lookup(index.copy(), SpeculativeConfig(), HitRates())
    lookup = Lookup(index, SpeculativeConfig(), HitRates())
    assert lookup.draft(3) == [13, 14, 15]
    lookup.extend([13, 14])
    assert lookup.draft(3) == [15, 16, 17]
    promised = lookup.hits(3)
    lookup.extend([77])  # instead of 15
    assert lookup.draft(3) == [16, 17, 18] and lookup.hits(3) < promised
    lookup.extend([78])  # neither: nothing is known
    assert lookup.draft(3) == [] and lookup.hits(3) == 0
    lookup.extend([17, 18])
    assert lookup.draft(1) == [19]
    assert other.draft(3) == [13, 14, 15] and len(index) == 13 + 6  # what began as a copy stays


def test_ngram_is_vllms() -> None:
    config = SpeculativeConfig("ngram", prompt_lookup_min=2, prompt_lookup_max=3)
    ngram = Ngram(np.array([1, 2, 3, 4, 1, 2, 3, 5, 2, 3], np.int32), config)
    assert ngram.draft(2) == [4, 1]  # after the first place of the two tokens
    ngram.extend([5])
    assert ngram.draft(2) == [2, 3]  # three tokens are alike once
    ngram.extend([9])
    assert ngram.draft(2) == []
    assert (config.lookup_min, config.lookup_max) == (2, 3)
    assert [SpeculativeConfig("ngram").lookup_min, SpeculativeConfig("ngram").lookup_max] == [5, 5]


class Answer:
    """A stand-in for a request, with the attributes that `Drafts` reads."""

    def __init__(self, tokens: list[int], salt: str = "", *, cached: bool = True) -> None:
        self.tokens, self.generated = np.array(tokens, np.int32), []
        self.request, self.answers = self, [self]  # the prompt with its one answer
        self.namespace, self.cache_prompt, self.key = (salt, 0), cached, id(self)

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.generated) - 1


def drafts(terms: tuple[float, float, float], most: int = 64, **fields: Any) -> Drafts:
    cost: Any = SimpleNamespace(decode_terms=lambda: terms)
    return Drafts(SpeculativeConfig(**fields), cost, most)


def tokens_per_second(made: Drafts, text: list[int], answer: list[int], terms: Any) -> float:
    """Speed of one answer by the cost model, relative to that without drafts."""
    asked: Any = Answer(text)
    step, token, before = terms
    seconds = plain = 0.0
    asked.generated.append(answer[0])
    while (at := len(asked.generated)) < len(answer):
        (draft,) = made([(asked, len(answer) - at)])
        seconds += step + (1 + len(draft)) * (token + asked.length * before)
        right = 0
        while right < len(draft) and draft[right] == answer[at + right]:
            right += 1
        made.verified(len(draft), right)
        for new in answer[at : at + right + 1]:
            plain += step + token + asked.length * before
            asked.generated.append(new)
    return plain / seconds


# Steps whose time is mostly weights, as on one rank, and steps of which each token costs much.
@pytest.mark.parametrize("terms", [(14e-3, 5e-4, 0.0), (14e-3, 5e-3, 0.0), (1e-3, 1e-3, 1e-7)])
def test_a_draft_pays_or_is_not_made(terms: tuple[float, float, float]) -> None:
    rng = random.Random(2)
    text = [rng.randrange(300) for _ in range(4000)]
    unlike = [rng.randrange(300) for _ in range(2000)]  # the same words, in no order
    made = drafts(terms)
    assert tokens_per_second(made, text, unlike, terms) > 0.97
    copied = tokens_per_second(made, text, text[1000:1600], terms)
    assert copied > (3.0 if terms[0] > 10 * terms[1] else 1.0)
    # After that, what holds for other answers is believed of a new one for a few tokens only.
    assert tokens_per_second(made, text, unlike, terms) > 0.97
    counts = made.counts
    assert counts.num_accepted_tokens == sum(counts.num_accepted_tokens_per_pos)


def test_a_step_that_seems_to_take_no_time_can_have_drafts() -> None:
    """If every step of answers reads a prompt, too, the fit may give the answers no time at all."""
    cost, position = StepCost(), 0
    for step, n in enumerate((512, 2048, 1024, 4096)):  # of which an answer is in the last two
        answers, pairs = int(step > 1), n * (position + n / 2)
        cost.learn(StepWork(1, 0, 1, answers, position + 100 * answers, n, pairs), 1e-5 * n**1.1)
        position += n
    assert cost.decode_terms() == (0.0, 0.0, 0.0)
    made = Drafts(SpeculativeConfig(), cost, 64)
    asked: Any = Answer(list(range(50)) * 2)
    asked.generated.append(0)
    assert made([(asked, 8)]) == [list(range(1, 8))]


@pytest.mark.parametrize(("room", "run"), [(3, 8), (64, 1)])
def test_prompts_are_indexed_when_there_is_room_for_drafts(room: int, run: int) -> None:
    made, answers = drafts((1.0, 1e-6, 0.0), room), [Answer(list(range(50)) * 2) for _ in range(3)]
    asked: Any = [(answer, run) for answer in answers]
    for token in range(5):
        for answer in answers:
            answer.generated.append(token)
        with mock.patch("razor_dist.engine.ngram_index.NgramIndex", side_effect=AssertionError):
            assert made(asked) == [[], [], []]
    # What was drawn meanwhile is known.
    assert made([(answer, 2) for answer in answers[:2]]) == [[5], [5] * (room > 3)]


def test_many_questions_to_a_text_have_it_indexed_once() -> None:
    rng, sorted_ = random.Random(3), list[int]()
    text, other = ([rng.randrange(300) for _ in range(5000)] for _ in range(2))
    extend = NgramIndex._extend

    def counting(index: NgramIndex, tokens: Any) -> None:
        sorted_.append(len(tokens))
        extend(index, tokens)

    made = drafts((1.0, 1e-6, 0.0))
    asks = [Answer(text + other[:n]) for n in (30, 40, 40)]
    asks += [Answer(other), Answer(text), Answer(text[:2500] + other), Answer(text, "salt")]
    asks += [Answer(text, cached=False), Answer(text)]
    with mock.patch.object(NgramIndex, "_extend", counting):
        for at, ask in enumerate(asks):
            ask.generated.append(int(ask.tokens[100]))
            ask.generated += ask.tokens[101:104].tolist()
            last: Any = ask
            [draft] = made([(last, 8)])
            assert draft == ask.tokens[104 : 104 + len(draft)].tolist() and draft, at
    assert sorted_ == [5030, 10, 0, 5000, 0, 7500, 5000, 5000, 0]


def test_runs_have_few_lengths_and_share_a_step() -> None:
    text = list(range(500)) * 2
    beside = [2, 4, 90]  # tokens of prompts on three ranks, of which one has no small step
    for most, tokens, room in itertools.product((1, 2, 5, 8, 40), (3, 8, 63), (8, 64)):
        answers: list[Any] = [Answer(text[: 600 + index]) for index in range(3)]
        for answer in answers:
            answer.generated.append(answer.tokens[-1] + 1)
        found = drafts((1.0, 1e-6, 0.0), room + 4, num_speculative_tokens=tokens)(
            [(answer, most) for answer in answers], beside
        )
        lengths = [1 + len(draft) for draft in found]
        assert set(lengths) <= {1, 2, 4, 8, 16, 32} and sum(lengths) <= room
        assert max(lengths) <= min(most, tokens + 1)
        # Nothing is known of these answers yet: longer drafts would not be expected to pay.
        assert max(lengths) * 2 > min(most, tokens + 1, room - 2, 31)
        for answer, draft in zip(answers, found, strict=True):
            last = int(answer.generated[-1])
            assert draft == list(range(last + 1, last + 1 + len(draft)))


def test_a_step_that_is_short_on_a_rank_stays_short_with_drafts() -> None:
    """A rank computes its own shards of a chunk only, and these count."""
    core, runner = pages_only.make_core(ranks=4, pages=60)
    batch = core.scheduler.batch
    batch.drafter = drafts((1.0, 1e-6, 0.0), ALIKE, method="ngram")
    # Its windows move at every token: runs are longer than they could be.
    batch._longest_run = lambda answer: min(8, 35 - len(answer.generated))
    plans, execute = list[StepPlan](), runner.execute
    pages_only.add(core, "copies", 3, 35)
    with mock.patch.object(runner, "execute", lambda plan: plans.append(plan) or execute(plan)):
        while len(plans) < 8:
            core.step()
        pages_only.add(core, "long", 30)
        pages_only.run(core)
    beside = 0
    for entries in (plan.entries for plan in plans if isinstance(plan, Compute)):
        for rank in range(4):
            n = [len(entry.tokens) for entry in entries if entry.sharded]
            rows = sum(Chunk(0, tokens, 4).tokens(rank) for tokens in n)
            rows += sum(len(entry.tokens) for entry in entries if not entry.sharded)
            assert rows <= ALIKE
            beside += bool(n) and any(entry.run for entry in entries)
    assert beside


@pytest.mark.parametrize(("setting", "longest"), [(1, 1), (2, 1), (4, 3), (8, 7), (63, 63)])
def test_acceptance_is_counted_up_to_the_longest_draft(setting: int, longest: int) -> None:
    made = drafts((1.0, 1e-6, 0.0), method="ngram", num_speculative_tokens=setting)
    asked: Any = Answer(list(range(100)) * 2)
    asked.generated.append(0)
    [draft] = made([(asked, 64)])
    assert draft == list(range(1, 1 + longest))
    made.verified(longest, longest)
    assert made.counts.num_accepted_tokens_per_pos == [1] * longest


def test_drafts_can_be_as_long_as_the_default() -> None:
    assert SpeculativeConfig().longest_draft == SpeculativeConfig().num_speculative_tokens


@given(
    window=st.integers(1, 40),
    ratio=st.sampled_from([None, 2, 5]),
    block=st.integers(1, 20),
    position=st.integers(0, 300),
    most=st.integers(1, 20),
)
def test_a_run_sees_one_window_start(
    window: int, ratio: int | None, block: int, position: int, most: int
) -> None:
    policy = StreamingPolicy(window_min=window, window_ratio=ratio, block=block)
    run = policy.run(position, most)
    assert 1 <= run <= most
    assert len(policy.runs(position, position + run)) == 1
    assert run == most or len(policy.runs(position, position + run + 1)) == 2


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{", "speculative_config must be a JSON object or auto or none: "),
        ("[]", "must be an object, got []"),
        (
            '{"method": "eagle"}',
            "speculative_config.method must be one of lookup, ngram, got 'eagle'",
        ),
        ('{"num_speculative_token": 3}', "did you mean 'num_speculative_tokens'?"),
        ('{"num_speculative_tokens": 0}', "_tokens must be at least 1, got 0"),
        ('{"num_speculative_tokens": true}', "_tokens must be an integer, got True"),
        ('{"prompt_lookup_min": 4, "prompt_lookup_max": 3}', "must not be above prompt_lookup_max"),
    ],
)
def test_mistakes_in_the_setting_are_named(value: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(EngineConfig, {"speculative_config": value}, {})
    assert problem in str(raised.value)
    assert str(raised.value).endswith("(from --speculative-config)")


def test_the_setting_reaches_the_ranks() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
    config = load_config(EngineConfig, {"speculative_config": text}, {})
    again = EngineConfig.from_json(config.engine_json())
    assert again == config and isinstance(again.speculative_config, SpeculativeConfig)
    assert (again.speculative_config.lookup_min, again.speculative_config.lookup_max) == (3, 3)
    assert EngineConfig(speculative_config={"method": "lookup"}).speculative_config is not None
    assert load_config(EngineConfig, {"speculative_config": "none"}, {}).speculative_config is None
    assert EngineConfig.from_json(EngineConfig().engine_json()).speculative_config == "auto"
