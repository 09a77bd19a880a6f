"""From a file's bytes to its text.

What is not plain text is read by a process of its own (``python -m razor_dist.documents.read``), so
that a file that was made to exhaust time or memory, or crashes its reader, fails alone.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from razor_dist.config.errors import DocumentError, ReaderKilledError
from razor_dist.config.extras import install_command
from razor_dist.config.memory import die_first, resident_bytes
from razor_dist.documents.detect import BOMS_OF_UTF16, detect_kind

# Kinds by the names' ends; `read` of `razor_dist.documents.KIND` yields the pages' texts.
_KINDS = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "html": (".html", ".htm", ".xhtml"),
    "pdf": (".pdf",),
    "epub": (".epub",),
    "docx": (".docx",),
    "jsonl": (".jsonl", ".ndjson"),
}
KIND_OF_SUFFIX = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes}
# Modules that read a kind, and the packages that have them.
_HTML = {"bs4": "beautifulsoup4", "lxml": "lxml"}
_NEEDED = {
    "html": _HTML,
    "epub": _HTML,
    "pdf": {"pypdfium2": "pypdfium2"},
    "docx": {"docx": "python-docx"},
}
# Exit codes of a reader ended by a signal from outside: the out-of-memory killer or a person.
KILLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
# Environment variables that a reader's process gets: it reads untrusted files, so no API keys.
_KEPT = re.compile("PATH|HOME|TMPDIR|TZ|LANG|LANGUAGE|LC_.*|LD_LIBRARY_PATH|PYTHON.*")
# In bytes read as UTF-8: they may be UTF-16's or ISO-2022's, which then leave none of these.
OTHER_ENCODING = re.compile("[\0\x1b]")
# Recursion limit of a reader: unclosed elements of a page nest in each other.
_DEEPEST = 10_000_000
# Exit code of a reader that has written the document's problem to standard output.
_REFUSED = 3


class Document(NamedTuple):
    text: str
    pages: Sequence[int] = ()  # of a PDF file: the characters at which they begin


@dataclass(frozen=True)
class ReadLimits:
    characters: int = 100_000_000
    pages: int = 20_000
    seconds: int = 120  # CPU time
    memory: int = 2 * 2**30  # bytes of the reader's address space; a file may take half of it

    @property
    def patience(self) -> int:
        """Wall-clock seconds that a reader's process may take: it may have to wait for a core."""
        return 10 * self.seconds

    def too_slow(self) -> DocumentError:
        return DocumentError(f"was not read within {self.patience} s", retryable=True)

    def check_pages(self, pages: int) -> None:
        if pages > self.pages:
            raise DocumentError(f"has {pages:,} pages, more than {self.pages:,}; split it")

    def check_bytes(self, size: int, kind: str | None = None) -> None:
        most = self.memory // 2
        if kind == "text":  # a character has at most four bytes
            most = min(most, 4 * self.characters)
        if size > most:
            raise DocumentError(f"is larger than {most:,} bytes; split it")


def kind_of(path: Path) -> str | None:
    """Return a file's kind by its name, or ``None`` if it cannot be read.

    A name without a suffix (``GPL-3``, ``LGPL-2.1``) is a text's. One ``.gz`` is passed over.
    """
    suffix = path.suffix.lower()
    packed = suffix == ".gz"
    if packed:
        suffix = path.with_suffix("").suffix.lower()
    if not suffix[1:2].isalpha():
        return "text"
    kind = KIND_OF_SUFFIX.get(suffix)
    return None if packed and kind == "jsonl" else kind


def require_reader(kind: str) -> None:
    """Raise `DocumentError` if a package that reads this kind is not installed."""
    needed = _NEEDED.get(kind, {})
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise DocumentError(
            f"{kind} documents are read with {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: {install_command('documents')}",
            retryable=True,
        )


def read_document(
    data: bytes,
    kind: str,
    *,
    gz: bool = False,
    encoding: str | None = None,
    limits: ReadLimits | None = None,
) -> Document:
    """Return the document in a file's bytes, whose text is not empty.

    ``kind`` is "text", "html", "pdf", "epub" or "docx", ``gz`` tells that the file is compressed,
    and ``encoding`` is tried for plain text that is not UTF-8, or has `OTHER_ENCODING`. Raises
    `DocumentError` if the file is broken, encrypted, too large, or holds no text, or a package that
    reads it is missing; the message says which.
    """
    limits = limits or ReadLimits()
    if kind == "text" and not gz:
        return read_here(data, kind, encoding, limits)
    require_reader(kind)
    arguments = reader_arguments(kind, gz=gz, encoding=encoding, limits=limits)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "razor_dist.documents.read", arguments],
            input=data,
            stdout=subprocess.PIPE,
            env=reader_environment(),
            timeout=limits.patience,
        )
    except subprocess.TimeoutExpired:
        raise limits.too_slow() from None
    text, pages = reader_output(done.returncode, done.stdout, limits)
    return Document(text.decode(), pages)


def reader_arguments(
    kind: str | None,
    *,
    limits: ReadLimits,
    gz: bool = False,
    encoding: str | None = None,
    named: str | None = None,
) -> str:
    """Return the argument of a reader's process; without a ``kind`` it is found (`detect`).

    The process gets the file on its standard input, and `reader_environment`.
    """
    given = {"kind": kind, "gz": gz, "encoding": encoding, "named": named}
    return json.dumps({**given, "limits": asdict(limits)})


def reader_environment() -> dict[str, str]:
    """Return the environment of a reader's process, without settings and keys."""
    kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def reader_output(code: int, output: bytes, limits: ReadLimits) -> tuple[bytes, list[int]]:
    """Return what a reader's process wrote before it ended with ``code``: a `Document` in UTF-8.

    Raises `DocumentError` if it failed, and `ReaderKilledError` if it was ended from outside.
    """
    if code == -signal.SIGXCPU:
        seconds = limits.seconds
        raise DocumentError(f"takes more than {seconds} s of the processor to read; split it")
    if code == _REFUSED:
        raise DocumentError(output.decode())
    if code in KILLED:
        name = signal.Signals(-code).name
        raise ReaderKilledError(f"was not read, since its reader was ended by {name}; try again")
    if code:
        raise DocumentError(f"cannot be read: its reader crashed ({code})")
    pages, _, text = output.partition(b"\n")
    return text, json.loads(pages)


def main() -> None:
    """Read the document on standard input as the argument says; print its text or its problem."""
    die_first()
    given = json.loads(sys.argv[1])
    kind, limits = given["kind"], ReadLimits(**given["limits"])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(_DEEPEST)
    try:
        data = sys.stdin.buffer.read()
        if given["gz"]:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(limits.memory // 2 + 1)
            limits.check_bytes(len(data))
        if kind is None:
            kind = detect_kind(data, given["named"])
            require_reader(kind)
        text, pages = read_here(data, kind, given["encoding"], limits)
        answer, code = f"{json.dumps(pages)}\n{text}", 0
    except DocumentError as error:
        answer, code = str(error), _REFUSED
    except Exception as error:  # the libraries raise whatever the broken file leads them to
        answer, code = f"cannot be read as {kind}: {error or type(error).__name__}", _REFUSED
        resource.setrlimit(resource.RLIMIT_AS, (most, most))  # room to say what is wrong
        # lxml calls a lack of memory an unknown error.
        if isinstance(error, MemoryError) or resident_bytes()[1] > limits.memory // 2:
            answer = f"needs more than {limits.memory:,} bytes of memory to read; split it"
    sys.stdout.buffer.write(answer.encode())
    sys.exit(code)


def read_here(data: bytes, kind: str, encoding: str | None, limits: ReadLimits) -> Document:
    """Read a document in this process, as `read_document` does in one of its own."""
    limits.check_bytes(len(data), kind)
    pages: Iterable[str]
    if kind == "text":
        pages = [_text(data, encoding)]
    else:
        pages = import_module(f"razor_dist.documents.{kind}").read(data, limits)
    texts: list[str] = []
    begins, characters = [], 0
    for page in pages:
        if characters + len(page) > limits.characters:
            raise DocumentError(f"holds more than {limits.characters:,} characters; split it")
        text = _whole_characters(page)
        begins.append(characters + 2 * len(texts))  # the texts are joined by two line feeds
        if text:
            texts.append(text)
            characters += len(text)
    return Document(checked_text("\n\n".join(texts)), begins if kind == "pdf" else [])


def checked_text(text: str) -> str:
    """Return a document's text; raises `DocumentError` if it is only white space.

    Half characters, which PDF files and JSON can hold and no tokenizer can, become U+FFFD.
    """
    if not text.strip():
        raise DocumentError("holds no text")
    return _whole_characters(text)


def _whole_characters(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(data: bytes, encoding: str | None) -> str:
    first = "utf-16" if data.startswith(BOMS_OF_UTF16) else "utf-8-sig"
    texts = []
    for name in filter(None, (first, encoding)):
        try:
            texts.append(data.decode(name))
        except UnicodeDecodeError as error:
            failed = f"is not {name.removesuffix('-sig').upper()} text (byte {error.start})"
    if not texts:
        remedy = "convert it" if encoding else "name its encoding, such as --encoding latin-1"
        raise DocumentError(f"{failed}; {remedy}")
    text = next((text for text in texts if not OTHER_ENCODING.search(text)), texts[0])
    if "\0" in text:
        raise DocumentError("is a binary file, not text")
    return text.replace("\r\n", "\n")


if __name__ == "__main__":
    main()
