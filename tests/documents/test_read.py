"""Texts of files of every kind, and what is said of those that have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.documents import read
from razor_dist.documents.read import kind_of, read_document, require_readers
from tests.documents import files
from tests.documents.files import FIRST, SECOND, TITLE


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        ("# Été\r\n\r\nun".encode("utf-8-sig"), "text", "# Été\n\nun"),
        ("Été".encode("utf-16"), "text", "Été"),
        (
            files.html(),
            "html",
            f"# {TITLE}\n\n{FIRST}\n\n- café\n\nIt is lazy & old.\n\na  b\n c",
        ),
        (files.pdf(FIRST, SECOND), "pdf", f"{FIRST}\n\n{SECOND}"),
        (files.pdf(FIRST, password=""), "pdf", FIRST),
        (files.epub(), "epub", f"# {TITLE}\n\n{FIRST}\n\n{SECOND}"),
        (
            files.epub(encrypted_by="http://www.idpf.org/2008/embedding"),
            "epub",
            f"# {TITLE}\n\n{FIRST}\n\n{SECOND}",
        ),
        (files.docx(), "docx", f"# {TITLE}\n\n{FIRST}\n\nleft\tright\n\n{SECOND}"),
    ],
    ids=["utf-8", "utf-16", "html", "pdf", "pdf-no-password", "epub", "epub-fonts", "docx"],
)
def test_the_text_of_a_document(data: bytes, kind: str, text: str) -> None:
    assert read_document(data, kind) == text


@pytest.mark.parametrize(
    ("data", "kind", "problem"),
    [
        (b"", "text", "holds no text"),
        (b" \n\t", "text", "holds no text"),
        (b"caf\xe9", "text", "is not UTF-8 text"),
        (b"a\0b", "text", "is a binary file"),
        (b"<html><script>x</script></html>", "html", "holds no text"),
        (b"", "pdf", "cannot be read as pdf"),
        (files.pdf(FIRST)[:300], "pdf", "cannot be read as pdf"),
        (files.pdf("", ""), "pdf", "holds no text on its 2 pages"),
        (files.pdf(FIRST, password="secret"), "pdf", "is encrypted"),
        (files.epub()[:200], "epub", "cannot be read as epub"),
        (files.epub(without="META-INF/container.xml"), "epub", "lacks the file META-INF"),
        (files.epub(without="OEBPS/text/one.xhtml"), "epub", "lacks the file OEBPS/text/one"),
        (files.epub(encrypted_by="http://www.w3.org/2001/04/xmlenc#aes256-cbc"), "epub", "is encr"),
        (files.docx()[:500], "docx", "cannot be read as docx"),
        (bytes.fromhex("d0cf11e0a1b11ae1"), "docx", "is encrypted, or a .doc file"),
    ],
)
def test_a_document_without_text_is_refused(data: bytes, kind: str, problem: str) -> None:
    with pytest.raises(DocumentError, match=f"^{problem}"):
        read_document(data, kind)


def test_half_characters_are_replaced() -> None:
    assert read.checked_text("a\ud800b \U0001f98a") == "a\ufffdb \U0001f98a"


def test_kinds_by_names() -> None:
    kinds = {
        name: kind_of(Path(name))
        for name in ("GPL-3", "LGPL-2.1", "a.TXT", "a.md", "a.Htm", "a.PDF", "a.epub", "a.png")
    }
    assert list(kinds.values()) == ["text"] * 4 + ["html", "pdf", "epub", None]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "find_spec", lambda name: None if name == "lxml" else object())
    require_readers(["text", "pdf"])
    with pytest.raises(ConfigError, match=r"lxml, which is not installed.*razor-dist\[documents\]"):
        require_readers(["epub", "text"])
