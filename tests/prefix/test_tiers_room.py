"""Room for prefixes in host memory and on disk: what leaves them, and disks that take nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from razor_dist.engine.step_cost import StepCost
from razor_dist.parallel.comm import Communicator
from razor_dist.prefix import tiers, transfer
from razor_dist.prefix.store import WriterLock
from tests.engine.cores import evict_all
from tests.prefix.engines import GREEDY, Ask, engine_of, ids, serve_all
from tests.prefix.stores import lives, q, ranges
from tests.tiny_models import Tiny


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


@pytest.mark.parametrize("first, enough, cached", [(120, 2, 120), (30, 2, 149), (30, 1, 30)])
def test_a_restart_shares_what_pinned_prefixes_share(
    first: int, enough: int, cached: int, tiny: Tiny, tmp_path: Path
) -> None:
    """Loaded tokens are held twice if that gains more, and if the quota has room for them."""
    text, found = ids((1, 150)), {}

    def pin_both(quota: int) -> tuple[int, int]:
        core = engine_of(Communicator(None), str(tiny("llama")), {"prefix_store": str(tmp_path)})
        own = {"pin": True, "quota": ("key", quota)}
        core.core.add("a", list(text[:first]), GREEDY, **own)
        core.core.add("b", list(text[first:]), GREEDY, prefix_id="a", **own)
        _, cached = serve_all(core.core, ())
        found.update(cached)
        held = sum(core.core.stats().kv_bytes_per_rank)
        counted = sum(pin.nbytes for pin in core.core.scheduler.pinned.values())
        core.core.stop()
        return held, counted

    held, counted = pin_both(10**9)
    again, counts = pin_both(enough * counted)
    assert found["b"] == cached
    twice = cached > first
    assert (again > held) == twice and (counts > counted) == twice
    assert again - held <= (counts - counted) * 1.2


def test_what_was_copied_counts_once_and_no_longer_than_it_is_there(
    tiny: Tiny, tmp_path: Path
) -> None:
    text, page = ids((1, 200)), 0
    for restarted in (False, True):
        core = engine_of(Communicator(None), str(tiny("llama")), {"prefix_store": str(tmp_path)})
        for name, prefix, part in ("a", None, (0, 20)), ("b", "a", (20, 70)), ("c", "b", (70, 200)):
            own = {"pin": True, "quota": ("key", 10**9), "prefix_id": prefix}
            core.core.add(name, list(text[slice(*part)]), GREEDY, **own)
        serve_all(core.core, ())
        scheduler = core.core.scheduler
        need, sizes = scheduler.admission.need, []
        others = {one.id: one for one in scheduler.pinned.values()}
        page = need.page_bytes(1)
        for ended in ("a", "b", "c"):
            counted = sum(one.nbytes for one in others.values() if not one.ended)
            sizes.append((counted, need._held_by("key", others.values())))
            core.core.abort(ended)
        core.core.stop()
        if restarted:  # each has all of its own
            assert all(counted - 2 * page <= held <= counted for counted, held in sizes), sizes
    assert page


@pytest.mark.long
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
    assert stats.prefix_cache.lower["disk"].evictions > 1
    assert stats.pinned["pin"]["disk"] > 0.9 * size and (0, 120) in ranges(store)
    core.abort("pin")  # then it goes like others
    serve_all(core, tuple(Ask(f"r{n}", ids((n, 120))) for n in range(7, 12)))
    core.add("pin", list(text), GREEDY, pin=True)
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
    assert core.stats().prefix_cache.lower["disk"].evictions == 0
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


@pytest.mark.long
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
        before = core.stats().prefix_cache.lower["host"].hits
        for document in documents:
            number += 1
            serve_all(core, (Ask(f"r{number}", ids((document, 120))),))
    assert core.stats().prefix_cache.lower["host"].hits == before + 2
    core.stop()


def test_a_disk_that_is_full_is_counted_and_host_memory_has_the_copy(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(transfer, "write_file", full)
        store = {"prefix_store": str(tmp_path), "prefix_host_gb": 1.0}
        core = engine_of(Communicator(None), str(tiny("llama")), store).core
        # One token: the prompt is offered once, and not again with its answer.
        serve_all(core, (replace(q(0), params=replace(GREEDY, max_tokens=1)),))
        evict_all(core)
        _, cached = serve_all(core, (q(1),))
    stats = core.stats().prefix_cache.lower
    core.stop()
    assert ranges(tmp_path) == []
    assert (stats["disk"].failures, stats["host"].failures) == (1, 0)
    assert cached == {"q1": 150} and stats["host"].hits == 1


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
        core.scheduler.room.tiers.writing.failed(OSError("No space left on device"))
    else:
        assert lock.acquire()
    serve_all(core, (q(1),))
    held = core.stats().prefix_cache.lower["host"].bytes
    assert ranges(tmp_path) == [] and held
    lock.release()
    monkeypatch.setattr(tiers, "_DISK_SECONDS", 0.0)
    serve_all(core, (q(2),))
    assert ranges(tmp_path) == [(0, 162)]
    assert core.stats().prefix_cache.lower["host"].bytes == held  # it has the text already
    core.stop()
