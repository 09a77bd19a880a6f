"""Eviction from the device, host memory and disk: which prefixes go, and in which order."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from razor_dist.cache.accounting import CacheAccounts
from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.room import Room
from razor_dist.parallel.zigzag import Chunk
from razor_dist.prefix.device import PrefixCache
from razor_dist.prefix.index import PrefixIndex, Tier
from razor_dist.prefix.manifest import Manifest
from razor_dist.prefix.nodes import Node, Nodes

PAGE, NO_SALT = 4, (None, 0)


class Cost:
    def work(self, tokens: float, context: int) -> float:
        return tokens * (1 + context)


def accounts() -> CacheAccounts:
    sizes = {"max_sequences": 8, "max_tokens": 10**4, "num_pages": 1000, "page_size": PAGE}
    dtypes = {"dtype": torch.float32, "streaming_dtype": torch.float32}
    return CacheAccounts(
        CacheConfig(arenas=(), scratch_pages=0, max_cached=60, **sizes, **dtypes), 1
    )


def host(room: float) -> Nodes:
    return Nodes(accounts(), PrefixIndex(Cost().work), None, {"host": room})


def enter(
    nodes: Nodes, name: int, length: int, parent: Node | None = None, tier: Tier = "host"
) -> Node:
    """Enter a node of this many tokens and bytes."""
    manifest = manifest_of(name, length, None if parent is None else parent.manifest)
    nodes.enter(manifest, np.full(length, name, np.int32), parent, tier)
    return next(node for node in nodes if node.manifest is manifest)


def manifest_of(name: int, length: int, parent: Manifest | None = None) -> Manifest:
    begin, before = (0, None) if parent is None else (parent.end, parent.node)
    copy, end = f"{name:032x}", begin + length
    rows = ((begin, end, begin, end),)
    return Manifest(
        "f", copy, copy, before, begin, end, "space", 1, rows, (), 1, (), (), length, ""
    )


def names(nodes: Nodes) -> set[int]:
    return {int(node.manifest.node, 16) for node in nodes}


def test_what_was_used_last_stays_after_something_old_went_for_little() -> None:
    """A node that others follow on goes after them, however little it is worth."""
    nodes = host(60)
    parent = enter(nodes, 1, 20)
    enter(nodes, 2, 20, parent)  # worth 21 a byte, and its parent 1
    old, new = enter(nodes, 3, 10), enter(nodes, 4, 10)
    old.used_at["host"] = new.used_at["host"] = 30.0
    assert nodes.make_room("host", 20, set()) and names(nodes) == {1, 3, 4}
    nodes.used([old])
    enter(nodes, 5, 20)
    assert nodes.make_room("host", 20, set()) and names(nodes) == {3, 4, 5}
    nodes.used([new])
    enter(nodes, 6, 20)
    assert nodes.make_room("host", 10, set()) and names(nodes) == {4, 5, 6}


def test_a_node_without_its_beginning_on_disk_stays_whole_in_host_memory() -> None:
    """As if the parent's folder were lost, and the child's read again."""
    nodes = host(60)
    parent = enter(nodes, 1, 20)
    child = enter(nodes, 2, 20, parent)
    nodes.enter(child.manifest, np.full(20, 2, np.int32), None, "disk")
    assert child.where == {"host"} and child.parent is parent and parent.children == {child}


def test_the_devices_clock_never_goes_back() -> None:
    of, index = accounts(), PrefixIndex(Cost().work)
    cache = PrefixCache(of, index)
    for key, source, length in ((1, None, 8), (2, 1, 8), (3, None, 4)):
        of.open(key, source, length if source else 0, length, length)
        of[key].chunks = [Chunk(0, length, 1)]
        of.keep(key, length)
        cache.add(NO_SALT, np.full(length, key == 3, np.int32), key)
    # The first two share all their pages, so that the eviction of either frees nothing.
    assert cache.evict(cache.worths(of.sizes > 0), of.sizes > 0) == 3
    before = index.clock["device"]
    assert before > 0 and cache.evict(cache.worths(of.sizes > 0), of.sizes > 0) in (1, 2)
    assert index.clock["device"] >= before


def test_room_for_much_values_what_is_cached_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again what goes: for a long prompt hundreds of sequences may have to."""
    draw, room = random.Random(0), Room(accounts().cache, 1, Cost().work)
    of, cache = room.accounts, room.prefix_cache
    worths = {key: draw.random() for key in range(60)}
    for key, used in worths.items():
        of.open(key, None, 0, 8, 8)
        of[key].chunks = [Chunk(0, 8, 1)]
        of.keep(key, 8)
        cache.index.clock["device"] = used
        cache.add(NO_SALT, np.full(8, key, np.int32), key)
    valued: list[int] = []
    exclusive = of.exclusive
    monkeypatch.setattr(of, "exclusive", lambda key: valued.append(key) or exclusive(key))
    need = of.free
    need[0] += 2 * 40  # two pages of each
    plans = room.make(need)
    assert plans is not None
    assert [plan.sequence for plan in plans] == sorted(worths, key=worths.__getitem__)[:40]
    assert len(valued) == 60 + 40


def test_what_alone_is_left_of_shared_pages_goes_before_what_was_used_later() -> None:
    """A long prompt's copy frees little; once it has gone, the prompt holds its pages alone."""
    room = Room(accounts().cache, 1, Cost().work)
    of, cache = room.accounts, room.prefix_cache
    long = np.arange(2400, dtype=np.int32) + 10
    texts = [long, long[:2250], *(np.full(40, key, np.int32) for key in range(10))]
    for key, text in enumerate(texts):
        of.open(key, 0 if key == 1 else None, len(text) if key == 1 else 0, len(text), len(text))
        if key != 1:
            of[key].chunks = [Chunk(0, len(text), 1)]
        of.keep(key, len(text))
        cache.index.clock["device"] = 0.0 if key < 2 else 5.0
        cache.add(NO_SALT, text, key)
    need = of.free
    need[0] += 100
    plans = room.make(need)
    assert plans is not None and [plan.sequence for plan in plans] == [1, 0]


@pytest.mark.parametrize("seed", range(4))
def test_the_least_worth_goes_first_and_is_looked_for_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small nodes are evicted for a long one in the order of their worth."""
    draw, index, all_ = random.Random(seed), PrefixIndex(Cost().work), list[Node]()
    nodes = Nodes(accounts(), index, None, {"host": math.inf})
    for name in range(40):
        parent = draw.choice([None, *all_])
        all_.append(enter(nodes, name, draw.randint(1, 9), parent))
        all_[-1].used_at["host"], all_[-1].last_use = draw.randint(0, 9), name
    kept, left, wanted, worth = draw.choice(all_), set(all_), 50, index.worth
    nodes.room["host"], want = nodes.bytes["host"], 0
    while want < wanted:
        leaves = [n for n in left if not n.children & left and n not in kept.chain]
        gone = min(
            leaves,
            key=lambda n: (worth(n, "host", n.manifest.begin, n.manifest.nbytes), n.last_use),
        )
        left.remove(gone)
        want += gone.manifest.nbytes
    looked: list[Node] = []
    monkeypatch.setattr(index, "worth", lambda n, *given: looked.append(n) or worth(n, *given))
    assert nodes.make_room("host", wanted, {kept})
    assert set(nodes) == left and len(set(looked)) == len(looked)


def test_what_another_server_has_used_stays_on_disk() -> None:
    """One server writes and evicts, and all that use a node tell the time by its manifest."""
    first, second = (f"{name:032x}" for name in (1, 2))
    times = {first: 1.0, second: 2.0}
    gone: list[str] = []
    store: Any = SimpleNamespace(
        changed=lambda: False, used=times.__getitem__, touch=lambda _: None, remove=gone.append
    )
    nodes = Nodes(accounts(), PrefixIndex(Cost().work), store, {"disk": 20})
    for name in (1, 2):
        enter(nodes, name, 10, tier="disk")
    times[first] = 3.0
    assert nodes.make_room("disk", 10, set()) and gone == [second] and names(nodes) == {1}


def test_what_follows_on_a_node_that_cannot_be_read_is_counted_and_goes_first() -> None:
    gone: list[str] = []
    store: Any = SimpleNamespace(changed=lambda: False, used=lambda _: 0.0, remove=gone.append)
    index = PrefixIndex(Cost().work)
    index.names = cast("Any", SimpleNamespace(namespace=lambda *_: "space"))
    nodes = Nodes(accounts(), index, store, {"disk": 40})
    first = enter(nodes, 1, 10, tier="disk")
    enter(nodes, 2, 10, first, "disk")
    enter(nodes, 3, 10, tier="disk")
    text = np.array([1] * 10 + [2] * 10, np.int32)
    assert nodes.find(NO_SALT, text, 20).tokens == 20
    first.used_at["disk"] = 1e9
    nodes.failed(first)
    assert nodes.counts["disk"].failures == 1 and nodes.bytes["disk"] == 30
    assert nodes.find(NO_SALT, text, 20).entry is None
    assert not nodes.held(NO_SALT, text, on_disk=True)
    assert nodes.sharing(NO_SALT, text, on_disk=True) == (None, 0)
    assert nodes.sharing(NO_SALT, text, on_disk=False) == (None, 0)
    assert nodes.make_room("disk", 20, set()) and gone == [f"{2:032x}"]
    assert nodes.make_room("disk", 30, set()) and gone == [f"{2:032x}", f"{1:032x}"]
    assert names(nodes) == {3}


def test_a_copy_in_host_memory_leaves_with_the_disk_that_it_needs() -> None:
    """Its parent's copy on disk is of another number of ranks."""
    store: Any = SimpleNamespace(changed=lambda: False, used=lambda _: 0.0)
    room: dict[Tier, float] = {"host": 40, "disk": 40}
    nodes = Nodes(accounts(), PrefixIndex(Cost().work), store, room)
    first = enter(nodes, 1, 10)
    child = enter(nodes, 2, 10, first)
    enter(nodes, 3, 10, child)
    copy = replace(first.manifest, copy="another", world_size=2)
    nodes.enter(copy, np.full(10, 1, np.int32), None, "disk", (1, 1))
    other = next(node for node in nodes if node.manifest is copy)
    nodes.enter(child.manifest, np.full(10, 2, np.int32), other, "disk", (2, 2))
    nodes.leave(child, "disk")
    assert {node.manifest.copy for node in nodes} == {first.manifest.copy, "another"}
    assert nodes.bytes == {"host": 10, "disk": 10} and len(nodes.take_left_host()) == 2


def test_a_node_on_disk_whose_parent_comes_later_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [manifest_of(1, 10)]
    for name in (2, 3):
        found.append(manifest_of(name, 10, found[-1]))
    tokens = {one.node: (one, np.full(10, int(one.node, 16), np.int32)) for one in found}
    there, read = {one.node: (1, 1) for one in found[1:]}, list[str]()
    store: Any = SimpleNamespace(
        changed=lambda: True, stamps=lambda: there, used=lambda _: 0.0, folder=Path()
    )
    monkeypatch.setattr(
        "razor_dist.prefix.nodes.read_node",
        lambda path: read.append(path.name) or tokens[path.name],
    )
    nodes = Nodes(accounts(), PrefixIndex(Cost().work), store, {"disk": 100})
    nodes.refresh()
    assert not names(nodes) and sorted(read) == sorted(there)
    there[found[2].node] = 2, 2  # written anew
    there[found[0].node] = 1, 1
    nodes.refresh()
    nodes.refresh()
    assert names(nodes) == {1, 2, 3} and nodes.bytes["disk"] == 30
    assert sorted(read) == sorted([*tokens, found[2].node])


def test_another_copy_takes_the_place_of_a_node_that_cannot_be_read() -> None:
    store: Any = SimpleNamespace(changed=lambda: False, used=lambda _: 0.0)
    nodes = Nodes(accounts(), PrefixIndex(Cost().work), store, {"disk": 40})
    first = enter(nodes, 1, 10, tier="disk")
    enter(nodes, 2, 10, first, "disk")
    nodes.failed(first)
    copy = replace(first.manifest, copy="another")
    nodes.enter(copy, np.full(10, 1, np.int32), None, "disk", (1, 1))
    [node] = nodes  # what follows is looked for again
    assert node.manifest is copy and not node.lost and nodes.bytes["disk"] == 10
