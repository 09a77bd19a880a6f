"""A directory of prefixes that others use, too."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import filelock
import numpy as np
import pytest

from razor_dist.cli import main
from razor_dist.commands.prefill import _is_saving
from razor_dist.config.errors import EngineError
from razor_dist.frontend.client import EngineBusyError
from razor_dist.prefix.parts import BadPartError
from razor_dist.prefix.store import (
    PrefixStore,
    WriterLock,
    node_folders,
    read_title,
    remove_leftovers,
    write_title,
)


def test_leftovers_are_removed_and_files_of_others_stay(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, {"model": "m"})
    ours, node = store.folder, "0" * 32
    (contexts := ours / "contexts.d").mkdir()
    drafts = [ours / f"about.json.{1:08x}.new", contexts / f"ctx_{node}.context.{2:08x}.new"]
    drafts.append(tmp_path / f"secret.{1:016x}")
    dead = [contexts / f"ctx_{node}.context.{3:08x}.new", store.draft(node)]
    dead.append(ours / f"{node}.{4:08x}.old")
    dead[-1].mkdir()
    dead.append(ours / f"{1:032x}.title")  # of a node that is gone
    dead.append(tmp_path / f"secret.{2:016x}")
    (ours / node).mkdir()
    stays = [*drafts, ours / "notes.old", ours / f"{node}.title", tmp_path / "project/thesis.old"]
    stays.append(tmp_path / "secret.txt")
    (tmp_path / "project/site.new").mkdir(parents=True)
    for path in (
        *stays,
        tmp_path / "project/site.new/index.html",
        dead[0],
        dead[1] / "kv",
        *dead[3:],
    ):
        path.write_text("my only copy")
    past = time.time() - 3600
    for path in (dead[0], dead[-1], ours / "notes.old", tmp_path / "secret.txt"):
        os.utime(path, (past, past))
    lock = WriterLock(tmp_path)
    assert lock.acquire() and remove_leftovers(tmp_path) == len(dead)
    lock.release()
    assert store.acquire()
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in (*stays, tmp_path / "project/site.new/index.html"))


def test_a_title_that_is_there_already_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for title in ("first", "second"):
        write_title(tmp_path / "node", title)
        assert read_title(tmp_path / "node") == title
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError):
        write_title(tmp_path / "node", "third")
    assert read_title(tmp_path / "node") == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["node.title"]


def test_a_directory_that_cannot_be_written_has_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = PrefixStore(tmp_path, {"model": "m"})
    denied = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(filelock.FileLock, "acquire", mock.Mock(side_effect=denied))
    with pytest.raises(OSError, match="Read-only"):
        store.acquire()
    (tmp_path / "a.txt").write_text("text")
    for command in (["store", "prune"], ["prefill", str(tmp_path / "a.txt"), "--store"]):
        assert main([*command, str(tmp_path)]) == 2
        said = f"razor-dist: cannot write to {tmp_path}: Read-only file system\n"
        assert capsys.readouterr().err == said


def test_a_directory_that_was_removed_is_not_written_and_not_locked(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path / "store", {"model": "m"})
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(OSError):
        store.acquire()
    assert not store.lock.held and WriterLock(tmp_path / "store").acquire()


def test_what_a_writer_changes_itself_is_not_looked_for(tmp_path: Path) -> None:
    store, node = PrefixStore(tmp_path, {"model": "m"}), f"{1:032x}"
    assert store.acquire()
    os.utime(store.folder, (1e9, 1e9))
    assert store.changed() and not store.changed()
    store.discard(store.draft(node))
    store.draft(node).rename(store.folder / node)
    os.utime(store.folder, (2e9, 2e9))  # another process, whenever it was
    store.remove(node)
    assert store.changed()
    os.utime(store.folder, (1e9, 1e9))
    assert store.changed() and not store.changed()
    manifest = SimpleNamespace(node=node, to_json=lambda: "{}")
    store.publish(store.draft(node), cast("Any", manifest), np.zeros(1, np.int32))
    assert not store.changed() and (store.folder / node).exists()
    store.remove(node)
    assert not store.changed() and not (store.folder / node).exists()


def test_rank_0_waits_for_no_folder_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million tokens are thousands of files."""
    store, node = PrefixStore(tmp_path, {"model": "m"}), f"{1:032x}"
    manifest = cast("Any", SimpleNamespace(node=node, to_json=lambda: "{}"))
    removing: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: removing.put(threading.current_thread()))
        store.draft(node)  # by a writer that was killed
        assert store.acquire()
        store.discard(store.draft(node))
        for _ in range(2):  # the second in place of the first
            store.publish(store.draft(node), manifest, np.zeros(1, np.int32))
        store.remove(node)
        by = {removing.get(timeout=60) for _ in range(4)}
    assert threading.current_thread() not in by and not node_folders(store.folder)
    assert remove_leftovers(tmp_path) == 4  # as if the process had ended before


def test_a_store_that_a_server_changes_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes go between the list of names and their reading, children before their parents."""
    folder = PrefixStore(tmp_path, {"model": "m"}).folder
    parents = {"parent": None, "child": "parent", "late": None, "early": "late", "gone": None}
    for name in parents:
        (folder / name).mkdir()
    (folder / "late").rmdir()

    def check(path: Path) -> Any:
        if path.name in ("parent", "gone"):
            for gone in ("child", path.name):
                shutil.rmtree(folder / gone, ignore_errors=True)
            raise BadPartError("No such file or directory")
        (folder / "late").mkdir(exist_ok=True)
        return SimpleNamespace(parent=parents[path.name])

    monkeypatch.setattr("razor_dist.prefix.store.check_node", check)
    assert main(["store", "verify", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out == "2 prefixes are whole, 0 are not\n" and not told.err
    shutil.rmtree(folder / "late")
    parents["late"] = "missing"
    assert main(["store", "verify", str(tmp_path)]) == 1
    assert "its parent is missing" in capsys.readouterr().err


def _prefilling(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """The engine that ``prefill`` gets, which keeps nothing."""
    disk = dict.fromkeys(("entries", "bytes", "evictions", "failures", "no_room"), 0)
    opened = mock.MagicMock()
    monkeypatch.setattr("razor_dist.llm.llm.LLM", opened)
    llm: mock.MagicMock = opened.return_value.__enter__.return_value
    llm.stats.return_value = {"prefix_cache": {"disk": disk, "saving": 0}}
    llm.chat.return_value = [SimpleNamespace(prompt_token_ids=[5], num_cached_tokens=0)]
    return llm


def test_prefill_goes_on_with_the_next_document_when_a_rank_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("first.txt", "second.txt")]
    for file in files:
        file.write_text("The door is red.")
    llm = _prefilling(monkeypatch)
    llm.chat.side_effect = [EngineError("rank 0 died"), llm.chat.return_value]
    assert main(["prefill", *map(str, files), "--store", str(tmp_path / "store")]) == 3
    told = capsys.readouterr()
    assert "first.txt: rank 0 died" in told.err and "second.txt: 1 tokens" in told.out
    assert "1 of 2 documents read" in told.out


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ('{"date_string": "26 Jul 2024"}', None),
        ('{"tokenize": false}', "must not hold 'tokenize'"),
        ("[1]", "must be a JSON object, got [1]"),
        ("{date_string", "must be a JSON object, got {date_string"),
    ],
)
def test_prefill_gives_the_chat_template_what_requests_give_it(
    given: str,
    refused: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text("The door is red.")
    llm = _prefilling(monkeypatch)
    command = ["prefill", str(tmp_path / "a.txt"), "--store", str(tmp_path / "store")]
    code = main([*command, "--chat-template-kwargs", given])
    if refused is not None:
        assert code == 2 and f"--chat-template-kwargs {refused}\n" in capsys.readouterr().err
        return
    assert code == 0
    assert llm.chat.call_args.kwargs["chat_template_kwargs"] == {"date_string": "26 Jul 2024"}


def test_prefill_waits_for_an_engine_that_is_busy() -> None:
    busy = EngineBusyError("the engine is busy")
    saving = [{"prefix_cache": {"saving": saving}} for saving in (True, False)]
    llm = mock.Mock(stats=mock.Mock(side_effect=[busy, *saving]))
    assert [_is_saving(llm) for _ in range(3)] == [True, True, False]
