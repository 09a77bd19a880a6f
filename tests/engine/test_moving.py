"""Room in the engine's core while caches go to host memory and come from there.

As in `tests.engine.pages_only`, without a model; a save or a load lasts as long as a test says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from razor_dist.engine.core import EngineCore
from razor_dist.prefix.tiers import Tiers
from razor_dist.prefix.transfer import load_job
from razor_dist.protocol.messages import CacheScope, Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import Load, Save, StepPlan
from tests.engine import pages_only
from tests.engine.cores import evict_all
from tests.engine.pages_only import TAIL, PagesOnly, make_core, run


class Movable(PagesOnly):
    """Saves and loads as well, each in so many ``parts``."""

    beside = 3

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.parts: Counter[type[StepPlan]] = Counter()
        self.left: Counter[type[StepPlan]] = Counter()

    def execute(self, plan: StepPlan) -> torch.Tensor | None:
        kind = type(plan)
        if not isinstance(plan, Save | Load):
            return super().execute(plan)
        self.executed += 1
        self.left[kind] -= 1
        if plan.payload:
            self.left[kind] = self.parts[kind]
            if isinstance(plan, Load):
                job, [rank], [caches] = load_job(plan.payload), self.ranks, self.caches
                end = job.end
                rank.restore(plan.sequence, end, job.chunks, job.mark)
                for cache, slot in zip(
                    caches.streaming, rank[plan.sequence].streaming, strict=True
                ):
                    slot.length = end
                    start = max(cache.policy.sinks, cache.policy.start(end))
                    slot.advance(start, tail=start)
        return torch.tensor([[max(0, self.left[kind]), 0, 0]])


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PagesOnly": Movable, "MAX_LEN": 400, "CACHED": 8}.items():
        monkeypatch.setattr(pages_only, name, value)


def core_of(slots: int, **changed: Any) -> tuple[EngineCore, Movable]:
    sizes = {"pages": 3000, "places": 10**5, "slots": slots} | changed
    core, runner = make_core(share=True, **sizes)
    assert isinstance(runner, Movable)
    room = core.scheduler.room
    object.__setattr__(room.cache, "place_bytes", (1, 1))
    index = room.prefix_cache.index
    room.tiers = Tiers(
        room.accounts, index, "", None, {"host": math.inf}, lambda _: [(1, 1), (1, 1)]
    )
    core.max_step = 0.0  # one part between two steps
    return core, runner


def text(tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(pages_only.VOCABULARY, (tokens,), generator=generator).tolist()


def add(
    core: EngineCore,
    name: str,
    ids: list[int],
    answer: int = 1,
    *,
    priority: int = 0,
    **given: Any,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, priority=priority)
    core.add(name, ids, params, **given)


def finish(core: EngineCore, name: str) -> None:
    """Step until an answer has ended."""
    while not any(isinstance(m, Token) and m.finish and m.id == name for m in core.step()):
        pass


def pin_all(core: EngineCore) -> list[list[int]]:
    """Pin as many prefixes as may be; return their texts."""
    texts = [text(20, 10 + number) for number in range(core.runner.config.max_pinned)]
    for number, ids in enumerate(texts):
        add(core, f"pin{number}", ids, pin=True)
        run(core)
    return texts


@pytest.mark.parametrize("leaves", [False, True])
def test_a_slot_is_there_for_a_copy_beside_a_save_and_a_load(leaves: bool) -> None:
    """Also beside what was loaded for a request that has gone since."""
    core, runner = core_of(slots=1)
    documents = [text(60, 1), text(60, 5)]
    for number, ids in enumerate(documents):
        add(core, f"document{number}", ids)
        run(core)
    pins = pin_all(core)
    evict_all(core)
    runner.parts[Save] = 1000
    add(core, "saved", text(30, 2), 4)
    finish(core, "saved")
    assert core.scheduler.room.saved
    if leaves:
        runner.parts[Load] = 3
        add(core, "leaves", documents[1] + text(6, 3))
        add(core, "private", text(3, 6), 9, scope=CacheScope(shared=False))
        while core.scheduler.room.stats.entries != 2:
            core.step()
        core.abort("leaves")
        finish(core, "private")
    runner.parts[Load] = 1000
    add(core, "loads", documents[0] + text(6, 3))
    add(core, "copied", pins[0][:12] + text(30, 4))
    finish(core, "copied")
    core.abort("loads")
    runner.parts.clear()


def test_a_load_ends_with_the_last_request_that_waits_for_it() -> None:
    core, runner = core_of(slots=6)
    long = text(200, 1)
    add(core, "long", long)
    run(core)
    evict_all(core)
    runner.parts[Load] = 1000
    for name in "ab":
        add(core, name, long + text(40, ord(name)))
    core.step()
    tiers, accounts = core.scheduler.room.tiers, core.scheduler.room.accounts
    first = tiers.loading
    core.abort("a")
    core.step()
    assert first is not None and tiers.loading is first
    core.abort("b")
    assert tiers.loading is None and (accounts.free == accounts.sizes).all()
    add(core, "c", long + text(40, 3))
    core.step()
    assert tiers.loading is not None and tiers.loading is not first
    runner.parts.clear()
    runner.left.clear()
    run(core)
    evict_all(core)
    assert runner.lengths == {} and (accounts.free == accounts.sizes).all()


def test_what_is_read_in_a_step_waits_for_no_load_of_another_or_longer_document() -> None:
    core, runner = core_of(slots=6, tail=pages_only.MAX_LEN)
    long, short = text(200, 1), text(12, 2)
    for name, ids in (("long", long), ("short", short)):
        add(core, name, ids)
        run(core)
    evict_all(core)
    runner.parts[Load] = 1000
    add(core, "loads", long + text(40, 3))
    add(core, "same", long + text(40, 4))
    add(core, "other", short + text(3, 5))
    add(core, "begins", long[:20] + text(3, 6))
    for _ in range(20):
        core.step()
    assert {one.id for one in core.scheduler.waiting} == {"loads", "same"}
    assert not core.scheduler.running and not core.scheduler.prefills
    runner.parts.clear()
    runner.left.clear()
    run(core)


def found_by(messages: list[Any], name: str) -> int:
    return next(m.cached for m in messages if isinstance(m, Progress) and m.id == name)


def ask_for_stored(
    core: EngineCore, runner: Movable, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Have ``loads`` wait for a document of 60 tokens, which comes in three parts."""
    add(core, "document", text(60, 1))
    run(core)
    evict_all(core)
    meanwhile()
    runner.parts[Load] = 3
    add(core, "loads", text(60, 1) + text(30, 3))
    core.step()


def test_what_is_loaded_stays_though_an_answer_that_is_worth_more_ends() -> None:
    core, runner = core_of(slots=1)

    def fill() -> None:
        pin_all(core)
        for number in range(4):
            add(core, f"cached{number}", text(200, 20 + number))
            run(core)

    ask_for_stored(core, runner, fill)
    add(core, "passes", text(210, 4))
    assert found_by(run(core), "loads") == 60


def test_what_is_loaded_goes_for_no_copy() -> None:
    core, runner = core_of(slots=2, places=60, tail=TAIL)
    ask_for_stored(core, runner)
    add(core, "passes", text(8, 4), 16)
    assert found_by(run(core), "loads") == 60


def test_what_was_loaded_is_loaded_again_if_it_went_for_an_earlier_priority() -> None:
    core, runner = core_of(slots=2, pages=100, by_priority=True)
    ask_for_stored(core, runner)
    add(core, "urgent", text(180, 4), priority=-1)
    assert found_by(run(core), "loads") == 60
