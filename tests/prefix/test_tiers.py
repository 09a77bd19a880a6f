"""Prefixes in host memory and on disk: whatever is found there, answers are a fresh read's."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.core import EngineCore
from razor_dist.engine.request import Prefill
from razor_dist.engine.worker import follow
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.sharding import cut_chunks, held_positions
from razor_dist.prefix import tiers
from razor_dist.prefix.store import WriterLock, folders
from razor_dist.protocol.messages import CacheScope
from razor_dist.protocol.step_plan import Stop
from tests.prefix.engines import GREEDY, Ask, alone, assert_alike, engine_of, ids, serve_all
from tests.prefix.stores import TO_8_BITS, lives, q, ranges
from tests.ranks import Ranks
from tests.tiny_models import Tiny


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


def test_a_beginning_of_a_stored_prompt_is_stored_by_its_windows_alone(
    ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path, store = tiny("llama"), {"prefix_store": str(tmp_path)}
    long, short = Ask("long", ids((1, 150))), Ask("short", ids((1, 150))[:70])
    more = Ask("more", (*short.ids, *ids((9, 20))))
    first, second = ranks(1).run(lives, str(path), store, (long, short), (more,))[0]
    assert ranges(tmp_path)[:2] == [(0, 150), (68, 68)]
    assert_alike(first[0] | second[0], alone(ranks, path, (long, short, more)))
    assert second[1] == {"more": 68} and second[2]["disk"]["failures"] == 0


def test_with_full_attention_no_more_is_loaded_than_the_prompts_share(
    ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    """The caches of the engine that loads it have no room for the whole stored prompt."""
    path, full = tiny("llama"), {"attention": "full"}
    store, small = {"prefix_store": str(tmp_path), **full}, {"kv_tokens": 80}
    ranks(2).run(lives, str(path), store, (q(0),))
    other = Ask("other", (*q(0).ids[:40], *ids((9, 20))))
    [(answers, cached, stats)] = ranks(2).run(lives, str(path), store | small, (other,))[0]
    assert_alike(answers, alone(ranks, path, (other,), **full))
    assert cached == {"other": 40} and stats["disk"]["failures"] == 0


@pytest.mark.long
@pytest.mark.parametrize(("wrote", "reads", "kv"), [(4, 2, "int8"), (1, 4, "fp32"), (2, 1, "fp32")])
@pytest.mark.parametrize("family", ["llama", "bloom", "windows by head"])
def test_another_number_of_ranks_reads_the_same_store(
    family: str, wrote: int, reads: int, kv: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path = tiny("bloom" if family == "bloom" else "llama")
    own: dict[str, Any] = {"kv_dtype": kv, "windows": family == "windows by head"}
    settings = {"prefix_store": str(tmp_path / "store"), "part_bytes": 3000, **own}
    long = Ask("turn", (*q(2, 90).ids, *ids((40, 30))))
    [first] = ranks(wrote).run(lives, str(path), settings, (q(0), q(2, 90), long))[0]
    [second] = ranks(reads).run(lives, str(path), settings, (long, q(1)))[0]
    want = alone(ranks, path, (q(0), q(2, 90), long, q(1)), **own)
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
        while core.scheduler.room.tiers.active:
            core._transfer()
            core.scheduler.room.tiers.pause()
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
    assert cache is not None and not prefill.done
    tiers.close()  # the lock, which a kill gives back
    Stop().send(comm)  # nothing is saved any more
    copies = [entry for entry in cache._entries.values() if entry.end >= 64]
    return tiers.nodes.entries("disk") - len(before), len(copies)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
