"""Documents of every kind, made for tests."""

from __future__ import annotations

import io
import zipfile

from docx import Document
from fpdf import FPDF

TITLE, FIRST, SECOND = "The Fox", "The quick brown fox jumps.", "It is lazy & old."

_CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)
_PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf"><manifest>
<item id="two" href="two%20of%20it.xhtml"/><item id="one" href="text/one.xhtml"/>
<item id="menu" href="menu.xhtml"/>
</manifest><spine><itemref idref="one"/><itemref idref="two"/></spine></package>"""
_PAGE = (
    '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html>'
    '<html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body>{}</body></html>'
)
_ENCRYPTION = (
    '<encryption xmlns:enc="http://www.w3.org/2001/04/xmlenc#"><enc:EncryptedData>'
    '<enc:EncryptionMethod Algorithm="{}"/></enc:EncryptedData></encryption>'
)


def html() -> bytes:
    return (
        '<html><head><meta charset="latin-1"><title>No</title><script>var no;</script></head>'
        f"<body><nav>No</nav><h1>{TITLE}</h1><p>The <b>quick</b>\n brown fox<!-- no --> jumps.</p>"
        "<ul><li>caf\xe9</li></ul><div>It is lazy &amp; old.</div><pre>a  b\n c</pre></body></html>"
    ).encode("latin-1")


def pdf(*pages: str, password: str | None = None, owner_password: str = "x") -> bytes:
    file = FPDF()
    for text in pages:
        file.add_page()
        file.set_font("helvetica", size=12)
        file.multi_cell(0, 8, text)
    if password is not None:
        file.set_encryption(owner_password=owner_password, user_password=password)
    return bytes(file.output())


def epub(*, encrypted_by: str | None = None, without: str = "") -> bytes:
    files = {
        "META-INF/container.xml": _CONTAINER,
        "OEBPS/book.opf": _PACKAGE,
        "OEBPS/text/one.xhtml": _PAGE.format(f"<h1>{TITLE}</h1><p>{FIRST}</p>"),
        "OEBPS/two of it.xhtml": _PAGE.format("<p>It&nbsp;is lazy &amp; old.</p>"),
        "OEBPS/menu.xhtml": _PAGE.format("<p>not in the spine</p>"),
    }
    if encrypted_by is not None:
        files["META-INF/encryption.xml"] = _ENCRYPTION.format(encrypted_by)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            if name != without:
                archive.writestr(name, text)
    return buffer.getvalue()


def docx() -> bytes:
    file = Document()
    file.add_heading(TITLE, level=1)
    file.add_paragraph(FIRST)
    table = file.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "left", "right"
    file.add_paragraph(SECOND)
    buffer = io.BytesIO()
    file.save(buffer)
    return buffer.getvalue()
