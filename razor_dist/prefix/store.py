"""Prefixes in a directory: each is a folder, which is complete or absent.

::

    DIR/
        writer.lock          held by the one process that writes and prunes
        secret               key of the hashes that name namespaces and nodes
        <fingerprint>/       caches that fit each other: of one model, head map, policy, dtype
            about.json       the model, head map, policy, dtype, ... in words
            <node>/          the tokens [begin, end) of a prompt, behind its parent's
                manifest.json, tokens.npy
                kv-<rank>-<part>.safetensors       retrieval heads, each rank's shard
                state-<window>-<part>.safetensors  streaming heads as of the last token
            <node>.title         name of a document that was read ahead of time
            contexts.d/          frontends' files of contexts: in a folder, since ranks look for new
                                 nodes whenever a name here comes or goes
            removed.d/           folders being removed; for the same reason

A node is written into a folder of another name, every file synced, and renamed when all ranks have
written their parts. Readers take no lock, and a kill leaves at most a folder that readers ignore
and the next writer removes. Removed nodes are renamed at once and deleted by a thread, since a
million tokens make thousands of files; so disk space is free a little later than it is counted.

A node's name depends on its text alone, but a part's tokens on how the writer cut the prompt into
chunks. So each part's header has the digest of its manifest, and parts of another copy of the same
text are refused (`BadPartError`), even if a copy is replaced while it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import shutil
import threading
import time
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from razor_dist.config.errors import ConfigError
from razor_dist.files import sync_folder
from razor_dist.prefix.manifest import FORMAT, Manifest, Names, Tokens, digest, tokens_digest
from razor_dist.prefix.parts import BadPartError, read_file, replace_file, unpack, write_file

_MANIFEST, _TOKENS, _ABOUT = "manifest.json", "tokens.npy", "about.json"
CONTEXTS, _REMOVED = "contexts.d", "removed.d"
_LOCK, _SECRET = "writer.lock", "secret"
_SECRET_BYTES = 32
_NEW, _OLD = ".new", ".old"  # suffixes of folders being written and being removed
# Folders and files that a killed process leaves. Drafts of files are written without the lock, so
# only those older than `_FILE_SECONDS` surely have no writer.
_FOLDER_LEFT = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{8}\.(new|old)")
_FILE_LEFT = re.compile(
    r"secret\.[0-9a-f]{16}|"
    r"(about\.json\.?|ctx_[0-9a-f]{32}\.context\.|[0-9a-f]{32}\.title\.)[0-9a-f]{8}\.new"
)
_TITLE = re.compile(r"[0-9a-f]{32}\.title")
_FILE_SECONDS = 600.0

# A node's folder: inode, and its modification time in ns. `PrefixStore.touch` does not change it,
# and a rewritten node has another.
Stamp = tuple[int, int]


class PrefixStore:
    """The prefixes in a directory that were written by engines of one fingerprint.

    The fingerprint is the hash of ``about``, which has all that caches depend on, in words. Any
    process may read; the one that has the lock (`acquire`) may write.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self._root = directory
        self.fingerprint = digest(about)[:24]
        self.folder = directory / self.fingerprint
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.names = Names(_secret_of(directory))
            if not (file := self.folder / _ABOUT).exists():
                replace_file(file, json.dumps(about, indent=1, default=str).encode())
        except OSError as error:
            raise ConfigError(f"prefix_store {directory} cannot be used: {error}") from None
        self.lock = WriterLock(directory)
        self._seen = 0, False
        self._remover = _Remover()

    def acquire(self) -> bool:
        """Become the writer, unless another process is; True if this process is the writer.

        Removes what a dead writer has left and nodes of an older format. `OSError` if the directory
        cannot be written or was removed.
        """
        if self.lock.held:
            return True
        if not self.lock.acquire():
            return False
        try:
            remove_leftovers(self._root, self._remover.put)
            for path in node_folders(self.folder):
                if _format_of(path) < FORMAT:
                    remove_node(path, self._remover.put)
        except OSError:
            self.lock.release()
            raise
        return True

    def changed(self) -> bool:
        """True if nodes may have come or gone since the last call."""
        now = self._changed_at()
        if not now or self._seen == (now, True):
            return False
        # Two changes in one tick of the file system's clock look like one: look again after 2 s.
        look = now, time.time_ns() - now > 2_000_000_000
        seen, self._seen = self._seen, look
        return look != seen

    def _changed_at(self) -> int:
        """Return when a name last came or went, in ns; 0 if the folder cannot be read."""
        try:
            return self.folder.stat().st_mtime_ns
        except OSError:
            return 0

    @contextlib.contextmanager
    def _own_change(self) -> Iterator[None]:
        """Change names without making `changed` true, unless others' changes are yet unseen."""
        all_seen = self._seen == (self._changed_at(), True)
        yield
        if all_seen:
            self._seen = self._changed_at(), True

    def stamps(self) -> dict[str, Stamp]:
        """Return the stamp of each node by its name."""
        try:
            with os.scandir(self.folder) as entries:
                nodes = [entry for entry in entries if _is_node(entry.name)]
        except OSError:
            self._seen = 0, False  # so `changed` is true again
            raise
        found: dict[str, Stamp] = {}
        for node in nodes:
            with contextlib.suppress(OSError):  # removed meanwhile
                found[node.name] = _stamp(node.stat())
        return found

    def draft(self, node: str) -> Path:
        """Make the folder into which the ranks write a node's parts."""
        path = self.folder / f"{node}.{secrets.token_hex(4)}{_NEW}"
        with self._own_change():
            path.mkdir(mode=0o700)
        return path

    def publish(self, draft: Path, manifest: Manifest, tokens: Tokens) -> Stamp:
        """Complete a draft to which all ranks have written, and rename it; return its stamp.

        Raises `OSError`.
        """
        with open(os.open(draft / _TOKENS, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            np.save(file, np.ascontiguousarray(tokens, "<i4"))
            file.flush()
            os.fsync(file.fileno())
        write_file(draft / _MANIFEST, manifest.to_json().encode())
        sync_folder(draft)
        path = self.folder / manifest.node
        with self._own_change():
            # A node there could not be read, else it would not be written again.
            if replaces := path.exists():
                remove_node(path, self._remover.put)
            stamp = _stamp(draft.stat())  # before another process can put its own in this place
            draft.rename(path)
        if replaces:  # `changed` is true again: its children can be read now
            self._seen = 0, False
        sync_folder(self.folder)
        return stamp

    def discard(self, draft: Path) -> None:
        with self._own_change(), contextlib.suppress(OSError):
            self._remover.put(_set_aside(draft))

    def remove(self, node: str) -> None:
        with self._own_change():
            remove_node(self.folder / node, self._remover.put)

    def touch(self, node: str) -> None:
        """Note that a node was used now, in its manifest's modification time."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / node / _MANIFEST)

    def used(self, node: str) -> float:
        """Return when a node was used last, in seconds of the wall clock; 0 if it is gone."""
        try:
            return (self.folder / node / _MANIFEST).stat().st_mtime
        except OSError:
            return 0.0


class _Remover:
    """A thread that removes folders; those left at exit are removed by `remove_leftovers`."""

    def __init__(self) -> None:
        self._folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefix-remover", daemon=True)

    def put(self, folder: Path) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self._folders.put(folder)

    def _run(self) -> None:
        while True:
            _remove_folder(self._folders.get())


class WriterLock:
    """Held by the one process that writes to a directory of prefixes or prunes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = filelock.FileLock(directory / _LOCK, mode=0o600)

    @property
    def held(self) -> bool:
        return self._lock.is_locked

    def acquire(self) -> bool:
        """Take the lock; False if another process has it, `OSError` if it cannot be locked."""
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            return False
        return True

    def require(self) -> None:
        """Take the lock; `ConfigError` if another process has it or it cannot be locked."""
        try:
            taken = self.acquire()
        except OSError as error:
            raise ConfigError(f"cannot write to {self._directory}: {error.strerror}") from None
        if not taken:
            raise ConfigError(f"a server writes to {self._directory}: stop it first")

    def release(self) -> None:
        self._lock.release()


def folders(directory: Path) -> list[Path]:
    """Return a directory's folders, each of one fingerprint."""
    try:
        return sorted(path.parent for path in directory.glob(f"*/{_ABOUT}"))
    except OSError:
        return []


def node_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _is_node(path.name))


def read_about(folder: Path) -> dict[str, Any]:
    """Return a folder's ``about`` (see `PrefixStore`); empty if it cannot be read."""
    try:
        found: dict[str, Any] = json.loads((folder / _ABOUT).read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def read_node(path: Path) -> tuple[Manifest, Tokens]:
    """Return a node's manifest and its own tokens; `BadPartError` if it is damaged or gone."""
    manifest = Manifest.from_json(read_file(path / _MANIFEST))
    try:
        tokens = np.ascontiguousarray(np.load(path / _TOKENS, allow_pickle=False), np.int32)
    except (OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        raise BadPartError(f"its tokens are damaged ({error!s:.100})") from None
    whole = tokens.shape == (manifest.end - manifest.begin,)
    whole = whole and tokens_digest(tokens) == manifest.tokens_sha256
    here = (manifest.fingerprint, manifest.node) == (path.parent.name, path.name)
    if not whole or not here:
        raise BadPartError("its tokens or its name do not match the manifest")
    return manifest, tokens


def write_title(path: Path, title: str) -> None:
    """Write the name of a node's document, beside its folder, since that never changes.

    Raises `OSError`.
    """
    replace_file(_title_file(path), title.encode("utf-8", "replace"))


def read_title(path: Path) -> str:
    """Return the name of a node's document; empty if there is none."""
    try:
        return _title_file(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _title_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.title")


def check_node(path: Path) -> Manifest:
    """Read a whole node; `BadPartError` if any part is damaged."""
    manifest, _ = read_node(path)
    for name, about in manifest.files():
        try:
            unpack(read_file(path / name), about)
        except BadPartError as error:
            raise BadPartError(f"{name}: {error}") from None
    return manifest


def _format_of(path: Path) -> int:
    """Return the format of a node's manifest; `FORMAT` if it cannot be read."""
    try:
        return int(json.loads((path / _MANIFEST).read_bytes())["format"])
    except (OSError, ValueError, KeyError, TypeError):
        return FORMAT


def _remove_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    """Rename a node or a draft so that no reader finds it; return the folder to be removed."""
    node = path.name.partition(".")[0]
    aside = path.parent / _REMOVED / f"{node}.{secrets.token_hex(4)}{_OLD}"
    try:
        aside.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # such as a full disk; a rename in the same folder makes ranks look for nodes
        aside = path.with_name(aside.name)
    return path.rename(aside)


def remove_node(path: Path, remove: Callable[[Path], None] = _remove_folder) -> None:
    """Rename a node's folder, so that no reader finds an incomplete node, and ``remove`` it."""
    with contextlib.suppress(OSError):
        remove(_set_aside(path))
        _title_file(path).unlink(missing_ok=True)


def remove_leftovers(directory: Path, remove: Callable[[Path], None] = _remove_folder) -> int:
    """Remove what killed writers have left; return the number of files and folders.

    For the writer only. Other programs' files stay. ``remove`` gets the folders.
    """
    removed, old = 0, time.time() - _FILE_SECONDS
    own = [folder / name for folder in folders(directory) for name in ("", CONTEXTS, _REMOVED)]
    inside = [path for folder in own if folder.is_dir() for path in folder.iterdir()]
    for path in [*directory.glob(f"{_SECRET}.*"), *inside]:
        with contextlib.suppress(OSError):
            if _FOLDER_LEFT.fullmatch(path.name):
                remove(path)
            elif (_FILE_LEFT.fullmatch(path.name) and path.stat().st_mtime < old) or (
                _TITLE.fullmatch(path.name) and not path.with_suffix("").exists()
            ):
                path.unlink()
            else:
                continue
            removed += 1
    return removed


def _is_node(name: str) -> bool:
    return "." not in name


def _stamp(folder: os.stat_result) -> Stamp:
    return folder.st_ino, folder.st_mtime_ns


def _secret_of(directory: Path) -> bytes:
    path = directory / _SECRET
    with contextlib.suppress(FileExistsError):
        if not path.exists():
            draft = directory / f"{_SECRET}.{secrets.token_hex(8)}"
            write_file(draft, secrets.token_bytes(_SECRET_BYTES))
            try:
                os.link(draft, path)  # fails if another process was faster
            finally:
                draft.unlink()
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(
            f"{path} must hold {_SECRET_BYTES} bytes and holds {len(secret)}: put back a copy, or "
            "remove the whole directory, whose prefixes are not found without it"
        )
    return secret
