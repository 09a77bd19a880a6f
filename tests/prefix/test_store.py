"""A directory of prefixes that others use, too."""

from __future__ import annotations

import os
import time
from pathlib import Path

from razor_dist.prefix.store import PrefixStore, WriterLock, remove_leftovers


def test_leftovers_are_removed_and_files_of_others_stay(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, {"model": "m"})
    ours, node = store.folder, "0" * 32
    drafts = [ours / f"about.json{1:08x}.new", ours / f"ctx_{node}.context.{2:08x}.new"]
    dead = [ours / f"ctx_{node}.context.{3:08x}.new", store.draft(node)]
    dead.append(ours / f"{node}.{4:08x}.old")
    dead[-1].mkdir()
    stays = [*drafts, ours / "notes.old", ours / f"{node}.title", tmp_path / "project/thesis.old"]
    (tmp_path / "project/site.new").mkdir(parents=True)
    for path in (*stays, tmp_path / "project/site.new/index.html", dead[0], dead[1] / "kv"):
        path.write_text("my only copy")
    past = time.time() - 3600
    for path in (dead[0], ours / "notes.old"):
        os.utime(path, (past, past))
    lock = WriterLock(tmp_path)
    assert lock.acquire() and remove_leftovers(tmp_path) == len(dead)
    lock.release()
    assert store.acquire()
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in (*stays, tmp_path / "project/site.new/index.html"))
