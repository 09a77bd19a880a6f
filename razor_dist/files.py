"""Files that are whole whenever a process or the machine ends, and lines found again in files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from razor_dist.config.errors import ConfigError, DocumentError

# Hexadecimal digits of a digest.
DIGEST = 12


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a draft to be written, which takes a file's place at the end of the ``with`` block.

    After a crash, whenever it comes, the file is the old one or the new one, whole.
    """
    draft = path.with_name(f"{path.name}.new")
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as what the files hold."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(*files: Path | None) -> None:
    """Raise `ConfigError` for files that could not be written once hours of work are done."""
    for file in files:
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {folder}")
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder")


@dataclass(frozen=True)
class Line:
    """The place of a line in its file.

    A line of a million-token document is megabytes: the job's driver keeps its place, and
    an engine's thread reads it.
    """

    path: str  # absolute
    number: int  # from 1; empty lines count
    offset: int  # bytes
    length: int
    digest: str

    def read(self) -> bytes:
        """Return the line; raises `DocumentError` if the file holds another there now."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
        if digest_of(data) != self.digest:
            where = f"line {self.number} of {self.path}"
            raise DocumentError(f"{where} was changed since the job began", retryable=True)
        return data


def read_lines(path: str | Path) -> Iterator[tuple[Line, bytes]]:
    """Yield the lines of a file that hold more than white space."""
    absolute, offset = str(Path(path).absolute()), 0
    try:
        with open(path, "rb") as file:
            for number, data in enumerate(file, start=1):
                if data.strip():
                    yield Line(absolute, number, offset, len(data), digest_of(data)), data
                offset += len(data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def digest_of(data: bytes) -> str:
    """Name bytes by the first `DIGEST` hexadecimal digits of their SHA-256."""
    return hashlib.sha256(data).hexdigest()[:DIGEST]
