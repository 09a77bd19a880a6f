"""Lines of a JSONL file, each found again without reading those before it.

A line of a million-token document is megabytes: the job's driver keeps where it is, and whoever
works on it reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from razor_dist.config.errors import ConfigError

# Hexadecimal digits of a digest.
DIGEST = 12


@dataclass(frozen=True)
class Line:
    """Where a line is.

    Attributes
    ----------
    path : str
        The file's absolute path.
    number : int
        From 1; empty lines count.
    offset, length : int
        In bytes.
    digest : str
        `digest_of` the line's bytes.
    """

    path: str
    number: int
    offset: int
    length: int
    digest: str

    def read(self) -> bytes:
        """The line.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If it holds another line there now.
        """
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
        if digest_of(data) != self.digest:
            raise ValueError(f"line {self.number} of {self.path} was changed since the job began")
        return data


def read_lines(path: str | Path) -> Iterator[tuple[Line, bytes]]:
    """The lines of a file that hold more than white space, and where they are.

    Raises
    ------
    ConfigError
        If the file cannot be read.
    """
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
    """A name for bytes: the first `DIGEST` hexadecimal digits of their SHA-256."""
    return hashlib.sha256(data).hexdigest()[:DIGEST]
