"""The files of contexts in a store: read beside the loop, expired, pruned and damaged."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from razor_dist.cli import main
from razor_dist.config.errors import RequestError
from razor_dist.prefix.store import PrefixStore
from razor_dist.server.context_files import ContextFiles, ContextHead
from tests.server.marked import DOCUMENT
from tests.server.process import fake_server
from tests.server.used_contexts import begun, ids, kept, server, stored_in, used

pytestmark = pytest.mark.anyio


async def test_files_are_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[threading.Thread]()

    def noting(what: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            threads.add(threading.current_thread())
            return what(*arguments)

        return run

    context = await used(server(tmp_path), kept())
    for name in ("look", "read", "all"):
        monkeypatch.setattr(ContextFiles, name, noting(getattr(ContextFiles, name)))
    other = server(tmp_path)
    await used(other, base=await other.find(context.id, "a"))
    assert await ids(other) == [context.id]
    assert threads and threading.main_thread() not in threads


def test_a_new_context_is_no_reason_to_look_for_prefixes(tmp_path: Path) -> None:
    store, one = PrefixStore(tmp_path, {"model": 1}), kept()
    files, past = ContextFiles(store.folder), time.time() - 10
    for number in range(2):
        if number:
            os.utime(store.folder, (past, past))
            assert store.changed() and not store.changed()
        assert files.write(
            ContextHead(f"ctx_{number:032x}", "a", None, 0.0, 99, "The door"), 300, one
        )
    files.remove(f"ctx_{0:032x}")
    assert not store.changed()


async def test_expired_ones_say_so_after_a_restart(tmp_path: Path) -> None:
    context = await used(server(tmp_path), kept())
    [path] = stored_in(tmp_path)
    past = time.time() - 3610
    os.utime(path, (past, past))
    with pytest.raises(RequestError, match=r"it expired at 20\d\d-.*: send the text again"):
        await server(tmp_path).find(context.id, "a")
    with pytest.raises(RequestError) as error:
        await server(tmp_path).find(context.id, "b")
    assert "expired" not in str(error.value)


def contexts_of_other_models(store: Path) -> list[Path]:
    """Contexts of three models, in this order: expired, not used for two days, just used."""
    found, day = [], 86400.0
    for number, (age, ttl) in enumerate([(3700.0, 3600), (2 * day, 604800), (0.0, 3600)]):
        folder = PrefixStore(store, {"model": number}).folder
        one, id_ = kept(), f"ctx_{number:032x}"
        assert ContextFiles(folder).write(
            ContextHead(id_, "a", None, 0.0, 99, "The door"), ttl, one
        )
        found.append(folder / f"contexts.d/{id_}.context")
        os.utime(found[-1], (time.time() - age,) * 2)
    return found


@pytest.mark.parametrize(("flags", "left"), [([], 2), (["--older-than", "1"], 1)])
def test_prune_removes_expired_contexts_of_all_models(
    flags: list[str], left: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = contexts_of_other_models(tmp_path)
    assert main(["store", "prune", str(tmp_path), *flags]) == 0
    assert [path for path in files if path.exists()] == files[3 - left :]
    assert f"removed {3 - left};" in capsys.readouterr().out


def test_a_server_that_starts_removes_expired_contexts_of_all_models(tmp_path: Path) -> None:
    files = contexts_of_other_models(tmp_path)
    with fake_server("--prefix-store", str(tmp_path)) as starting:
        starting.url()
    assert [path for path in files if path.exists()] == files[1:]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "head"])
def test_damaged_files_are_no_contexts(tmp_path: Path, damage: str) -> None:
    files, one = ContextFiles(tmp_path), kept()
    id_ = f"ctx_{0:032x}"
    assert files.write(ContextHead(id_, "a", None, 0.0, len(one.text.tokens), "The door"), 300, one)
    assert files.read(id_) == (files.look([id_])[id_], one)
    [path] = stored_in(tmp_path)
    data = path.read_bytes()
    at = data.index(one.text.token_bytes)
    changed = {
        "cut": data[:-9],
        "flipped": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
        "empty": b"",
        "head": b"\xff" * 8 + data[8:],
    }
    path.write_bytes(changed[damage])
    assert files.read(id_) is None
    past = time.time() - 8 * 86_400  # longer than any context lives
    os.utime(path, (past, past))
    assert files.all() == [] and not path.exists()


async def test_a_disk_that_fails_at_the_end_of_a_request_leaves_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = server(tmp_path)
    both = [kept("One."), kept("One. " + DOCUMENT)]
    await used(contexts, *both)
    pinned, found = await begun(contexts, *both)
    monkeypatch.setattr(ContextFiles, "touch", mock.Mock(side_effect=OSError("it is gone")))
    with pytest.raises(OSError, match="it is gone"):
        pinned.close()
    assert len(found) == 2 and [context.users for context in found] == [0, 0]
