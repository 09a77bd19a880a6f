"""Lines of a JSONL file, each found again without reading those before it.

A line of a million-token document is megabytes: the job's driver keeps where it is, and whoever
works on it reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from razor_dist.config.errors import ConfigError, DocumentError

# Hexadecimal digits of a digest.
DIGEST = 12


@dataclass(frozen=True)
class Line:
    """The place of a line in its file."""

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
            raise DocumentError(f"{where} was changed since the job began")
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
