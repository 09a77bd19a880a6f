"""The documents that a command line names: folders, patterns, files, lines of JSONL files."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.documents.lines import DIGEST, Line, digest_of, read_lines
from razor_dist.documents.read import (
    KIND_OF_SUFFIX,
    ReadLimits,
    checked_text,
    kind_of,
    read_document,
)


@dataclass(frozen=True)
class Source:
    """A document and where it is. It can be pickled, and read on any host that has the file.

    Attributes
    ----------
    id : str
        The path as it was given or found, or the ``id`` of a JSONL line.
    path : str
        The file's path, as it was given or found.
    kind : str
        A kind of `razor_dist.documents.read`; "jsonl" for a line.
    file : str
        The file's absolute path.
    size : int
        In bytes.
    digest : str
        Of the bytes, by `digest_of`; empty if they could not be read.
    line : Line or None
        The line of the file that it is; ``None`` for a whole file.
    encoding : str or None
        Of plain text that is not UTF-8; ``None`` for all that is.
    """

    id: str
    path: str
    kind: str
    file: str
    size: int
    digest: str
    line: Line | None = None
    encoding: str | None = None

    def text(self) -> str:
        """Read it.

        Raises
        ------
        DocumentError
            If it cannot be read, or is another than it was when it was found.
        """
        ReadLimits().check_bytes(self.size)
        try:
            data = self.line.read() if self.line is not None else Path(self.file).read_bytes()
        except OSError as error:
            raise DocumentError(f"cannot be opened: {error.strerror}") from None
        except ValueError as error:
            raise DocumentError(str(error)) from None
        if digest_of(data) != self.digest:
            raise DocumentError("was changed since the job began; run it again")
        if self.line is not None:
            return checked_text(_fields(data)[1])
        gz = self.file.lower().endswith(".gz")
        return read_document(data, self.kind, gz=gz, encoding=self.encoding)


class Collection(NamedTuple):
    """Documents, and files that are passed over."""

    sources: list[Source]
    left_out: list[Path]


def collect(inputs: Sequence[str], encoding: str | None = None) -> Collection:
    """Find documents.

    Parameters
    ----------
    inputs : sequence of str
        Folders, which are searched with all folders in them; patterns such as ``books/**/*.epub``;
        files. A file that is found twice is taken once.
    encoding : str, optional
        Of plain text that is not UTF-8, such as "latin-1".

    Returns
    -------
    Collection
        ``left_out`` are files in folders, or matched by patterns, that cannot be read by their
        names or are binary files without a suffix, and hidden files in folders.

    Raises
    ------
    ConfigError
        If an input names nothing, or nothing that can be read, two documents have one id, or the
        encoding is unknown.
    """
    try:
        encoding = encoding and codecs.lookup(encoding).name
        "".encode(encoding or "utf-8")
    except LookupError:
        raise ConfigError(f"unknown encoding {encoding!r}; try latin-1 or cp1252") from None
    found: dict[Path, Path] = {}
    left_out: dict[Path, Path] = {}
    for name in inputs:
        paths = list(_files(name))
        for path, readable in paths:
            (found if readable else left_out).setdefault(path.resolve(), path)
        if not any(readable for _, readable in paths):
            raise ConfigError(f"{name} holds no document; these are read: {_known()}")
    sources: list[Source] = []
    places: dict[str, str] = {}
    for path in found.values():
        for source in _sources(path, encoding):
            place = str(path) if source.line is None else f"line {source.line.number} of {path}"
            if source.id in places:
                raise ConfigError(
                    f"two documents have the id {source.id!r}: {places[source.id]} and {place}"
                )
            places[source.id] = place
            sources.append(source)
    if not sources:
        raise ConfigError(f"{', '.join(inputs)}: no line with a document")
    return Collection(sources, list(left_out.values()))


def _files(name: str) -> Iterator[tuple[Path, bool]]:
    """The files that an input names, and whether each is of a kind that can be read."""
    path = Path(name)
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            yield file, not hidden and _is_document(file)
    elif path.exists():
        if kind_of(path) is None:
            raise ConfigError(f"{name} cannot be read; these are: {_known()}")
        yield path, True
    elif glob.has_magic(name):
        files = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
        files = [file for file in files if file.is_file()]
        if not files:
            raise ConfigError(f"no file matches the pattern {name}")
        for file in files:
            yield file, _is_document(file)
    else:
        raise ConfigError(f"{name}: there is no such file or folder")


def _is_document(file: Path) -> bool:
    """Return whether a file can be read by its name and, if it has no suffix, its beginning."""
    kind = kind_of(file)
    if kind != "text" or file.suffix[1:2].isalpha():
        return kind is not None
    try:
        with file.open("rb") as opened:
            beginning = opened.read(8192)
    except OSError:
        return True  # told of with the other documents that cannot be read
    return b"\0" not in beginning or beginning.startswith(
        (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    )


def _sources(path: Path, encoding: str | None) -> Iterable[Source]:
    kind, file = kind_of(path), str(path.absolute())
    assert kind is not None
    if kind == "jsonl":
        return [
            Source(_id_of(data, path, line), str(path), kind, file, len(data), line.digest, line)
            for line, data in read_lines(path)
        ]
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()[:DIGEST]
            size = opened.tell()
    except OSError:  # told of with the other documents that cannot be read
        return [Source(str(path), str(path), kind, file, 1, "")]
    if encoding and (kind != "text" or _is_utf8(path)):
        encoding = None
    return [Source(str(path), str(path), kind, file, size, digest, encoding=encoding)]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return True


def _id_of(data: bytes, path: Path, line: Line) -> str:
    try:
        return _fields(data)[0]
    except DocumentError:
        return f"{path}:{line.number}"


def _fields(data: bytes) -> tuple[str, str]:
    """The id and the text of a line.

    Raises
    ------
    DocumentError
        If it is malformed.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"the line is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DocumentError("the line is no JSON object with id and text")
    id, text = value.get("id"), value.get("text")
    if isinstance(id, int) and not isinstance(id, bool):
        id = str(id)
    if not isinstance(id, str) or not id:
        raise DocumentError("the line has no id, a text or an integer")
    if not isinstance(text, str):
        raise DocumentError("the line has no text")
    return id, text


def _known() -> str:
    return f"{', '.join(KIND_OF_SUFFIX)}, all but the last two also with .gz, and no suffix"
