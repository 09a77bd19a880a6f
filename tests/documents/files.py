"""Documents of every kind, made for tests."""

from __future__ import annotations

import io
import zipfile

from docx import Document
from docx.document import Document as DocxDocument
from docx.opc.packuri import PackURI
from docx.opc.part import Part
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from fpdf import FPDF

from razor_dist.documents.read import ReadLimits, read_here

TITLE, FIRST, SECOND = "The Fox", "The quick brown fox jumps.", "It is lazy & old."

_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)
_PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf"><manifest>
<item id="two" href="two%20of%20it.xhtml"/><item id="one" href="text/one.xhtml#top"/>
<item id="menu" href="menu.xhtml"/><item id="one-b" href="text/one.xhtml#part-2"/>
</manifest><spine><itemref idref="one"/><itemref idref="one-b"/>
<itemref idref="two"/></spine></package>"""
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
        "<body><nav>No</nav><header>No</header>"
        "<div id='banner'>No</div><ul class='docnav top'><li>No</ul>"
        "<div role='navigation' class='x'>No</div>"
        f"<h1>{TITLE}<a class='big headerlink' href='#'>\xb6</a></h1>"
        "<p>The <b>quick</b>\n brown fox<!-- no --> jumps.</p>"
        "<ul><li>caf\xe9</li></ul><div>It is lazy &amp; old.</div><pre>a  b\n c</pre>"
        "<div class='navfooter'>No</div></body></html>"
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


def epub(
    *, encrypted_by: str | None = None, without: str = "", page: str | None = None, times: int = 1
) -> bytes:
    """A book; of ``page`` alone, if given, whose spine names it so many times."""
    files = {
        "META-INF/container.xml": _CONTAINER,
        "OEBPS/book.opf": _PACKAGE,
        "OEBPS/text/one.xhtml": _PAGE.format(f"<h1>{TITLE}</h1><p>{FIRST}</p>"),
        "OEBPS/two of it.xhtml": _PAGE.format("<p>It&nbsp;is lazy &amp; old.</p>"),
        "OEBPS/menu.xhtml": _PAGE.format("<p>not in the spine</p>"),
    }
    if encrypted_by is not None:
        files["META-INF/encryption.xml"] = _ENCRYPTION.format(encrypted_by)
    if page is not None:
        spine = '<itemref idref="one"/>' * times
        files["OEBPS/book.opf"] = (
            f"{_PACKAGE.partition('<spine>')[0]}<spine>{spine}</spine></package>"
        )
        files["OEBPS/text/one.xhtml"] = _PAGE.format(page)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
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
    return saved(file)


def docx_of_body(xml: str, **notes: str) -> bytes:
    """A .docx file with this XML before what else is in its body, and a part of each name."""
    file = Document()
    for name, content in notes.items():
        root = f"<w:{name} {nsdecls('w')}>{content}</w:{name}>"
        place = PackURI(f"/word/{name}.xml")
        part = Part(place, "application/xml", root.encode(), file.part.package)
        file.part.relate_to(part, f"{_RELATIONS}/{name}")
    body = parse_xml(f"<w:body {nsdecls('w')}>{xml}</w:body>")
    for place, element in enumerate(list(body)):
        file.element.body.insert(place, element)
    return saved(file)


def saved(file: DocxDocument) -> bytes:
    buffer = io.BytesIO()
    file.save(buffer)
    return buffer.getvalue()


def pdf_of_references(pages: int) -> bytes:
    """A PDF file whose tree names one page many times."""
    return _pdf_of_objects(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%s]>>" % (pages, b"3 0 R " * pages),
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>",
    )


def pdf_form(value: str | None, note: str) -> bytes:
    """A page that says Name, with a field filled in unless ``value`` is None, and with a note."""
    font = b"<</Font<</F 4 0 R>>>>"
    box = b"/Subtype/Form/BBox[0 0 99 20]/Resources" + font
    form = b"" if value is None else b"/AcroForm<</Fields[6 0 R]/DA(/F 9 Tf)/DR " + font + b">>"
    fields = b"" if value is None else b"6 0 R "
    return _pdf_of_objects(
        b"<</Type/Catalog/Pages 2 0 R%s>>" % form,
        b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]/Contents 5 0 R/Resources %s"
        b"/Annots[%s8 0 R]>>" % (font, fields),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        _shown("Name", b""),
        b"<</Type/Annot/Subtype/Widget/FT/Tx/T(name)/V(%s)/DA(/F 9 Tf)/F 4/Rect[90 200 189 220]"
        b"/AP<</N 7 0 R>>>>" % (value or "").encode(),
        _shown(value or "", box),
        b"<</Type/Annot/Subtype/FreeText/Contents(%s)/DA(/F 9 Tf)/F 4/Rect[10 100 109 120]"
        b"/AP<</N 9 0 R>>>>" % note.encode(),
        _shown(note, box),
    )


def _shown(text: str, entries: bytes) -> bytes:
    content = b"BT /F 9 Tf 10 9 Td (%s) Tj ET" % text.encode()
    return b"<</Length %d%s>>stream\n%s\nendstream" % (len(content), entries, content)


def _pdf_of_objects(*objects: bytes) -> bytes:
    """A PDF file of these objects, from number 1 on; the first is its catalogue."""
    body, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    count = len(objects) + 1
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (count, len(body))
    return body + b"xref\n0 %d\n0000000000 65535 f \n" % count + table + trailer


def docx_of_paragraphs(count: int) -> bytes:
    """A small .docx file of many paragraphs."""
    whole, buffer = zipfile.ZipFile(io.BytesIO(docx())), io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in whole.namelist():
            data = whole.read(name)
            if name == "word/document.xml":
                data = data.replace(b"<w:sectPr", b"<w:p/>" * count + b"<w:sectPr", 1)
            archive.writestr(name, data)
    return buffer.getvalue()


def text_of(data: bytes, kind: str) -> str:
    """Return a document's text, read in this process."""
    return read_here(data, kind, None, ReadLimits()).text
