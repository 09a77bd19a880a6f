"""The kind of a file by its content, whatever its name says."""

from __future__ import annotations

import codecs
import io
import re
import zipfile

from razor_dist.config.errors import DocumentError

BOMS_OF_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
PDF, PDF_WITHIN = b"%PDF-", 1024  # a PDF's header, and the first bytes that hold it
# The first bytes of a file, by which its kind is detected.
_HEAD_BYTES = 8192
# The beginning of a .docx file with a password, and of every .doc file.
COMPOUND = bytes.fromhex("d0cf11e0a1b11ae1")
_PARTS_OF_ZIP = {"word/document.xml": "docx", "META-INF/container.xml": "epub"}
# A comment holds no end of another, else n of them could be taken apart in 2**n ways.
_HTML = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*|<!--(?:(?!-->).)*-->\s*)*"
    rb"<(!doctype html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)


def detect_kind(data: bytes, named: str | None) -> str:
    """Return "text", "html", "pdf", "epub" or "docx".

    ``named`` is the kind by the file's name: it decides between text and a piece of HTML.
    Raises `DocumentError` if the content is of no known kind, or text under another kind's name.
    """
    head = data[:_HEAD_BYTES]
    # PDF readers accept 1,024 bytes before the header. By name alone: a text may mention it.
    if head.lstrip().startswith(PDF) or (named == "pdf" and PDF in data[:PDF_WITHIN]):
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return _kind_of_zip(data)
    if head.startswith(COMPOUND):
        raise DocumentError("is encrypted, or of an old Office; save it as docx or PDF")
    if head.startswith(b"{\\rtf"):
        raise DocumentError("is RTF, which is not read; save it as docx or PDF")
    wide = head.startswith(BOMS_OF_UTF16)
    if b"\0" in head and not wide:
        raise DocumentError("is neither text nor HTML, PDF, EPUB or docx")
    if data and named in ("pdf", "epub", "docx"):
        raise DocumentError(f"is no {named} file, whatever its name says")
    if named == "html" or _HTML.match(head):
        return "html"
    try:
        data.decode("utf-16" if wide else "utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    return "text"


def _kind_of_zip(data: bytes) -> str:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
    except zipfile.BadZipFile:
        raise DocumentError("is a broken archive, neither EPUB nor docx") from None
    for part, kind in _PARTS_OF_ZIP.items():
        if part in names:
            return kind
    raise DocumentError("is an archive, but neither EPUB nor docx")
