"""Engines that are alive at once on one prefix store answer as an engine without any cache."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from razor_dist.cache.store import folders, node_folders, remove_node
from razor_dist.engine.build import RankEngine
from razor_dist.engine.step import Op, StepPlan
from razor_dist.engine.worker import follow
from razor_dist.parallel.comm import Communicator
from tests.alibi_models import make_alibi
from tests.cases import model_and_shape
from tests.engine.test_prefix_cache import GREEDY, ids
from tests.engine.test_prefix_tiers import DAMAGE, TO_8_BITS, engine_of, spoil
from tests.ranks import RankPool
from tests.test_invariance import split_of

Ranks = Callable[[int], RankPool]
Tiny = Callable[[str], Path]
# Of each token: itself, its log-probability, and the weights of its sources by position.
Answer = list[tuple[int, float, dict[int, float]]]

DOCUMENT = 120  # tokens
ASKING = dataclasses.replace(GREEDY, max_tokens=3, return_sources=3)
# Of the device, about one document, so that others come from host memory or from disk.
SMALL: dict[str, Any] = {"kv_tokens": 200, "max_num_seqs": 1, "max_model_len": 180}
ENGINES: dict[int, tuple[RankEngine, dict[str, Answer]]] = {}  # in each rank's process


def begin(comm: Communicator, number: int, path: str, given: dict[str, Any]) -> None:
    """Make an engine that stays until `end`."""
    _, shape = model_and_shape(path)
    group = shape.query_heads // shape.kv_heads
    heads = [
        (layer, head * group)
        for layer, row in enumerate(split_of(Path(path)))
        for head, kept in enumerate(row)
        if kept
    ]
    settings = SMALL | {"part_bytes": 2000, "source_heads": heads[:2]} | given
    engine = engine_of(comm, path, settings)
    engine.core._max_step = 0.0  # one part a step
    ENGINES[number] = engine, {}


def act(
    comm: Communicator, number: int, asked: dict[str, tuple[int, ...]], steps: int | None
) -> tuple[dict[str, Answer], dict[str, Any], set[str]] | None:
    """Hand an engine prompts, and take steps: all that there are to take, if it is None.

    Return the answers that have ended, the counters, and the names of the nodes that it knows.
    """
    engine, answers = ENGINES[number]
    if comm.rank:
        return follow(engine)
    core, ended = engine.core, {}
    for name, prompt in asked.items():
        core.add(name, list(prompt), ASKING)
    taken = 0
    while core.has_work and taken != steps:
        taken += 1
        for message in core.step():
            assert message["t"] in ("progress", "token"), message
            if message["t"] == "token":
                sources = dict(message.get("sources", ()))
                one = message["token"], message["logprob"], sources
                answers.setdefault(message["id"], []).append(one)
                if message["finish"] is not None:
                    ended[message["id"]] = answers.pop(message["id"])
    stats = core.stats()["prefix_cache"]
    tiers = core.scheduler.admission.tiers
    known = {n.manifest.node for n in tiers.nodes._nodes.values()} if tiers else set()
    core._run(StepPlan(Op.STOP))  # the other ranks leave `follow`, and the engine stays
    return ended, stats, known


def end(comm: Communicator, number: int, kill: bool) -> None:
    """End an engine, or leave everything as it is, except what the kernel does at a kill."""
    engine, _ = ENGINES.pop(number)
    tiers = engine.core.scheduler.admission.tiers
    if kill:
        if tiers is not None and tiers._store is not None:
            tiers._store.lock.release()
    elif comm.rank:
        follow(engine)
    else:
        engine.core.stop()


def assert_same(found: Answer, want: Answer, bound: float) -> None:
    """Compare two answers, as far as they have the same tokens.

    Tokens are the likeliest: where they differ, their log-probabilities are the same all the same.
    """
    assert len(found) == len(want)
    for (token, logprob, sources), (other, wanted, told) in zip(found, want, strict=True):
        assert logprob == pytest.approx(wanted, abs=bound)
        least = max((min(each.values()) for each in (sources, told) if each), default=0.0)
        for position in sources.keys() | told.keys():
            pair = sources.get(position, 0.0), told.get(position, 0.0)
            # Below the least that both have, one may have left out what the other has not.
            if max(pair) > least + bound:
                assert pair[0] == pytest.approx(pair[1], abs=bound), position
        if token != other:
            break


class Shared:
    """Engines on one store, and the answers of an engine without caches."""

    def __init__(self, ranks: Ranks, path: str, kv: str, store: Path) -> None:
        self._ranks, self._path, self._store, self._kv = ranks, path, store, kv
        self._worlds: dict[int, int] = {}
        self._asked: dict[int, dict[str, tuple[int, ...]]] = {}  # not answered yet
        self._wanted: dict[tuple[int, ...], Answer] = {}
        self.bound = TO_8_BITS if kv == "int8" else 1e-4
        self.known: dict[int, set[str]] = {}
        self.stats: dict[int, dict[str, Any]] = {}
        self._number = 0
        self._plain = self._begin(1, {"prefix_cache": False})

    @property
    def alive(self) -> list[int]:
        return sorted(self._worlds.keys() - {self._plain})

    def _begin(self, world: int, given: dict[str, Any]) -> int:
        self._number += 1
        settings = {"kv_dtype": self._kv, **given}
        self._ranks(world).run(begin, self._number, self._path, settings)
        self._worlds[self._number] = world
        self._asked[self._number] = {}
        return self._number

    def begin(self, world: int, chunk: int, **given: Any) -> int:
        own = {"chunked_prefill_size": chunk, "prefix_store": str(self._store)}
        return self._begin(world, own | given)

    def ask(self, number: int, *prompts: tuple[int, ...], steps: int | None = None) -> None:
        """Hand prompts to an engine, take steps, and compare what it has answered."""
        asked = {f"r{self._number}-{n}": prompt for n, prompt in enumerate(prompts)}
        self._number += 1
        self._asked[number] |= asked
        ended, stats, known = self._act(number, asked, steps)
        self.stats[number], self.known[number] = stats, known
        for name, answer in ended.items():
            prompt = self._asked[number].pop(name)
            if prompt not in self._wanted:
                [self._wanted[prompt]] = self._act(self._plain, {"": prompt}, None)[0].values()
            assert_same(answer, self._wanted[prompt], self.bound)

    def _act(self, number: int, asked: dict[str, tuple[int, ...]], steps: int | None) -> Any:
        return self._ranks(self._worlds[number]).run(act, number, asked, steps)[0]

    def end(self, number: int, *, kill: bool = False) -> None:
        self._ranks(self._worlds.pop(number)).run(end, number, kill)

    def close(self) -> None:
        for number in list(self._worlds):
            self.end(number, kill=number == self._plain)

    def nodes(self) -> list[Path]:
        return [node for folder in folders(self._store) for node in node_folders(folder)]

    def counted(self, number: int, tier: str, what: str) -> int:
        return int(self.stats[number][tier][what])


def document(seed: int, cut: int = DOCUMENT) -> tuple[int, ...]:
    return ids((seed, DOCUMENT))[:cut]


def question(seed: int) -> tuple[int, ...]:
    return ids((100 + seed, 8))


MODELS = [("llama", "fp32"), ("llama", "int8"), ("bloom", "fp32")]


def folder_of(family: str, tiny: Tiny, tmp_path: Path) -> str:
    return str(make_alibi(family, tmp_path / family) if family == "bloom" else tiny(family))


@pytest.mark.parametrize(
    ("world", "family", "kv"), [(2, *each) for each in MODELS] + [(3, *MODELS[0])]
)
def test_a_copy_in_host_memory_and_another_on_disk(
    world: int, family: str, kv: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    shared = Shared(ranks, folder_of(family, tiny, tmp_path), kv, tmp_path / "store")
    reader = shared.begin(world, 24, prefix_host_gb=1.2e-4, prefix_tail_tokens=60)
    writer = shared.begin(world, 120, prefix_tail_tokens=60)
    shared.ask(writer, document(2))  # so it is the one that writes
    shared.ask(reader, document(1) + question(0))
    assert shared.counted(reader, "host", "entries") == 1
    shared.ask(writer, document(1) + question(0))
    for seed, cut in enumerate((117, 106, 95, 84)):
        # Another document takes its place on the reader's device and in host memory.
        shared.ask(reader, document(3 + seed) + question(0))
        shared.ask(reader, document(1, cut) + question(1 + seed))
    assert shared.counted(reader, "disk", "hits") >= 2  # else from host memory
    assert shared.counted(reader, "disk", "failures") == 0
    shared.close()


@pytest.mark.parametrize(
    ("world", "family", "kv"), [(2, *each) for each in MODELS] + [(3, *MODELS[0])]
)
def test_a_node_that_is_written_anew_between_two_looks(
    world: int, family: str, kv: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    shared = Shared(ranks, folder_of(family, tiny, tmp_path), kv, tmp_path / "store")
    first = shared.begin(world, 24, prefix_tail_tokens=60)
    shared.ask(first, document(1) + question(0))
    reader = shared.begin(world, 40, prefix_tail_tokens=60)
    shared.ask(reader, document(1) + question(1), document(2) + question(0))
    assert shared.counted(reader, "disk", "hits") == 1
    shared.end(first)
    for node in shared.nodes():
        remove_node(node)
    second = shared.begin(world, 120, prefix_tail_tokens=60)
    shared.ask(second, document(1) + question(0))
    shared.ask(reader, document(1, 90) + question(2))
    assert shared.counted(reader, "disk", "hits") == 2
    assert shared.counted(reader, "disk", "failures") == 0
    shared.close()


@pytest.mark.parametrize("kill", [True, False])
def test_a_node_that_is_written_anew_while_it_is_loaded(
    kill: bool, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    shared = Shared(ranks, str(tiny("llama")), "fp32", tmp_path / "store")
    first = shared.begin(2, 24, prefix_tail_tokens=60)
    shared.ask(first, document(1) + question(0))
    [node] = shared.nodes()
    parts = len(list(node.glob("*.safetensors")))
    reader = shared.begin(2, 40, prefix_tail_tokens=60)
    shared.ask(reader, document(1, 90) + question(2), steps=4)
    assert shared.counted(reader, "disk", "hits") == 0 and parts > 12  # some have been read
    shared.end(first, kill=kill)
    remove_node(node)
    second = shared.begin(2, 120, prefix_tail_tokens=60)
    shared.ask(second, document(1) + question(0))
    shared.ask(reader)
    assert shared.counted(reader, "disk", "failures") == 1
    # The other copy is taken up: the name is not given up.
    shared.ask(reader, document(2) + question(0), document(1, 95) + question(3))
    assert shared.counted(reader, "disk", "hits") == 1
    assert shared.counted(reader, "disk", "failures") == 1
    shared.close()


def machine_of(
    model: Callable[[str], str], ranks: Ranks, new_store: Callable[[], Path], tally: Counter[str]
) -> type[RuleBasedStateMachine]:
    """Histories of up to three engines at once; ``tally`` counts them."""

    class Histories(RuleBasedStateMachine):
        @initialize(family_and_kv=st.sampled_from(MODELS))
        def start(self, family_and_kv: tuple[str, str]) -> None:
            family, kv = family_and_kv
            self.store = new_store()
            self.shared = Shared(ranks, model(family), kv, self.store)
            self.seen: set[str] = set()

        @precondition(lambda self: len(self.shared.alive) < 3)
        @rule(
            world=st.sampled_from([1, 2, 2, 3]),
            chunk=st.sampled_from([24, 40, 120]),
            host=st.sampled_from([None, 1.2e-4]),
            disk=st.sampled_from([None, 1.2e-4]),
            tail=st.sampled_from([24, 60, 200]),
        )
        def begin(
            self, world: int, chunk: int, host: float | None, disk: float | None, tail: int
        ) -> None:
            given = {"prefix_store_gb": disk, "prefix_tail_tokens": tail}
            self.shared.begin(world, chunk, **given, **({"prefix_host_gb": host} if host else {}))

        def one_of(self, which: int) -> int:
            return self.shared.alive[which % len(self.shared.alive)]

        @precondition(lambda self: self.shared.alive)
        @rule(
            which=st.integers(0, 2),
            seed=st.integers(1, 3),
            cut=st.integers(60, DOCUMENT),
            number=st.integers(0, 9),
            steps=st.sampled_from([None, None, 0, 3, 9]),
        )
        def ask(self, which: int, seed: int, cut: int, number: int, steps: int | None) -> None:
            self.shared.ask(self.one_of(which), document(seed, cut) + question(number), steps=steps)
            self.note()

        @precondition(lambda self: self.shared.alive)
        @rule(which=st.integers(0, 2), steps=st.sampled_from([None, 1, 3, 9]))
        def go_on(self, which: int, steps: int | None) -> None:
            self.shared.ask(self.one_of(which), steps=steps)
            self.note()

        @precondition(lambda self: self.shared.alive)
        @rule(which=st.integers(0, 2), seed=st.integers(1, 3))
        def write_anew(self, which: int, seed: int) -> None:
            """Remove all nodes, as for want of room, and have an engine read a text again."""
            number = self.one_of(which)
            self.shared.ask(number, document(4) + question(0))
            for node in self.shared.nodes():
                remove_node(node)
            self.shared.ask(number, document(seed) + question(0))
            self.note()

        @precondition(lambda self: self.shared.alive)
        @rule(how=st.sampled_from(DAMAGE), seed=st.integers(0, 99))
        def damage(self, how: str, seed: int) -> None:
            spoil(self.store, how, seed)

        @precondition(lambda self: self.shared.alive)
        @rule(which=st.integers(0, 2), kill=st.booleans())
        def leave(self, which: int, kill: bool) -> None:
            self.shared.end(self.one_of(which), kill=kill)

        def note(self) -> None:
            known = [self.shared.known.get(number, set()) for number in self.shared.alive]
            pairs = [a & b for n, a in enumerate(known) for b in known[:n]]
            self.seen |= {"shared"} if any(pairs) else set()
            hits = [self.shared.stats.get(n, {}).get("disk", {}) for n in self.shared.alive]
            self.seen |= {"loaded"} if any(each.get("hits") for each in hits) else set()
            self.seen |= {"failed"} if any(each.get("failures") for each in hits) else set()

        def teardown(self) -> None:
            if not hasattr(self, "shared"):
                return
            for number in self.shared.alive:
                self.shared.ask(number)
            self.note()
            self.shared.close()
            tally.update(["histories", *self.seen])

    return Histories


@pytest.mark.parametrize("count", [4, pytest.param(150, marks=pytest.mark.slow)])
def test_any_history_of_engines_at_once_is_answered_as_if_nothing_were_kept(
    count: int, ranks: Ranks, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders_of: dict[str, str] = {}

    def model(family: str) -> str:
        if family not in folders_of:
            folders_of[family] = folder_of(family, tiny, tmp_path_factory.mktemp("model"))
        return folders_of[family]

    tally: Counter[str] = Counter()
    machine = machine_of(model, ranks, lambda: tmp_path_factory.mktemp("store"), tally)
    # Not shrunk: that would take hours.
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=20,
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(tally))
    assert tally["histories"] >= count
