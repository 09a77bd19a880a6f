"""From a file's bytes to its text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from razor_dist.config.errors import ConfigError, DocumentError

# Kinds by the names' ends; a reader is `read` of `razor_dist.documents.KIND`.
_KINDS = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "html": (".html", ".htm", ".xhtml"),
    "pdf": (".pdf",),
    "epub": (".epub",),
    "docx": (".docx",),
    "jsonl": (".jsonl", ".ndjson"),
}
KIND_OF_SUFFIX = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes}
_NEEDED = {
    "html": ("bs4", "lxml"),
    "epub": ("bs4", "lxml"),
    "pdf": ("pypdf",),
    "docx": ("docx",),
}


def kind_of(path: Path) -> str | None:
    """A file's kind by its name; ``None`` if it is of no kind that can be read.

    A name without a suffix (``GPL-3``, ``LGPL-2.1``) is a text's.
    """
    suffix = path.suffix.lower()
    if not suffix[1:2].isalpha():
        return "text"
    return KIND_OF_SUFFIX.get(suffix)


def require_readers(kinds: Iterable[str]) -> None:
    """Check that the libraries are installed that read these kinds.

    Raises
    ------
    ConfigError
        Naming those that are not.
    """
    for kind in sorted(set(kinds)):
        missing = [name for name in _NEEDED.get(kind, ()) if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"{kind} documents are read with {' and '.join(missing)}, which is not installed: "
                "pip install 'razor-dist[documents]'"
            )


def read_document(data: bytes, kind: str) -> str:
    """The text of a file.

    Parameters
    ----------
    data : bytes
        The whole file.
    kind : str
        "text", "html", "pdf", "epub" or "docx".

    Returns
    -------
    str
        Not empty.

    Raises
    ------
    DocumentError
        If the file is broken, encrypted, or holds no text; the message says which.
    """
    try:
        text = _text(data) if kind == "text" else _read(data, kind)
    except DocumentError:
        raise
    except Exception as error:  # the libraries raise whatever the broken file leads them to
        raise DocumentError(f"cannot be read as {kind}: {error or type(error).__name__}") from error
    return checked_text(text)


def checked_text(text: str) -> str:
    """A document's text, refused if it is empty.

    Half characters, which PDF files and JSON can hold and no tokenizer can, become U+FFFD.

    Raises
    ------
    DocumentError
        If it holds white space only.
    """
    if not text.strip():
        raise DocumentError("holds no text")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(data: bytes, kind: str) -> str:
    text: str = import_module(f"razor_dist.documents.{kind}").read(data)
    return text


def _text(data: bytes) -> str:
    encoding = "utf-8-sig"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"is not {encoding.removesuffix('-sig').upper()} text (byte {error.start}); convert it"
        ) from None
    if "\0" in text:
        raise DocumentError("is a binary file, not text")
    return text.replace("\r\n", "\n")
