"""The documents that a command line names: folders, patterns, files, lines of JSONL files."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.documents.lines import Line, digest_of, read_lines
from razor_dist.documents.read import KIND_OF_SUFFIX, checked_text, kind_of, read_document


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
        Which line of the file it is; ``None`` for a whole file.
    """

    id: str
    path: str
    kind: str
    file: str
    size: int
    digest: str
    line: Line | None = None

    def text(self) -> str:
        """Read it.

        Raises
        ------
        DocumentError
            If it cannot be read, or is another than it was when it was found.
        """
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
        return read_document(data, self.kind)


class Collection(NamedTuple):
    """What was found."""

    sources: list[Source]
    left_out: list[Path]


def collect(inputs: Sequence[str]) -> Collection:
    """Find documents.

    Parameters
    ----------
    inputs : sequence of str
        Folders, which are searched with all folders in them; patterns such as ``books/**/*.epub``;
        files. A file that is found twice is taken once.

    Returns
    -------
    Collection
        ``left_out`` are files in folders, or matched by patterns, of no kind that can be read, and
        hidden files in folders.

    Raises
    ------
    ConfigError
        If an input names nothing, or nothing that can be read, or two documents have one id.
    """
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
        for source in _sources(path):
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
            yield file, not hidden and kind_of(file) is not None
    elif path.exists():
        if kind_of(path) is None:
            raise ConfigError(f"{name} is of no kind that is read; these are: {_known()}")
        yield path, True
    elif glob.has_magic(name):
        files = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
        files = [file for file in files if file.is_file()]
        if not files:
            raise ConfigError(f"no file matches the pattern {name}")
        for file in files:
            yield file, kind_of(file) is not None
    else:
        raise ConfigError(f"{name}: there is no such file or folder")


def _sources(path: Path) -> Iterable[Source]:
    kind, file = kind_of(path), str(path.absolute())
    assert kind is not None
    if kind == "jsonl":
        return [
            Source(_id_of(data, path, line), str(path), kind, file, len(data), line.digest, line)
            for line, data in read_lines(path)
        ]
    try:
        data = path.read_bytes()
    except OSError:  # told of with the other documents that cannot be read
        return [Source(str(path), str(path), kind, file, 1, "")]
    return [Source(str(path), str(path), kind, file, len(data), digest_of(data))]


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
    return f"{', '.join(KIND_OF_SUFFIX)} and names without a suffix"
