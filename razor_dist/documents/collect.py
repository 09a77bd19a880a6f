"""The documents that a command line names: folders, patterns, files, lines of JSONL files."""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.documents.detect import BOMS_OF_UTF16
from razor_dist.documents.read import (
    KIND_OF_SUFFIX,
    OTHER_ENCODING,
    Document,
    ReadLimits,
    checked_text,
    kind_of,
    read_document,
)
from razor_dist.files import DIGEST, Line, check_file, digest_of, read_lines

# What a job leaves in its folder (`razor_dist.jobs.results`), and pages of summaries there, whose
# names `razor_dist.jobs.summary_pages` makes.
_RESULTS = ("job.json", "results.jsonl")
_OF_A_JOB = {*_RESULTS, "parts.jsonl", "lock", ".prefixes"}
_PAGE = re.compile(rf"pages/[^/]*-[0-9a-f]{{{DIGEST}}}(-[^/]+)?\.md", re.DOTALL)
_KNOWN = f"{', '.join(KIND_OF_SUFFIX)}, all but the last two also with .gz, and no suffix"


@dataclass(frozen=True)
class DocumentSource:
    """A document. It can be pickled, and read on any host that has the file."""

    id: str  # the path, or the ``id`` of a JSONL line
    path: str  # as given or found; for display, so valid UTF-8
    kind: str  # of `razor_dist.documents.read`; "jsonl" for a line
    file: str  # the absolute path
    size: int  # bytes
    digest: str  # of the bytes, by `digest_of`; empty if they could not be read
    line: Line | None = None  # None for a whole file
    encoding: str | None = None  # of plain text that is not UTF-8

    def read(self) -> Document:
        """Return the text and its pages; `DocumentError` if it cannot be read or has changed."""
        ReadLimits().check_bytes(self.size, self.kind)
        try:
            if self.line is not None:
                return Document(checked_text(_fields(self.line.read())[1]))
            data = Path(self.file).read_bytes()
        except OSError as error:
            raise DocumentError(f"cannot be opened: {error.strerror}", retryable=True) from None
        if digest_of(data) != self.digest:
            raise DocumentError("was changed since the job began; run it again", retryable=True)
        gz = self.file.lower().endswith(".gz")
        return read_document(data, self.kind, gz=gz, encoding=self.encoding)


class Collection(NamedTuple):
    sources: list[DocumentSource]
    left_out: dict[Path, str]  # files and folders that are passed over, and the reasons


def collect(inputs: Sequence[str], encoding: str | None = None) -> Collection:
    """Find documents in folders and all folders in them, in patterns, and in files.

    A file that is found twice is taken once. ``encoding`` is that of plain text that is not UTF-8.
    Links to files and folders are followed. ``left_out`` of the result are files in folders, or
    matched by patterns, that cannot be read by their names or are binary files without a suffix;
    broken links, and files and folders without access; and hidden files in folders.

    Raises `ConfigError` if an input names nothing, or nothing that can be read, two documents have
    one id, or the encoding is unknown.
    """
    try:
        encoding = encoding and codecs.lookup(encoding).name
        b"\xff".decode(encoding or "utf-8", "replace")
    except (LookupError, UnicodeError):  # also for "undefined", and "idna", which replaces nothing
        raise ConfigError(f"unknown encoding {encoding!r}; try latin-1 or cp1252") from None
    found: dict[str, Path] = {}
    left_out: dict[str, tuple[Path, str]] = {}
    for name in inputs:
        paths = dict(_files(name, encoding))
        for path, problem in paths.items():
            if problem is None:
                found.setdefault(os.path.realpath(path), path)
            else:
                left_out.setdefault(os.path.realpath(path), (path, problem))
        if None not in paths.values():
            raise ConfigError(f"{name} holds no document; these are read: {_KNOWN}")
    sources: list[DocumentSource] = []
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
    return Collection(sources, dict(left_out.values()))


def _files(name: str, encoding: str | None) -> Iterator[tuple[Path, str | None]]:
    """Yield the files that an input names, each with the reason if it cannot be read."""
    if not name:  # a variable of a script that is not set; `Path` takes it for the current folder
        raise ConfigError("an input is empty; name a folder (. is this one), a file or a pattern")
    path = Path(name)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    if is_folder:
        found = _walk(path)
        if path in found:
            raise ConfigError(f"cannot read {name}: {found[path]}")
        for file in _not_of_jobs(path, found):
            hidden = "hidden" if _is_hidden(file, path) else None
            yield file, hidden or found[file] or _problem(file, encoding)
    elif exists:
        if kind_of(path) is None:
            raise ConfigError(f"{name} cannot be read; these are: {_KNOWN}")
        check_file(path)
        yield path, None
    elif glob.has_magic(name):
        yield from _matches(path, encoding)
    else:
        raise ConfigError(f"{name}: no such file or folder")


def _matches(pattern: Path, encoding: str | None) -> Iterator[tuple[Path, str | None]]:
    """Yield the files that a pattern matches, and folders of which it matches no file."""
    folder = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    found = [Path(match) for match in glob.glob(str(pattern), recursive=True)]
    folders = [match for match in found if os.path.isdir(match)]
    files = _not_of_jobs(folder, (match for match in found if not os.path.isdir(match)))
    if not files:
        raise ConfigError(f"no file matches the pattern {pattern}")
    for file in files:
        yield file, _problem(file, encoding)
    reached = {place for file in files for place in file.parents}
    for place in sorted(folders):
        page = place / f"a-{'0' * DIGEST}.md"  # written by a job if the folder is one of its own
        if place not in reached and _not_of_jobs(folder, [page]):
            yield place, "a folder: name it, or end the pattern with /**"


def _walk(folder: Path) -> dict[Path, str | None]:
    """Return the files in a folder and all folders in it, and, with the reason, denied folders.

    Links to folders are followed unless hidden, after all other folders: a folder that is reached
    twice is listed once, by its real name if that is inside ``folder``.
    """
    found: dict[Path, str | None] = {}

    def deny(error: OSError) -> None:
        found[Path(error.filename)] = error.strerror

    places, seen = [folder], set[str]()
    for begin in places:  # which grows
        for place, folders, files in os.walk(begin, onerror=deny):
            if (real := os.path.realpath(place)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders.sort()  # so that the next run has the same names
            found |= dict.fromkeys(Path(place, file) for file in files)
            for link in filter(os.path.islink, [Path(place, inner) for inner in folders]):
                if _is_hidden(link, folder):
                    found[link] = None
                else:
                    places.append(link)
    return found


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _not_of_jobs(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """Return the paths in a folder, sorted, without files of jobs.

    Left out are all files in a job's folder inside ``folder``, and, if ``folder`` is a job's, the
    files that the job wrote there.
    """

    @cache
    def is_job(place: Path) -> bool:
        return all(os.path.isfile(place / name) for name in _RESULTS)

    def is_of_a_job(file: Path) -> bool:
        inside = file.relative_to(folder)
        if any(is_job(folder / inner) for inner in list(inside.parents)[:-1]):
            return True
        is_named = inside.parts[0] in _OF_A_JOB or bool(_PAGE.fullmatch(inside.as_posix()))
        return is_named and is_job(folder)

    return sorted(path for path in paths if not is_of_a_job(path))


def _problem(file: Path, encoding: str | None) -> str | None:
    """Return why a file that was found is left out; None if it can be read."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return "not a file"
    except OSError as error:  # a broken link, or a folder whose files may be listed alone
        return error.strerror
    return None if _is_document(file, encoding) else "not a kind of document that can be read"


def _is_document(file: Path, encoding: str | None) -> bool:
    """True if a file is a document by its name or, without a suffix, by its first bytes."""
    kind = kind_of(file)
    if kind != "text" or file.suffix[1:2].isalpha():
        return kind is not None
    try:
        with file.open("rb") as opened:
            beginning = opened.read(8192)
    except OSError:
        return True  # reported with the other documents that cannot be read
    if b"\0" not in beginning or beginning.startswith(BOMS_OF_UTF16):
        return True
    return encoding is not None and "\0" not in beginning.decode(encoding, "replace")


def _sources(path: Path, encoding: str | None) -> Iterator[DocumentSource]:
    # A name that is not UTF-8 is no text for a tokenizer or a terminal.
    name = os.fsencode(path).decode(errors="backslashreplace")
    kind, file = kind_of(path), str(path.absolute())
    assert kind is not None
    if kind == "jsonl":
        for line, data in read_lines(path):
            try:
                id, _ = _fields(data)
            except DocumentError:
                id = f"{name}:{line.number}"
            yield DocumentSource(id, name, kind, file, len(data), line.digest, line)
        return
    size, digest = 1, ""
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()[:DIGEST]
            size = opened.tell()
        if not (encoding and kind == "text" and _needs_encoding(path)):
            encoding = None
    except (OSError, EOFError, zlib.error):
        encoding = None  # reported with the other documents that cannot be read
    yield DocumentSource(name, name, kind, file, size, digest, encoding=encoding)


def _needs_encoding(path: Path) -> bool:
    """True if a text, perhaps gzipped, has NUL or ESC, or is neither UTF-8 nor UTF-16 with BOM."""
    is_packed = path.suffix.lower() == ".gz"
    with gzip.open(path) if is_packed else path.open("rb") as file:
        first = "utf-16" if file.peek(2).startswith(BOMS_OF_UTF16) else "utf-8"
        text = io.TextIOWrapper(file, encoding=first)
        try:
            return any(map(OTHER_ENCODING.search, iter(lambda: text.read(2**20), "")))
        except UnicodeDecodeError:
            return True


def _fields(data: bytes) -> tuple[str, str]:
    """Return the id and the text of a line; raises `DocumentError` if it is malformed."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"the line is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DocumentError("the line must be a JSON object with id and text")
    id, text = value.get("id"), value.get("text")
    if isinstance(id, int) and not isinstance(id, bool):
        id = str(id)
    if not isinstance(id, str) or not id:
        raise DocumentError("the line has no id, a text or an integer")
    if not isinstance(text, str):
        raise DocumentError("the line has no text")
    return id, text
