"""Files that are whole whenever a process or the machine ends, and lines found again in files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from razor_dist.config.errors import ConfigError, DocumentError

# Hexadecimal digits of a digest.
DIGEST = 12


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a draft to be written, which takes a file's place at the end of the ``with`` block.

    After a crash, whenever it comes, the file is the old one or the new one, whole. Raises
    `ConfigError` if it cannot be written, also for an `OSError` of the block.
    """
    draft = path.with_name(f"{path.name}.new")
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


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
        try:
            if not folder.is_dir():
                raise ConfigError(f"cannot write {file}: there is no folder {folder}")
            if file.is_dir():
                raise ConfigError(f"cannot write {file}: it is a folder")
            with tempfile.TemporaryFile(dir=folder):  # where `replacing` will make its draft
                pass
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless they are there; `ConfigError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None


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
        """Return the line; `DocumentError` if it cannot be read, or is another now.

        Both are retryable: the file may have been moved, or this host may not have it.
        """
        where = f"line {self.number} of {self.path}"
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.length)
        except OSError as error:
            raise DocumentError(
                f"{where} cannot be read: {error.strerror}", retryable=True
            ) from None
        if _digest_of_line(data) != self.digest:
            raise DocumentError(f"{where} was changed since the job began", retryable=True)
        return data


def check_file(path: str | Path) -> None:
    """Raise `ConfigError` for a pipe or a device: a job reads its input more than once."""
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise ConfigError(f"{path} is no file; write what comes from it to one, and name that")


def read_lines(path: str | Path) -> Iterator[tuple[Line, bytes]]:
    """Yield the lines of a file that hold more than white space."""
    absolute, offset = str(Path(path).absolute()), 0
    try:
        check_file(path)
        with open(path, "rb") as file:
            for number, data in enumerate(file, start=1):
                if data.strip():
                    yield Line(absolute, number, offset, len(data), _digest_of_line(data)), data
                offset += len(data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _digest_of_line(data: bytes) -> str:
    """Name a line by its text: a last line is the same when another is appended, and CRLF is LF."""
    return digest_of(data.rstrip(b"\r\n") + b"\n")


def digest_of(data: bytes) -> str:
    """Name bytes by the first `DIGEST` hexadecimal digits of their SHA-256."""
    return hashlib.sha256(data).hexdigest()[:DIGEST]
