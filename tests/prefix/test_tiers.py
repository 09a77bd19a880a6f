"""Prefixes in host memory and on disk: whatever is found there, answers are a fresh read's."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.core import EngineCore
from razor_dist.engine.request import Prefill
from razor_dist.engine.step_cost import StepCost
from razor_dist.engine.worker import follow
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.sharding import cut_chunks, held_positions
from razor_dist.prefix import tiers, transfer
from razor_dist.prefix.parts import BadPartError
from razor_dist.prefix.store import (
    PrefixStore,
    WriterLock,
    check_node,
    folders,
    node_folders,
    read_node,
)
from razor_dist.protocol.messages import CacheScope
from razor_dist.protocol.step_plan import Op, StepPlan
from tests.engine.test_core import evict_all
from tests.prefix.engines import (
    GREEDY,
    Answers,
    Ask,
    Told,
    alone,
    assert_alike,
    engine_of,
    ids,
    serve,
    serve_all,
)
from tests.ranks import Ranks
from tests.tiny_models import Tiny

# Of 8 bits a number between two steps, 1/127 of its row's largest, becomes either, by what ranks
# and machines round otherwise: two engines' logprobs then differ by up to 1.1e-2, and theirs from
# float32's by up to 2.5e-2 (docs/LOG.md). That what is stored is read bit for bit has a test of its
# own; keys of another prefix change them by 0.7.
TO_8_BITS = 2e-2


def lives(
    comm: Communicator, path: str, changed: dict[str, Any], *each: tuple[Ask, ...]
) -> list[tuple[Answers, Told, dict[str, Any]]]:
    """Engines one after another, each with requests; their answers, cached tokens and counters."""
    found = [serve(comm, path, changed, asks) for asks in each]
    return [(answers, cached, stats.get("prefix_cache", {})) for answers, cached, stats in found]


def ranges(store: Path) -> list[tuple[int, int]]:
    """First and last tokens of the nodes in a store of one fingerprint."""
    [folder] = folders(store)
    manifests = [read_node(path)[0] for path in node_folders(folder)]
    return sorted((manifest.begin, manifest.end) for manifest in manifests)


def q(number: int, tokens: int = 12) -> Ask:
    return Ask(f"q{number}", ids((1, 150), (10 + number, tokens)))


@pytest.mark.parametrize(("world", "kv"), [(1, "fp32"), (2, "bf16"), (4, "int8")])
def test_a_later_engine_begins_from_what_is_on_disk(
    world: int, kv: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path, store = tiny("qwen2"), {"prefix_store": str(tmp_path), "kv_dtype": kv}
    before, after = (q(0),), (q(1), q(2, 90), Ask("turn", (*q(2, 90).ids, *ids((40, 9)))))
    first, second = ranks(world).run(lives, str(path), store, before, after)[0]
    want = alone(ranks, path, before + after, kv_dtype=kv)
    bound = {"fp32": 1e-4, "bf16": 5e-3, "int8": TO_8_BITS}[kv]
    assert_alike(first[0] | second[0], want, bound)
    assert first[1] == {"q0": 0} and second[1] == {"q1": 150, "q2": 150, "turn": 240}
    stats = second[2]["disk"]
    assert (stats["hits"], stats["hit_tokens"], stats["failures"]) == (1, 150, 0)
    assert ranges(tmp_path) == [(0, 162), (150, 167), (150, 240)]
    assert {p.stat().st_mode & 0o077 for p in tmp_path.rglob("*")} == {0}


@pytest.mark.parametrize(("wrote", "reads", "kv"), [(4, 2, "int8"), (1, 4, "fp32"), (2, 1, "fp32")])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_another_number_of_ranks_reads_the_same_store(
    family: str, wrote: int, reads: int, kv: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path = tiny(family)
    settings = {"prefix_store": str(tmp_path / "store"), "part_bytes": 3000, "kv_dtype": kv}
    long = Ask("turn", (*q(2, 90).ids, *ids((40, 30))))
    [first] = ranks(wrote).run(lives, str(path), settings, (q(0), q(2, 90), long))[0]
    [second] = ranks(reads).run(lives, str(path), settings, (long, q(1)))[0]
    want = alone(ranks, path, (q(0), q(2, 90), long, q(1)), kv_dtype=kv)
    bound = 1e-4 if kv == "fp32" else TO_8_BITS
    assert_alike(first[0], {name: want[name] for name in ("q0", "q2", "turn")}, bound)
    assert_alike(second[0], {name: want[name] for name in ("turn", "q1")}, bound)
    assert second[1] == {"turn": 269, "q1": 150} and second[2]["disk"]["failures"] == 0


def read_on(core: EngineCore, ask: Ask, part: float = 0.75) -> Prefill:
    """Read a part of a prompt, of which the disk has what it is to have."""
    core.scheduler.admission.checkpoint_seconds = 0.0
    core.add(ask.name, list(ask.ids), ask.params, scope=CacheScope(ask.salt))
    core.step()  # which admits it
    [prefill] = core.scheduler.prefills.values()
    while prefill.position < prefill.end * part:
        core.step()
        while core.scheduler.room.moves:
            core._transfer()
            core.scheduler.room.pause()
    return prefill


def half_read(
    comm: Communicator, path: str, given: dict[str, Any], before: tuple[Ask, ...], ask: Ask
) -> tuple[int, int]:
    """Answer others, read three quarters of a prompt and end as if killed.

    Return how many of its nodes are whole, and how many copies of it are cached.
    """
    engine = engine_of(comm, path, given)
    if comm.rank:
        follow(engine)
        return 0, 0
    core = engine.core
    serve_all(core, before)
    prefill = read_on(core, ask)
    tiers, cache = core.scheduler.room.tiers, core.scheduler.room.prefix_cache
    assert tiers is not None and cache is not None and not prefill.done
    tiers.close()  # the lock, which a kill gives back
    StepPlan(Op.STOP).send(comm)  # nothing is saved any more
    copies = [entry for entry in cache._entries.values() if entry.end >= 64]
    return tiers.nodes.entries("disk") - len(before), len(copies)


@pytest.mark.parametrize(("world", "others"), [(1, 0), (2, 0), (1, 20)])
def test_a_prompt_in_work_is_on_disk_up_to_its_last_checkpoint(
    world: int, others: int, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    """Also where what is cached must go for that; of its copies there is one at a time."""
    path, store = str(tiny("llama")), {"prefix_store": str(tmp_path)}
    long = Ask("long", ids((1, 390)))
    before = tuple(Ask(f"o{n}", ids((2 + n, 20))) for n in range(others))
    kept, copies = ranks(world).run(half_read, path, store, before, long)[0]
    whole = ranges(tmp_path)
    assert copies == 1 and kept + others == len(whole) and kept > 1
    [(answers, found, stats)] = ranks(world).run(lives, path, store, (long,))[0]
    assert found["long"] == whole[-1][1] and found["long"] >= 64
    assert_alike(answers, alone(ranks, Path(path), (long,)))
    assert stats["disk"]["failures"] == 0


def whole(comm: Communicator, path: str, given: dict[str, Any], ask: Ask) -> None:
    core = engine_of(comm, path, given).core
    read_on(core, ask, 1.0)
    core.stop()


@pytest.mark.parametrize("tokens", [300, 333, 365])
def test_a_prompt_that_went_to_disk_while_it_was_read_is_there_to_its_end(
    tokens: int, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    """Its last checkpoint leaves as much as makes a node."""
    ask = Ask("long", ids((1, tokens)))
    ranks(1).run(whole, str(tiny("llama")), {"prefix_store": str(tmp_path)}, ask)
    assert len(ranges(tmp_path)) > 2 and ranges(tmp_path)[-1][1] == tokens


def stops(comm: Communicator, path: str, given: dict[str, Any], writes: bool) -> list[int]:
    """Return where reading a prompt stops, in an engine that may write to the store or may not."""
    core = engine_of(comm, path, given).core
    other = mock.patch.object(tiers.Writing, "is_possible", False)
    with contextlib.nullcontext() if writes else other:
        return read_on(core, Ask("long", ids((1, 390)))).checkpoints


@pytest.mark.parametrize(("sequences", "writes"), [(1, True), (4, False)])
def test_reading_does_not_stop_for_a_copy_that_cannot_go_to_disk(
    sequences: int, writes: bool, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    """There is no room beside the one sequence; or another process writes to the store."""
    given = {"prefix_store": str(tmp_path), "max_num_seqs": sequences}
    assert ranks(1).run(stops, str(tiny("llama")), given, writes) == [[]]


def held(
    comm: Communicator, path: str, given: dict[str, Any], ask: Ask, end: int
) -> tuple[int, dict[int, tuple[bytes, bytes]], list[dict[str, Tensor]]]:
    """Answer a prompt; return what a rank then holds of its first ``end`` tokens.

    The result has the number of tokens that were found in a cache; by position, the bytes of the
    retrieval heads' keys and values; and by window, the streaming heads' state.
    """
    engine = engine_of(comm, path, given)
    found = 0
    if comm.rank:
        follow(engine)
    else:
        found = serve_all(engine.core, (ask,))[1][ask.name]
        engine.core.stop()
    runner = engine.runner
    sequence = min(runner.sequences.values(), key=lambda s: (s.length < end, s.length))
    positions = held_positions(cut_chunks(sequence.chunks, end), 0, end, comm.rank, comm.size)
    k, v = runner.caches.pages.read(sequence.table, 0, len(positions))
    k, v = (rows.transpose(0, 1).contiguous().view(torch.uint8).numpy() for rows in (k, v))
    rows = {int(at): (k[n].tobytes(), v[n].tobytes()) for n, at in enumerate(positions)}
    states = [
        cache.state(slot, cache.rows, end, end)
        for cache, slot in zip(runner.caches.streaming, sequence.streaming, strict=True)
    ]
    return found, rows, states


@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("wrote", "reads"), [(1, 2), (4, 2), (2, 1)])
def test_what_is_read_is_what_was_written(
    wrote: int, reads: int, kv: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path, ask = str(tiny("llama")), q(0)
    settings = {"prefix_store": str(tmp_path), "part_bytes": 3000, "kv_dtype": kv}
    before = ranks(wrote).run(held, path, settings, ask, 161)
    after = ranks(reads).run(held, path, settings, ask, 161)
    assert [found for found, _, _ in before] == [0] * wrote
    assert after[0][0] == 161
    written, read = (
        {at: row for _, rows, _ in each for at, row in rows.items()} for each in (before, after)
    )
    assert sorted(written) == list(range(161)) and read == written
    assert sum(len(rows) for _, rows, _ in after) == 161  # each on one rank
    want = before[0][2]
    for _, _, states in after:
        for one, other in zip(states, want, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in ("k", "v", "at"))
            # Of tokens that were dropped since, which are taken off again.
            torch.testing.assert_close(one["sums"], other["sums"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_host_memory_holds_what_leaves_the_device(world: int, ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    # Pages for about one document; host memory for two.
    small = {"prefix_host_gb": 5e-4, "kv_tokens": 260, "max_num_seqs": 1, "part_bytes": 5000}
    docs = [Ask(f"d{n}", ids((n, 150), (50 + n, 10))) for n in (0, 1, 0, 1, 0)]
    asks = tuple(dataclasses.replace(ask, name=f"a{n}") for n, ask in enumerate(docs))
    [(answers, cached, stats)] = ranks(world).run(lives, str(path), small, asks)[0]
    assert_alike(answers, alone(ranks, path, asks))
    assert cached == {"a0": 0, "a1": 0, "a2": 159, "a3": 159, "a4": 159}
    assert stats["host"]["hits"] == 3 and stats["host"]["failures"] == 0 and "disk" not in stats
    assert 0 < stats["host"]["bytes"] <= 5e-4 * 2**30


def test_salts_are_apart_on_disk_and_not_written(ranks: Ranks, tiny: Tiny, tmp_path: Path) -> None:
    path, store = tiny("llama"), {"prefix_store": str(tmp_path)}
    salted = [dataclasses.replace(q(0), name=f"s{n}", salt=f"a secret {n}") for n in range(3)]
    first, second = ranks(1).run(
        lives, str(path), store, (salted[0],), (q(0), salted[0], salted[1])
    )[0]
    assert_alike(first[0] | second[0], alone(ranks, path, (salted[0], q(0), salted[1])))
    assert second[1] == {"q0": 0, "s0": 161, "s1": 0}
    assert all(b"secret" not in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


@pytest.mark.parametrize("world", [1, 2])
def test_a_prompt_that_is_not_to_be_cached_is_kept_nowhere(
    world: int, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path, both = tiny("llama"), {"prefix_store": str(tmp_path), "prefix_host_gb": 1.0}
    two = dataclasses.replace(GREEDY, n=2, max_tokens=60)
    secret = ids((1, 300))
    private = [Ask(f"p{n}", secret, two, cache_prompt=False, wait=n != 1) for n in range(3)]
    first, second = ranks(world).run(
        lives, str(path), both, tuple(private), (private[1], Ask("open", secret), private[0])
    )[0]
    assert_alike(first[0] | second[0], alone(ranks, path, (*private, Ask("open", secret))))
    assert first[1] == {"p0": 0, "p1": 0, "p2": 0} and second[1] == {"p1": 0, "open": 0, "p0": 0}
    for stats, entries in ((first[2], 0), (second[2], 1)):
        found = {tier: stats[tier]["entries"] for tier in ("host", "disk")}
        assert found == {"host": entries, "disk": entries}
        assert bool(stats["entries"]) == bool(entries)


@pytest.mark.parametrize("size", [0, 31, 100])
def test_a_damaged_secret_is_refused_at_the_start(tmp_path: Path, size: int) -> None:
    (tmp_path / "secret").write_bytes(b"x" * size)
    sentence = f"{tmp_path / 'secret'} must hold 32 bytes and holds {size}: put back a copy"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        PrefixStore(tmp_path, {})


def edit(node: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a node's manifest, and its checksum with it."""
    file = node / "manifest.json"
    fields = json.loads(file.read_bytes())
    del fields["sha256"]
    change(fields)
    fields["sha256"] = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(fields))


def spoil(store: Path, how: str, seed: int) -> None:
    """Damage one file of a store, as a disk, a user or another program may."""
    draw = random.Random(seed)
    nodes = [node for folder in folders(store) for node in node_folders(folder)]
    if not nodes:
        return
    node = draw.choice(nodes)
    file = draw.choice(sorted(node.iterdir()))
    data = bytearray(file.read_bytes())
    if how == "flip" and data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(data[: draw.randrange(len(data))])
    elif how == "lose":
        file.unlink()
    elif how == "foreign":
        other = draw.choice([p for n in nodes for p in n.iterdir() if p.suffix == file.suffix])
        shutil.copyfile(other, file) if other != file else file.unlink()
    elif how == "edit":

        def change(fields: dict[str, Any]) -> None:
            name = draw.choice([name for name, value in fields.items() if value not in (None, [])])
            value, by = fields[name], draw.choice([-1, 1, 7])
            if isinstance(value, list) and isinstance(value[0], list):
                value[draw.randrange(len(value))][draw.randrange(4)] += by
            elif isinstance(value, list):
                value[draw.randrange(len(value))] += by
            else:
                fields[name] = value + by if isinstance(value, int) else value[::-1]

        with contextlib.suppress(OSError, ValueError):  # lost or damaged before
            edit(node, change)
    elif how == "lose all":
        shutil.rmtree(node)
    elif how == "leave":
        shutil.copytree(node, node.with_name(f"{node.name}.00000000.new"), dirs_exist_ok=True)


DAMAGE = ["flip", "cut", "lose", "foreign", "edit", "lose all", "leave"]


@pytest.mark.long
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_damaged_is_read_anew_and_healed(
    how: str, world: int, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path, store = tiny("llama"), {"prefix_store": str(tmp_path)}
    want = alone(ranks, path, (q(0), q(1)))
    ranks(world).run(lives, str(path), store, (q(0),))
    for seed in range(3):
        spoil(tmp_path, how, seed)
        [(answers, cached, _)] = ranks(world).run(lives, str(path), store, (q(0), q(1)))[0]
        assert_alike(answers, want)
        assert cached["q0"] in ((0, 161) if how == "leave" else (0, 161, 150))
        assert cached["q1"] == 150
    new = Ask("new", ids((6, 100)))
    [(answers, cached, _)] = ranks(world).run(lives, str(path), store, (q(0), new))[0]
    assert cached == {"q0": 161, "new": 0}
    assert_alike({"q0": answers["q0"]}, {"q0": want["q0"]})
    [folder] = folders(tmp_path)
    assert not list(folder.glob("*.new")) and not list(folder.glob("*.old"))


def test_a_damaged_prefix_is_one_line_in_the_log(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, store = tiny("llama"), {"prefix_store": str(tmp_path)}
    lives(Communicator(None), str(path), store, (q(0),))
    [folder] = folders(tmp_path)
    [part] = folder.glob("*/kv-*")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(BadPartError, match=r"kv-000-00000.* it is damaged"):
        check_node(part.parent)
    with caplog.at_level(logging.WARNING):
        [(_, cached, stats)] = lives(Communicator(None), str(path), store, (q(0),))
    assert cached == {"q0": 0} and stats["disk"]["failures"] == 1
    [record] = [r for r in caplog.records if r.name.startswith("razor_dist.prefix.t")]
    assert "kv-000-00000.safetensors" in record.message
    assert check_node(part.parent).end == 162  # written again


def test_what_a_damaged_prefix_follows_on_is_loaded(tiny: Tiny, tmp_path: Path) -> None:
    path, store = str(tiny("llama")), {"prefix_store": str(tmp_path)}
    asks = q(0), q(2, 90)
    lives(Communicator(None), path, store, asks)
    [folder] = folders(tmp_path)
    [last] = [node for node in node_folders(folder) if read_node(node)[0].end == 240]
    next(last.glob("state-*")).unlink()
    [(_, cached, stats)] = lives(Communicator(None), path, store, (Ask("turn", (*asks[1].ids, 7)),))
    assert cached == {"turn": 150}
    assert (stats["disk"]["failures"], stats["disk"]["hits"]) == (1, 1)


def test_what_follows_on_a_prefix_is_found_once_that_is_healed(tiny: Tiny, tmp_path: Path) -> None:
    path, store = str(tiny("llama")), {"prefix_store": str(tmp_path)}
    asks = q(0), q(2, 90)
    lives(Communicator(None), path, store, asks)
    [folder] = folders(tmp_path)
    [first] = [node for node in node_folders(folder) if read_node(node)[0].begin == 0]
    next(first.glob("kv-*")).unlink()
    os.utime(folder, (1e9, 1e9))  # a change of late would be looked for again in any case
    again = q(0), Ask("turn", (*asks[1].ids, 7))
    [(_, cached, _)] = lives(Communicator(None), path, store, again)
    assert cached == {"q0": 0, "turn": 240}


def test_a_store_of_another_format_is_a_miss_and_one_line(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, store = str(tiny("llama")), {"prefix_store": str(tmp_path)}
    asks = tuple(Ask(f"d{n}", ids((n, 150))) for n in range(3))
    lives(Communicator(None), path, store, asks)
    [folder] = folders(tmp_path)
    for node in node_folders(folder):
        edit(node, lambda fields: fields.update(format=1))
    with caplog.at_level(logging.WARNING):
        [(_, cached, stats)] = lives(Communicator(None), path, store, asks[:1])
    assert cached == {"d0": 0} and stats["disk"]["failures"] == 0
    [record] = [r for r in caplog.records if r.name.startswith("razor_dist.prefix.n")]
    assert "stored prefixes left out: 3, its format is 1" in record.message
    # The writer has removed them, and written what was asked in this format.
    assert len(node_folders(folder)) == 1
    [(_, cached, _)] = lives(Communicator(None), path, store, asks)
    assert cached == {"d0": 149, "d1": 0, "d2": 0}


def test_other_settings_share_nothing_and_a_reader_writes_nothing(
    tiny: Tiny, tmp_path: Path
) -> None:
    path, store = str(tiny("llama")), {"prefix_store": str(tmp_path)}
    alone_ = Communicator(None)
    lives(alone_, path, store, (q(0),))
    [(_, cached, _)] = lives(alone_, path, store | {"window_min": 16}, (q(0),))
    assert cached == {"q0": 0} and len(folders(tmp_path)) == 2
    lock = WriterLock(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert lock.acquire()
    [(_, cached, _)] = lives(alone_, path, store, (q(1), Ask("new", ids((7, 160)))))
    lock.release()
    assert cached == {"q1": 150, "new": 0} and sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ConfigError, match="prefix_store"):
        EngineConfig(model=path, prefix_cache=False, **store)


def test_the_store_keeps_within_its_bound(tiny: Tiny, tmp_path: Path) -> None:
    path = str(tiny("llama"))
    docs = tuple(Ask(f"d{n}", ids((n, 150))) for n in range(6))
    lives(Communicator(None), path, {"prefix_store": str(tmp_path)}, docs[:1])
    size = sum(p.stat().st_size for p in tmp_path.rglob("kv-*"))
    size += sum(p.stat().st_size for p in tmp_path.rglob("state-*"))
    bounded = {"prefix_store": str(tmp_path), "prefix_store_gb": 2.5 * size / 2**30}
    [(_, _, stats)] = lives(Communicator(None), path, bounded, docs)
    assert stats["disk"]["entries"] == 2 and stats["disk"]["evictions"] == 4
    assert len(ranges(tmp_path)) == 2


def test_what_disk_has_of_a_pinned_prefix_stays(tiny: Tiny, tmp_path: Path) -> None:
    path, text = str(tiny("llama")), ids((1, 120))
    alone = {"prefix_store": str(tmp_path / "alone")}
    [(_, _, first)] = lives(Communicator(None), path, alone, (Ask("a", text),))
    size, store = first["disk"]["bytes"], tmp_path / "bounded"
    bounded = {"prefix_store": str(store), "prefix_store_gb": 2.5 * size / 2**30, "kv_tokens": 400}
    core = engine_of(Communicator(None), path, bounded).core
    core.add("pin", list(text), GREEDY, pin=True)
    serve_all(core, tuple(Ask(f"r{n}", ids((n, 120))) for n in range(2, 7)))
    stats = core.stats()
    assert stats["prefix_cache"]["disk"]["evictions"] > 1
    assert stats["pinned"]["pin"]["disk"] > 0.9 * size and (0, 120) in ranges(store)
    core.abort("pin")  # then it goes like others
    serve_all(core, tuple(Ask(f"r{n}", ids((n, 120))) for n in range(7, 12)))
    core.add("pin", list(text), GREEDY, pin=True)
    assert core.scheduler.room.tiers is not None
    [again] = core.scheduler.waiting
    assert core.scheduler.room.tiers.held(again.namespace, again.tokens)["disk"] == 0
    core.stop()


def test_nothing_is_evicted_for_what_cannot_fit(tiny: Tiny, tmp_path: Path) -> None:
    path, text = str(tiny("llama")), ids((1, 200))
    alone = {"prefix_store": str(tmp_path / "alone")}
    [(_, _, first)] = lives(Communicator(None), path, alone, (Ask("a", text),))
    bounded = {"prefix_store": str(tmp_path / "bounded"), "max_num_seqs": 4}
    bounded["prefix_store_gb"] = 2.05 * first["disk"]["bytes"] / 2**30
    core = engine_of(Communicator(None), path, bounded).core
    core.add("pin", list(text), GREEDY, pin=True)
    serve_all(core, tuple(Ask(f"r{n}", ids((n, 30))) for n in range(2, 6)))
    before = ranges(tmp_path / "bounded")
    assert len(before) == 5
    serve_all(core, (Ask("large", ids((9, 230))),))  # which does not fit beside the pinned one
    assert ranges(tmp_path / "bounded") == before
    assert core.stats()["prefix_cache"]["disk"]["evictions"] == 0
    core.stop()


def test_what_was_used_last_stays_on_disk_after_a_restart(tiny: Tiny, tmp_path: Path) -> None:
    path, store = str(tiny("llama")), {"prefix_store": str(tmp_path)}

    def asked(number: int, *tail: tuple[int, int]) -> Ask:
        return Ask(f"r{number}{len(tail)}", ids((number, 200), *tail))

    [(_, _, first)] = lives(Communicator(None), path, store, tuple(map(asked, (1, 2, 3))))
    bounded = store | {"prefix_store_gb": 1.02 * first["disk"]["bytes"] / 2**30}
    again = (asked(2, (50, 4)), asked(4))
    [(_, cached, _)] = lives(Communicator(None), path, bounded, again)
    assert cached == {"r21": 200, "r40": 0}
    [(_, cached, _)] = lives(Communicator(None), path, store, tuple(map(asked, (1, 2, 3))))
    assert cached == {"r10": 0, "r20": 199, "r30": 199}


def test_what_was_used_once_leaves_host_memory_beside_a_disk(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is worth least leaves, by the seconds that prompts of this length took lately.
    monkeypatch.setattr(StepCost, "learn", lambda *_: None)
    path, number = str(tiny("llama")), 0
    both = {"prefix_store": str(tmp_path), "prefix_host_gb": 1.0}
    [(_, _, first)] = lives(Communicator(None), path, both, (Ask("a", ids((99, 120))),))
    both["prefix_host_gb"] = 2.5 * first["host"]["bytes"] / 2**30  # room for two
    core = engine_of(Communicator(None), path, both).core
    for documents in (range(1, 4), (2, 3), range(4, 12), (10, 11)):
        evict_all(core)  # so that what was read before is loaded
        before = core.stats()["prefix_cache"]["host"]["hits"]
        for document in documents:
            number += 1
            serve_all(core, (Ask(f"r{number}", ids((document, 120))),))
    assert core.stats()["prefix_cache"]["host"]["hits"] == before + 2
    core.stop()


def test_a_disk_that_is_full_is_counted(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(transfer, "write_file", full)
        store = {"prefix_store": str(tmp_path), "prefix_host_gb": 1.0}
        [(_, _, stats)] = lives(Communicator(None), str(tiny("llama")), store, (q(0),))
    assert ranges(tmp_path) == []
    assert (stats["disk"]["failures"], stats["host"]["failures"]) == (1, 0)


@pytest.mark.parametrize("why", ["it cannot be locked", "another writes"])
def test_a_store_that_cannot_be_written_is_one_line_in_the_log(
    why: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lock, stuck = WriterLock(tmp_path), why == "it cannot be locked"
    if stuck:
        denied = mock.Mock(side_effect=OSError("No locks available"))
        monkeypatch.setattr(WriterLock, "acquire", denied)
    else:
        assert lock.acquire()
    with caplog.at_level(logging.WARNING):
        asks = q(0), Ask("another", ids((7, 160)))
        store = {"prefix_store": str(tmp_path)}
        [(_, _, stats)] = lives(Communicator(None), str(tiny("llama")), store, asks)
    lock.release()
    assert stats["disk"]["failures"] == stuck
    [record] = [r for r in caplog.records if r.name == tiers.__name__]
    assert ("No locks available" if stuck else "another process writes") in record.message


@pytest.mark.parametrize("why", ["another writes", "full"])
def test_what_host_memory_alone_has_reaches_the_disk(
    why: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny("llama"))
    both = {"prefix_store": str(tmp_path), "prefix_host_gb": 1.0}
    monkeypatch.setattr(tiers, "_DISK_SECONDS", 1e6)
    core = engine_of(Communicator(None), path, both).core
    lock = WriterLock(tmp_path)
    if why == "full":
        assert core.scheduler.room.tiers is not None
        core.scheduler.room.tiers.writing.failed(OSError("No space left on device"))
    else:
        assert lock.acquire()
    serve_all(core, (q(1),))
    held = core.stats()["prefix_cache"]["host"]["bytes"]
    assert ranges(tmp_path) == [] and held
    lock.release()
    monkeypatch.setattr(tiers, "_DISK_SECONDS", 0.0)
    serve_all(core, (q(2),))
    assert ranges(tmp_path) == [(0, 162)]
    assert core.stats()["prefix_cache"]["host"]["bytes"] == held  # it has the text already
    core.stop()


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, str, tuple[Ask, ...]]]:
    """Engines of some ranks, what happens to the store before each, and its requests."""
    found, number = [], 0
    for _ in range(draw(st.integers(2, 4))):
        asks = []
        for _ in range(draw(st.integers(1, 4))):
            seeds = st.integers(0, 1)
            parts = [(draw(seeds), draw(st.sampled_from([30, 70])))]
            parts += [(draw(seeds) + 2, draw(st.integers(1, 60)))]
            parts += [(number + 9, draw(st.integers(0, 9)))]
            params = dataclasses.replace(GREEDY, max_tokens=draw(st.sampled_from([1, 6, 30])))
            ask = Ask(f"r{number}", ids(*parts), params, wait=draw(st.booleans()))
            asks.append(ask)
            number += 1
        damage = draw(st.sampled_from(["nothing", "nothing", *DAMAGE]))
        found.append((draw(st.sampled_from([1, 2, 4])), damage, tuple(asks)))
    return found


@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    found=runs(),
    host=st.sampled_from([0.0, 2e-4]),
    bound=st.sampled_from([None, 2e-4]),
    part=st.sampled_from([2000, 1 << 20]),
    tail=st.sampled_from([0, 24]),
    seed=st.integers(0, 99),
)
def test_any_history_of_engines_is_answered_as_if_nothing_were_kept(
    found: list[tuple[int, str, tuple[Ask, ...]]],
    host: float,
    bound: float | None,
    part: int,
    tail: int,
    seed: int,
    ranks: Ranks,
    tiny: Tiny,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path, store = tiny("llama"), tmp_path_factory.mktemp("store")
    both = {"prefix_tail_tokens": tail, "kv_tokens": 600}
    changed = {"prefix_store": str(store), "prefix_host_gb": host, "prefix_store_gb": bound}
    changed |= {"part_bytes": part, **both}
    for world, damage, asks in found:
        spoil(store, damage, seed)
        [(answers, _, _)] = ranks(world).run(lives, str(path), changed, asks)[0]
        assert_alike(answers, alone(ranks, path, asks, **both))
