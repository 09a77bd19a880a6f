"""Prefixes on disk that are damaged are read anew."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.parallel.comm import Communicator
from razor_dist.prefix.parts import BadPartError
from razor_dist.prefix.store import PrefixStore, check_node, folders, node_folders, read_node
from tests.prefix.engines import Ask, alone, assert_alike, ids
from tests.prefix.stores import DAMAGE, edit, lives, q, spoil
from tests.ranks import Ranks
from tests.tiny_models import Tiny


@pytest.mark.parametrize("size", [0, 31, 100])
def test_a_damaged_secret_is_refused_at_the_start(tmp_path: Path, size: int) -> None:
    (tmp_path / "secret").write_bytes(b"x" * size)
    sentence = f"{tmp_path / 'secret'} must hold 32 bytes and holds {size}: put back a copy"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        PrefixStore(tmp_path, {})


@pytest.mark.long
@pytest.mark.parametrize("how", DAMAGE)
def test_what_is_damaged_is_read_anew_and_healed(
    how: str, ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    path, store = tiny("llama"), {"prefix_store": str(tmp_path)}
    want = alone(ranks, path, (q(0), q(1)))
    ranks(2).run(lives, str(path), store, (q(0),))
    for seed in range(3):
        spoil(tmp_path, how, seed)
        [(answers, cached, _)] = ranks(2).run(lives, str(path), store, (q(0), q(1)))[0]
        assert_alike(answers, want)
        assert cached["q0"] in ((0, 161) if how == "leave" else (0, 161, 150))
        assert cached["q1"] == 150
    new = Ask("new", ids((6, 100)))
    [(answers, cached, _)] = ranks(2).run(lives, str(path), store, (q(0), new))[0]
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
