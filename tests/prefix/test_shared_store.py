"""Engines that are alive at once on one prefix store answer as an engine without any cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from razor_dist.prefix.store import remove_node
from tests.prefix.engines import ids
from tests.prefix.shared_engines import DOCUMENT, Shared, document, lines, question
from tests.prefix.stores import DAMAGE, spoil
from tests.ranks import Ranks
from tests.tiny_models import Tiny

MODELS = [("llama", "fp32"), ("llama", "int8"), ("bloom", "fp32")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "family", "kv"), [(2, *each) for each in MODELS] + [(3, *MODELS[0])]
)
def test_a_copy_in_host_memory_and_another_on_disk(
    world: int, family: str, kv: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    shared = Shared(ranks, str(tiny(family)), kv, tmp_path / "store")
    room = 6e-5 if kv == "int8" else 1.2e-4  # for one of these documents
    reader = shared.begin(world, 24, prefix_host_gb=room, prefix_tail_tokens=60)
    writer = shared.begin(world, 120, prefix_tail_tokens=60)
    shared.ask(writer, document(2))  # so it is the one that writes
    shared.ask(reader, document(1) + question(0))
    assert shared.counted(reader, "host", "entries") == 1
    shared.ask(writer, document(1) + question(0))
    for seed, cut in enumerate((117, 95, 84)):
        # Another document takes its place on the reader's device and in host memory.
        shared.ask(reader, document(3 + seed) + question(0))
        shared.ask(reader, document(1, cut) + question(1 + seed))
    assert shared.counted(reader, "disk", "hits") >= 2  # else from host memory
    assert shared.counted(reader, "disk", "failures") == 0
    shared.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "family", "kv"), [(2, *each) for each in MODELS] + [(3, *MODELS[0])]
)
def test_a_node_that_is_written_anew_between_two_looks(
    world: int, family: str, kv: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    shared = Shared(ranks, str(tiny(family)), kv, tmp_path / "store")
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
    before = sum(ranks(2).run(lines))
    shared.end(first, kill=kill)
    remove_node(node)
    second = shared.begin(2, 120, prefix_tail_tokens=60)
    shared.ask(second, document(1) + question(0))
    shared.ask(reader)  # the other copy is taken up: the name is not given up
    assert shared.counted(reader, "disk", "hits") == 1
    assert shared.counted(reader, "disk", "failures") == 1
    assert sum(ranks(2).run(lines)) == before + 1
    shared.ask(reader, document(2) + question(0), document(1, 95) + question(3))
    assert shared.counted(reader, "disk", "hits") == 2
    assert shared.counted(reader, "disk", "failures") == 1
    shared.close()


def test_a_node_on_disk_follows_no_node_that_is_in_host_memory_alone(
    ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    shared = Shared(ranks, str(tiny("llama")), "fp32", tmp_path / "store")
    writer = shared.begin(2, 120)
    shared.ask(writer, document(2))
    second = shared.begin(2, 24, prefix_host_gb=1.0, prefix_tail_tokens=200)
    shared.ask(second, document(1))
    assert shared.counted(second, "host", "entries") == 1
    shared.end(writer)  # now the second one writes
    shared.ask(second, document(1) + ids((200, 40)))  # it follows on a node that this one has
    shared.end(second)
    third = shared.begin(2, 40, prefix_tail_tokens=200)
    shared.ask(third, document(1) + ids((200, 40)) + question(0))
    assert shared.counted(third, "disk", "hit_tokens") == DOCUMENT + 40
    shared.close()


def test_host_memory_serves_what_begins_like_a_prefix_of_another_number_of_ranks(
    ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    shared = Shared(ranks, str(tiny("llama")), "fp32", tmp_path / "store")
    writer = shared.begin(1, 120)
    shared.ask(writer, document(1))
    reader = shared.begin(2, 24, prefix_host_gb=1.0, prefix_tail_tokens=60)
    longer = document(1) + ids((200, 40))
    shared.ask(reader, longer + question(0))  # to host memory alone: the first one writes
    assert shared.counted(reader, "disk", "hits") == 1
    for seed in (1, 2):
        shared.ask(reader, document(1 + seed) + question(0))  # takes the device
        shared.ask(reader, longer + question(seed))
        assert shared.counted(reader, "host", "hits") == seed
    assert shared.counted(reader, "host", "hit_tokens") >= 2 * len(longer)
    assert not shared.counted(reader, "host", "failures")
    shared.close()


@dataclasses.dataclass(frozen=True)
class Turn:
    """An event for the engines or the store, and then a request to one engine."""

    event: str
    world: int  # added to the ranks of the first engine, for a new engine
    given: dict[str, Any]  # settings of the new engine
    which: int  # chooses the engine of the request
    prompt: tuple[int, ...]
    steps: int | None  # of the engine with the request; None: all


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    events = ["nothing"] * 6 + ["rewrite"] * 4
    events += ["evict", "unlock", "begin", "kill", "stop", "", ""]
    given = {
        "prefix_tail_tokens": draw(st.sampled_from([60, 200, 24] * 2 + [0])),
        "part_bytes": draw(st.sampled_from([2000, 2000, 1 << 20])),
        "prefix_store_gb": draw(st.sampled_from([None, 1.2e-4])),
        "prefix_host_gb": draw(st.sampled_from([0.0, 1.2e-4])),
    }
    # Texts that several engines come to read, and those that part from them anywhere.
    seed, whole = draw(st.sampled_from([1, 1, 2, 3])), draw(st.booleans())
    cut, asked = (
        (DOCUMENT, 0) if whole else (draw(st.integers(60, DOCUMENT)), draw(st.integers(1, 9)))
    )
    return Turn(
        draw(st.sampled_from(events)) or draw(st.sampled_from(DAMAGE)),
        draw(st.sampled_from([0, 0, 0, 1, 2])),
        given,
        draw(st.integers(0, 2)),
        document(seed, cut) + question(asked),
        draw(st.sampled_from([None, None, None, 12, 3])),
    )


def play(shared: Shared, store: Path, world: int, history: list[Turn]) -> set[str]:
    """Play a history of two or three engines at once; return what happened in it.

    Only what is damaged, or goes while it is loaded, cannot be loaded.
    """
    happened: set[str] = set()
    damaged = False
    chunks = itertools.cycle([24, 120, 40])  # others for two engines that begin after each other

    def begin(turn: Turn) -> int:
        return shared.begin(1 + (world - 1 + turn.world) % 3, next(chunks), **turn.given)

    for number, turn in enumerate(history):
        alive = shared.alive
        one = alive[turn.which % len(alive)] if alive else -1
        if turn.event in ("kill", "stop") and alive:
            shared.end(one, kill=turn.event == "kill")
        elif turn.event in ("evict", "rewrite"):
            for node in shared.nodes():
                remove_node(node)
            damaged = False
        elif turn.event == "unlock":  # so that another engine writes as well
            (store / "writer.lock").unlink(missing_ok=True)
        elif turn.event in DAMAGE:
            spoil(store, turn.event, number)
            damaged = True
        if turn.event == "rewrite" and alive:  # by another engine than the one that wrote it
            shared.end(alive[0])
            shared.ask(begin(turn), document(1) + question(0))
        while len(shared.alive) < 2 or (turn.event == "begin" and len(shared.alive) < 3):
            begin(turn)
        alive = shared.alive
        one = alive[turn.which % len(alive)]
        before, loads = shared.failures(one), one in shared.at_work
        shared.ask(one, turn.prompt, steps=turn.steps)
        assert damaged or loads or shared.failures(one) == before
        known = [shared.known.get(one, set()) for one in alive]
        if any(a & b for n, a in enumerate(known) for b in known[:n]):
            happened.add("two engines know a node")
        disks = [shared.stats[one]["disk"] for one in alive if one in shared.stats]
        happened |= {what for what in ("hits", "failures") for disk in disks if disk[what]}
    for one in shared.alive:
        shared.ask(one)
    shared.close()
    return happened


@pytest.mark.long
@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_any_history_of_engines_at_once_is_answered_as_if_nothing_were_kept(
    count: int, ranks: Ranks, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> None:
    paths = {family: str(tiny(family)) for family in ("llama", "bloom")}
    happened: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink one takes hours
    )
    @given(
        model=st.sampled_from(MODELS),
        world=st.sampled_from([2, 2, 3, 1]),
        history=st.lists(turns(), min_size=12, max_size=20),
    )
    def histories(model: tuple[str, str], world: int, history: list[Turn]) -> None:
        store = tmp_path_factory.mktemp("store")
        shared = Shared(ranks, paths[model[0]], model[1], store)
        happened.update(["histories", *play(shared, store, world, history)])

    try:
        histories()
    finally:
        print(dict(happened))
    assert happened["two engines know a node"] > 0 and happened["hits"] > 0
