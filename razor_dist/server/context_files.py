"""Contexts beside the prefixes of a store, so that they outlive the server: ``ID.context`` each.

They have a folder of their own: ranks look at all prefixes whenever names in theirs have changed.

A file has its time to live and the length of its head (4 bytes each), the head, and the
`KeptContext`, both as msgpack. Its time is that of the last use by any server; a context expires
its time to live after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from razor_dist.api.contexts import KeptContext
from razor_dist.prefix.parts import replace_file
from razor_dist.prefix.store import CONTEXTS, folders

log = logging.getLogger(__name__)

_ID = re.compile(r"ctx_[0-9a-f]{32}")
_INT_BYTES = 4
# Seconds for which an expired file stays: a server that uses it renews it soon after it expires.
GRACE_SECONDS = 60.0
# Seconds after its last use in which any context has expired, also one that cannot be read.
_LONGEST_SECONDS = 604_800

# What reading a damaged file raises.
_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, OverflowError)


class ContextHead(msgspec.Struct):
    id: str
    owner: str | None  # `KeyHolder.id`
    salt: str | None  # of its cache namespace
    created: float  # by the wall clock
    tokens: int
    begins: str


class Stored(NamedTuple):
    head: ContextHead
    ttl: int  # seconds
    used: float  # by the wall clock

    @property
    def expires(self) -> float:
        return self.used + self.ttl


class ContextFiles:
    """The files below a store's folder (`PrefixStore.folder`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / CONTEXTS

    def _path(self, id_: str) -> Path:
        return self._folder / f"{id_}.context"

    def write(self, head: ContextHead, ttl: int, kept: KeptContext) -> bool:
        """Write a context, and remove those that have expired; False if the disk refuses."""
        first, rest = map(msgspec.msgpack.encode, (head, kept))
        begin = b"".join(n.to_bytes(_INT_BYTES, "big") for n in (ttl, len(first)))
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _sweep(self._folder)
            replace_file(self._path(head.id), begin + first + rest)
        except OSError as error:
            log.warning("a context cannot be kept on disk: %s", error)
            return False
        return True

    def read(self, id_: str) -> tuple[Stored, KeptContext] | None:
        """Return a context; None if there is none, or only a damaged one."""
        if not _ID.fullmatch(id_):
            return None
        try:
            with self._path(id_).open("rb") as file:
                stored = _begin(file)
                kept = msgspec.msgpack.decode(file.read(), type=KeptContext)
            if kept.digest != kept.computed_digest:
                raise msgspec.ValidationError("its digest is another")
        except FileNotFoundError:
            return None
        except (OSError, *_DAMAGED) as error:
            log.warning("the context %s cannot be read: %s", id_, error)
            return None
        return stored, kept

    def all(self) -> list[Stored]:
        """Return all that have not expired, without their texts, and remove the others."""
        now = time.time()
        return [stored for stored in _sweep(self._folder)[0] if stored.expires >= now]

    def look(self, ids: Iterable[str]) -> dict[str, Stored | None]:
        """Return contexts without their texts, None for those that are gone.

        Those that cannot be read are left out: a disk that fails has deleted nothing.
        """
        found: dict[str, Stored | None] = {}
        for id_ in ids:
            with contextlib.suppress(OSError, *_DAMAGED):
                try:
                    with self._path(id_).open("rb") as file:
                        found[id_] = _begin(file)
                except FileNotFoundError:
                    if self._folder.is_dir():
                        found[id_] = None
        return found

    def touch(self, id_: str, ttl: int | None = None) -> None:
        """Note that a context was used, and its time to live from now on, if a request says it."""
        with contextlib.suppress(OSError), self._path(id_).open("r+b") as file:
            if ttl is not None:
                file.write(ttl.to_bytes(_INT_BYTES, "big"))
            os.utime(file.fileno())

    def remove(self, id_: str) -> None:
        with contextlib.suppress(OSError):
            self._path(id_).unlink()


def sweep(directory: Path, unused_since: float = 0.0) -> int:
    """Remove a store's contexts that have expired or were ``unused_since``; return how many.

    Those of all fingerprints: a model that is served no more leaves no texts behind.
    """
    removed = 0
    for folder in folders(directory):
        removed += _sweep(folder / CONTEXTS, unused_since)[1]
    return removed


def _sweep(folder: Path, unused_since: float = 0.0) -> tuple[list[Stored], int]:
    """As `sweep`, of one folder; return what is left, without texts, and how many were removed."""
    left, removed, now = list[Stored](), 0, time.time()
    for path in folder.glob("ctx_*.context"):
        with contextlib.suppress(OSError):
            stored, used = None, path.stat().st_mtime
            with contextlib.suppress(*_DAMAGED), path.open("rb") as file:
                stored = _begin(file)
            expires = used + _LONGEST_SECONDS if stored is None else stored.expires
            if expires + GRACE_SECONDS < now or used < unused_since:
                path.unlink()
                removed += 1
            elif stored is not None:
                left.append(stored)
    return left, removed


def _begin(file: BinaryIO) -> Stored:
    """Read a file up to the end of its head."""
    ttl, length = (int.from_bytes(file.read(_INT_BYTES), "big") for _ in range(2))
    head = msgspec.msgpack.decode(file.read(length), type=ContextHead)
    return Stored(head, ttl, os.fstat(file.fileno()).st_mtime)
