"""Contexts beside the prefixes of a store, so that they outlive the server: ``ID.context`` each.

A file has the length of its head (4 bytes), the head, and the `KeptContext`, both as msgpack. Its
time is that of the last use by any server; a context expires its time to live after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from pathlib import Path

import msgspec

from razor_dist.api.contexts import KeptContext
from razor_dist.prefix.parts import write_file

log = logging.getLogger(__name__)

_ID = re.compile(r"ctx_[0-9a-f]{32}")
_HEAD_BYTES = 4


class Head(msgspec.Struct):
    id: str
    owner: str | None
    salt: str | None
    created: float
    ttl: int


class ContextFiles:
    """The files in a store's folder (`PrefixStore.folder`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, id_: str) -> Path:
        return self._folder / f"{id_}.context"

    def write(self, head: Head, kept: KeptContext) -> None:
        """Write a context, and remove those that have expired."""
        self.heads()
        first, rest = map(msgspec.msgpack.encode, (head, kept))
        path = self._path(head.id)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            write_file(draft, len(first).to_bytes(_HEAD_BYTES, "big") + first + rest)
            draft.replace(path)
        except OSError as error:
            log.warning("a context cannot be kept on disk: %s", error)

    def read(self, id_: str) -> tuple[Head, KeptContext] | None:
        """Return a context; None if there is none, or only a damaged one."""
        if not _ID.fullmatch(id_) or self.used(id_) is None:
            return None
        try:
            data = self._path(id_).read_bytes()
            end = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "big")
            head = msgspec.msgpack.decode(data[_HEAD_BYTES:end], type=Head)
            return head, msgspec.msgpack.decode(data[end:], type=KeptContext)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("the context %s cannot be read: %s", id_, error)
            return None

    def heads(self) -> list[Head]:
        """Return the heads of all that have not expired, and remove the others."""
        found = []
        for path in self._folder.glob("ctx_*.context"):
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                with path.open("rb") as file:
                    length = int.from_bytes(file.read(_HEAD_BYTES), "big")
                    head = msgspec.msgpack.decode(file.read(length), type=Head)
                if path.stat().st_mtime + head.ttl < time.time():
                    path.unlink()
                else:
                    found.append(head)
        return found

    def used(self, id_: str) -> float | None:
        """Return when a context was used last; None if it is not there."""
        try:
            return self._path(id_).stat().st_mtime
        except OSError:
            return None

    def touch(self, id_: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._path(id_))

    def remove(self, id_: str) -> None:
        with contextlib.suppress(OSError):
            self._path(id_).unlink()
