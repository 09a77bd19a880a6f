"""The serialised form of a sequence's caches, for host memory and for files.

A *part* is a few tensors as bytes in the safetensors format, with a header that names its node and
has a checksum. Reading a part that is damaged, cut off or another node's raises `BadPartError`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

# Parts in a writer's queue from which on it is busy: each is some megabytes.
_WAITING = 2


class BadPartError(Exception):
    """A part is missing, damaged, or another node's."""


def pack(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """Return tensors as a part whose header has ``about``, which `unpack` compares."""
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(held, {**about, "crc32": str(_checksum(held))})


def unpack(part: bytes, about: Mapping[str, str]) -> dict[str, Tensor]:
    """Inverse of `pack`; `BadPartError` unless the part is whole and its header has ``about``."""
    try:
        header = json.loads(part[8 : 8 + int.from_bytes(part[:8], "little")])
        metadata = header["__metadata__"]
        tensors = safetensors.torch.load(part)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BadPartError(f"it is damaged ({error!s:.100})") from None
    if {name: metadata.get(name) for name in about} != dict(about):
        raise BadPartError("it belongs to another node")
    if metadata.get("crc32") != str(_checksum(tensors)):
        raise BadPartError("its checksum does not match")
    return tensors


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    found = 0
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def read_file(path: Path) -> bytes:
    """Return a part's file; `BadPartError` if it cannot be read.

    Not mapped: access to a mapped file that was cut off would kill the process (SIGBUS).
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadPartError(error.strerror or str(error)) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read, and sync it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file as `write_file` does, or replace it atomically.

    Raises `OSError`, and then leaves no draft.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        write_file(draft, data)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


class PartWriter:
    """A thread that packs tensors and hands the parts on, such as to a file.

    A rank's next step waits only until the tensors are copied to the host.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []

    def begin(self) -> None:
        """Forget the errors of the parts queued so far, those still to come included."""
        self._errors = []

    @property
    def error(self) -> Exception | None:
        """The first error since `begin`."""
        return self._errors[0] if self._errors else None

    @property
    def pending(self) -> int:
        """The number of parts not handed on yet."""
        return self._queue.unfinished_tasks

    @property
    def busy(self) -> bool:
        return self.pending >= _WAITING

    def put(
        self, tensors: Mapping[str, Tensor], about: Mapping[str, str], to: Callable[[bytes], None]
    ) -> None:
        """Queue tensors on the host as a part; after an error all parts are dropped."""
        errors = self._errors

        def write() -> None:
            try:
                if not errors:
                    to(pack(tensors, about))
            except Exception as error:
                errors.append(error)

        if self._thread is None:
            # A daemon: a save that the end of the process interrupts is void anyway.
            self._thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
            self._thread.start()
        self._queue.put(write)

    def _run(self) -> None:
        while True:
            self._queue.get()()
            self._queue.task_done()
