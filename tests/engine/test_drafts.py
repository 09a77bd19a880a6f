"""Drafts change no answer, and leave nothing behind: engines with and without them are compared."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import make_engine
from razor_dist.engine.core import EngineCore
from razor_dist.engine.request import Answer
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.worker import follow
from razor_dist.heads.decision import HeadRoles
from razor_dist.kernels import linear
from razor_dist.kernels.compiled import operations
from razor_dist.kernels.quantized import INT4, INT8
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Failed, Token
from razor_dist.protocol.repetition import RepetitionDetectionParams
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import BatchEntry, Close, Compute, Fork, StepPlan
from tests.cases import Case, answer, make_runner, model_and_shape, prefill
from tests.engine.cores import GREEDY, evict_all, make_core, prompt, run
from tests.logits import POLICY, split_of, tokens_of, windows_of
from tests.prefix.engines import SETTINGS
from tests.ranks import Ranks
from tests.same_answers import same
from tests.tiny_models import Tiny
from tests.tokenizer import copy_with_letters

Answers = dict[str, list[Token]]
Truth = dict[str, list[int]]

END = (2,)
SOURCE_HEADS = [(1, 0)]  # the first of the head that `split_of` keeps of every model


@dataclass(frozen=True)
class Ask:
    """A request; those before ``wait`` are added together."""

    name: str
    ids: tuple[int, ...]
    params: SamplingParams
    tokens: int | None = None  # aborted after this many
    wait: bool = False


@dataclass(frozen=True)
class Scene:
    """Requests, and the engine that they are asked of."""

    path: str
    asks: tuple[Ask, ...]
    changed: dict[str, Any] = field(default_factory=dict)  # of `SETTINGS`
    windows: bool = False  # by head


class Planted:
    """Drafts of the true tokens, one of which is made wrong in half of the drafts."""

    def __init__(self, truth: Truth, seed: int) -> None:
        self._truth, self._random = truth, random.Random(seed)
        self.drafted = self.right = 0

    def __call__(self, answers: Sequence[tuple[Answer, int]], *_: object) -> list[list[int]]:
        return [self._draft(answer, most) for answer, most in answers]

    def _draft(self, answer: Answer, most: int) -> list[int]:
        known = self._truth[answer.id][len(answer.generated) :]
        draft = known[: self._random.randrange(min(most, 8))]  # 7 at most, the default
        if draft and self._random.random() < 0.5:
            wrong = self._random.randrange(len(draft))
            draft[wrong] = (draft[wrong] + self._random.randrange(1, 90)) % 100
        self.drafted += len(draft)
        return draft


def answered(comm: Communicator, scene: Scene, truth: Truth | None, seed: int) -> Answers:
    """Rank 0's answers, with drafts if the ``truth`` is known; nothing may be left at the end."""
    settings = {**SETTINGS, "max_num_seqs": 8, **scene.changed}
    config = EngineConfig(model=scene.path, world_size=comm.size, **settings)
    model, _ = model_and_shape(scene.path)
    heads = split_of(Path(scene.path))
    roles = HeadRoles(heads, windows_of(heads) if scene.windows else None, SOURCE_HEADS)
    engine = make_engine(model, config, roles, comm, eos_token_ids=END)
    if comm.rank:
        follow(engine)
        return {}
    core, answers = engine.core, {}
    core.scheduler.batch.drafter = planted = None if truth is None else Planted(truth, seed)
    for ask in scene.asks:
        core.add(ask.name, list(ask.ids), ask.params)
        while ask.wait and core.has_work:
            take(core, answers, scene.asks)
    while core.has_work:
        take(core, answers, scene.asks)
    assert planted is None or planted.drafted
    assert sum(core.stats().kv_bytes_per_rank) == 0  # rank 0's free pages are all ranks'
    room = core.scheduler.room
    evict_all(core)
    assert (room.accounts.free == room.accounts.sizes).all()
    assert not engine.runner.sequences
    core.stop()
    return answers


def test_drafts_know_of_the_prompts_beside_them(tiny: Tiny) -> None:
    """And steps that are not recorded are as short as those that are."""
    core, seen = make_core(tiny("llama"), max_num_seqs=4, cuda_graphs=False), list[int]()

    def noted(answers: Sequence[tuple[Answer, int]], beside: Sequence[int]) -> list[list[int]]:
        seen.extend(beside)
        return [[] for _ in answers]

    assert core.runner.most_decoded == linear.ALIKE
    core.scheduler.batch.drafter = noted
    core.add("a", prompt(20), GREEDY)
    while not seen or seen[-1]:
        core.step()
    core.add("b", prompt(3, 1), GREEDY)
    core.add("c", prompt(50, 2), GREEDY)  # longer than a chunk
    run(core)
    assert sum(seen) == 20 + 3 + 50
    core.stop()


def take(core: EngineCore, answers: Answers, asks: tuple[Ask, ...]) -> None:
    """One step, after which requests are aborted as they ask."""
    for message in core.step():
        assert not isinstance(message, Failed), message
        if isinstance(message, Token):
            answers.setdefault(message.id, []).append(message)
    for ask in asks:
        if ask.tokens is not None and len(answers.get(ask.name, ())) >= ask.tokens:
            core.abort(ask.name)
            del answers[ask.name][ask.tokens :]


def assert_drafts_change_nothing(
    ranks: Ranks, world: int, scene: Scene, seed: int = 0, *, tolerance: float = 1e-4
) -> Answers:
    want = ranks(world).run(answered, scene, None, seed)[0]
    truth = {name: [token.token for token in tokens] for name, tokens in want.items()}
    # Beyond where an answer ends anything may be in a draft.
    longer = {name: tokens + prompt(9, seed) for name, tokens in truth.items()}
    found = ranks(world).run(answered, scene, longer, seed)[0]
    assert {name: [t.token for t in tokens] for name, tokens in found.items()} == truth
    for name, tokens in want.items():
        for got, of in zip(found[name], tokens, strict=True):
            assert got.finish == of.finish, name
            same(dict(got.top), dict(of.top), tolerance)
            assert (got.sources is None) == (of.sources is None), name
            same(dict(got.sources or ()), dict(of.sources or ()), tolerance)
    return found


def in_runs_by_compiled(
    comm: Communicator, case: Case, lengths: tuple[int, ...]
) -> tuple[Any, Any]:
    """`in_runs`, with the products that a quiet machine chooses; a busy one may choose others."""
    with mock.patch.object(linear, "fastest_way", lambda rows: linear.by_compiled):
        return in_runs(comm, case, lengths)


def in_runs(comm: Communicator, case: Case, lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """Rank 0's logits of the forced tokens: one by one, and in runs that keep half of theirs."""
    runner = make_runner(comm, case, 2)
    prefill(runner, 0, case)
    n = len(case.prompt)
    total = n + len(case.forced)
    runner.execute(Fork(1, begin=n, end=n, total=total, source=0))
    alone = [runner.execute(answer((0, token))) for token in case.forced]
    found, at, kept = [], 0, ()
    for length in itertools.cycle(lengths):
        length = min([length, len(case.forced) - at, case.policy.run(n + at, 64)])
        if not length:
            break
        # Half of them, and wrong ones that are read with them, and leave no trace.
        right = -(-length // 2)
        tokens = [*case.forced[at : at + right], *[5] * (length - right)]
        plan = Compute.of([BatchEntry(1, tokens, run=length > 1)])
        logits = runner.execute(structs.replace(plan, kept=kept))
        kept = (right,) if length > 1 else ()
        found.append(None if logits is None else logits[:right])
        at += right
    runner.execute(Close(1, kept=kept))
    if comm.rank:
        return None, None
    return torch.cat([row for row in alone if row is not None]), torch.cat(found)


@pytest.mark.long
@pytest.mark.skipif(operations() is None, reason="only compiled products round rows alike")
@pytest.mark.parametrize(
    ("world", "tensor", "kv_dtype"),
    [
        (1, False, torch.float32),
        (1, False, INT4),
        (2, False, torch.float32),
        (2, False, INT8),
        (2, False, INT4),
        (2, True, torch.float32),
    ],
)
def test_logits_of_runs_are_the_same_bits(
    world: int, tensor: bool, kv_dtype: torch.dtype, ranks: Ranks, tiny: Tiny
) -> None:
    path, text = tiny("llama"), tokens_of(140)
    case = Case(str(path), split_of(path), POLICY, text[:70], text[70:], tensor=tensor)
    case = replace(case, kv_dtype=kv_dtype, tail=20)
    alone, found = ranks(world).run(in_runs_by_compiled, case, (8, 3, 1, 5, 2))[0]
    if tensor:  # sums of the ranks' parts are rounded otherwise for several rows
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(found, alone)


def every_feature(count: int = 60) -> tuple[Ask, ...]:
    """Requests that ask for all that could see another order of tokens, side by side."""
    common: dict[str, Any] = {"max_tokens": count, "ignore_eos": True, "logprobs": 2}
    sampled = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=5, **common)
    penalized = SamplingParams(
        temperature=0.8,
        seed=7,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={7: 3.0, 9: -5.0},
        **common,
    )
    constrained = SamplingParams(
        temperature=1.2, seed=3, max_tokens=count, structured_outputs={"regex": "(ab|c[0-9]){9}!"}
    )
    ends = SamplingParams(temperature=1.0, seed=11, max_tokens=count, min_tokens=9)
    looping = replace(
        SamplingParams(temperature=0, **common),
        repetition_detection=RepetitionDetectionParams(max_pattern_size=8, min_count=3),
    )
    return (
        Ask("greedy", tuple(prompt(61, 1)), SamplingParams(temperature=0, **common)),
        Ask("sampled", tuple(prompt(90, 2)), replace(sampled, n=2, min_p=0.02)),
        Ask("penalized", tuple(prompt(33, 3)), replace(penalized, return_sources=2)),
        Ask("gone", tuple(prompt(40, 4)), sampled, tokens=7),
        Ask("constrained", tuple(prompt(25, 5)), constrained, wait=True),
        # From the cache, while nothing else runs, and in company again.
        Ask("again", tuple(prompt(61, 1)), replace(penalized, return_sources=3), wait=True),
        Ask("ends", tuple(prompt(50, 6)), replace(ends, stop_token_ids=list(range(4, 20)), n=3)),
        Ask("looping", tuple(prompt(90, 2) + prompt(20, 9)), looping),
    )


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("decode", ["replicated", "tensor"])
def test_every_feature_in_company(
    world: int, decode: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path = copy_with_letters(tiny("llama"), tmp_path / "llama")
    found = assert_drafts_change_nothing(
        ranks, world, Scene(str(path), every_feature(), {"decode": decode})
    )
    assert len(found) == 11 and all(len(tokens) > 5 for tokens in found.values())
    assert {tokens[-1].finish for tokens in found.values()} >= {"stop", "length"}


def without_logits(comm: Communicator, scene: Scene, truth: Truth) -> tuple[Answers, int]:
    """`answered`, with logits that cannot be read in steps of answers alone; and count these."""
    execute, hidden = ModelRunner.execute, []

    def hide(runner: ModelRunner, plan: StepPlan) -> Any:
        logits = execute(runner, plan)
        if not isinstance(plan, Compute) or logits is None or runner.likeliest is None:
            return logits
        hidden.append(len(logits))
        return logits.to("meta")

    with mock.patch.object(ModelRunner, "execute", hide):
        return answered(comm, scene, truth, 1), len(hidden)


@pytest.mark.long
@pytest.mark.parametrize(("world", "decode"), [(1, "replicated"), (2, "replicated"), (2, "tensor")])
def test_greedy_answers_need_no_logits(world: int, decode: str, ranks: Ranks, tiny: Tiny) -> None:
    """A step itself chooses the tokens, recorded or eager, also after each token of a draft."""
    greedy = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    asks = tuple(Ask(f"{n}", tuple(prompt(n, n)), greedy) for n in (61, 20, 90))
    scene = Scene(str(tiny("llama")), asks, {"decode": decode})
    eager = replace(scene, changed={"decode": decode, "cuda_graphs": False})
    want = ranks(world).run(answered, eager, None, 0)[0]
    truth = {name: [token.token for token in tokens] for name, tokens in want.items()}
    for drafts in (None, {name: tokens + prompt(9, 1) for name, tokens in truth.items()}):
        found, hidden = ranks(world).run(without_logits, scene, drafts)[0]
        assert {name: [t.token for t in tokens] for name, tokens in found.items()} == truth
        assert hidden > 10


def one_by_one(asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    return tuple(replace(ask, wait=True) for ask in asks)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    "changed",
    [
        # Numbers of 8 bits round otherwise in other chunks, so nothing else may run meanwhile.
        {"kv_dtype": "int8", "prefix_cache": False},
        {"prefill": "exact"},
        {"compensation": False},
        {"window_ratio": None, "window_min": 5, "sink_tokens": 0},
        {"cuda_graphs": False, "block": 1},  # the window moves at most tokens
        {},  # windows by head
    ],
    ids=lambda changed: next(iter(changed), "windows"),
)
def test_other_caches(
    changed: dict[str, Any], world: int, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path = copy_with_letters(tiny("llama"), tmp_path / "llama")
    asks = one_by_one(every_feature(40)) if "kv_dtype" in changed else every_feature(40)
    scene = Scene(str(path), asks, changed, windows=not changed)
    tolerance = 1e-3 if "kv_dtype" in changed else 1e-4  # another sum may be the next code
    assert_drafts_change_nothing(ranks, world, scene, tolerance=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_heads_biased_by_distance(family: str, ranks: Ranks, tiny: Tiny) -> None:
    path = tiny(family)
    asks = tuple(ask for ask in every_feature() if ask.params.structured_outputs is None)
    for world in (1, 2):
        assert_drafts_change_nothing(ranks, world, Scene(str(path), asks))


@st.composite
def scenes(draw: st.DrawFn) -> tuple[int, Scene, int]:
    """A number of ranks; requests that continue each other's texts, side by side; and a seed."""
    world = draw(st.sampled_from([1, 1, 2, 3]))
    block, tail = draw(st.integers(2, 12)), draw(st.integers(0, 30))
    changed = {
        "decode": draw(st.sampled_from(["replicated", "tensor"])),
        "window_min": draw(st.integers(1, 40)),
        "window_ratio": draw(st.sampled_from([None, 3, 8])),
        "block": block,
        "sink_tokens": draw(st.integers(0, 6)),
        "prefix_tail_tokens": tail,
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "max_num_seqs": draw(st.integers(3, 6)),
        "chunked_prefill_size": draw(st.sampled_from([8, 32, 100])),
    }
    asks = []
    for index in range(draw(st.integers(1, 6))):
        texts = draw(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 2)), min_size=1))[:3]
        ids = [token for count, seed in texts for token in prompt(count, seed)]
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
            max_tokens=draw(st.integers(1, 60)),
            min_tokens=draw(st.sampled_from([0, 1])),
            ignore_eos=draw(st.booleans()),
            seed=index,
            n=draw(st.sampled_from([1, 1, 3])),
            presence_penalty=draw(st.sampled_from([0.0, 0.8])),
            logprobs=2,
            return_sources=draw(st.sampled_from([0, 0, 2])),
            stop_token_ids=[9, 50],
        )
        gone = draw(st.sampled_from([None, None, None, 1, 5]))
        asks.append(Ask(f"r{index}", tuple(ids), params, gone, draw(st.booleans())))
    first = replace(asks[0], params=replace(asks[0].params, max_tokens=60, stop_token_ids=()))
    first = replace(first, params=replace(first.params, ignore_eos=True), tokens=None)
    return world, Scene("", (first, *asks[1:]), changed), draw(st.integers(0, 2**20))


@pytest.mark.long
@pytest.mark.parametrize("count", [8, pytest.param(120, marks=pytest.mark.slow)])
def test_any_scene(count: int, ranks: Ranks, tiny: Tiny) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(drawn=scenes())
    def check(drawn: tuple[int, Scene, int]) -> None:
        world, scene, seed = drawn
        assert_drafts_change_nothing(ranks, world, replace(scene, path=str(tiny("qwen2"))), seed)

    check()
