"""Texts of Word documents: controls, changes, boxes, tables, notes, equations, numbers of lists."""

from __future__ import annotations

import docx
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls

from tests.documents import files
from tests.documents.files import text_of

RUN = "<w:r><w:t>{}</w:t></w:r>"
SAID = RUN.format("said")
CELL = f"<w:tc><w:p>{RUN}</w:p></w:tc>"
BOX = f"<w:pict><w:txbxContent><w:p>{SAID}</w:p></w:txbxContent></w:pict>"
UP = "<w:r><w:rPr><w:vertAlign w:val='superscript'/></w:rPr><w:t>{}</w:t></w:r>"
FORMULA = (
    "<m:oMath xmlns:m='http://schemas.openxmlformats.org/officeDocument/2006/math'><m:f><m:num>"
    "<m:r><m:t>a+b</m:t></m:r></m:num><m:den><m:sSup><m:e><m:r><m:t>2</m:t></m:r></m:e><m:sup>"
    "<m:r><m:t>n+1</m:t></m:r></m:sup></m:sSup></m:den></m:f><m:r><m:t>+</m:t></m:r><m:rad>"
    "<m:deg/><m:e><m:r><m:t>c</m:t></m:r></m:e></m:rad></m:oMath>"
)
TWICE = (
    "<mc:AlternateContent xmlns:mc='http://schemas.openxmlformats.org/markup-compatibility/2006'>"
    f"<mc:Choice>{BOX}</mc:Choice><mc:Fallback>{BOX}</mc:Fallback></mc:AlternateContent>"
)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (f"<w:sdt><w:sdtContent><w:p>{SAID}</w:p></w:sdtContent></w:sdt>", "said"),
        (f"<w:p><w:sdt><w:sdtContent>{SAID}</w:sdtContent></w:sdt></w:p>", "said"),
        (f"<w:p><w:ins w:id='1' w:author='a'>{SAID}</w:ins></w:p>", "said"),
        (f"<w:p><w:del w:id='1' w:author='a'><w:r><w:tab/></w:r></w:del>{SAID}</w:p>", "said"),
        (f"<w:p><w:moveFrom w:id='1'>{SAID}</w:moveFrom>{RUN.format('moved')}</w:p>", "moved"),
        (f"<w:p><w:pPr><w:tabs><w:tab w:pos='9'/></w:tabs></w:pPr>{SAID}</w:p>", "said"),
        (f"<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/></w:r>{SAID}</w:p>", "a\tb\nsaid"),
        (f"<w:p><w:r>{TWICE}<w:t>beside</w:t></w:r></w:p>", "said\nbeside"),
        (
            "<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val='2'/></w:tcPr>"
            f"<w:p>{RUN.format('wide')}</w:p></w:tc>{CELL.format('right')}</w:tr>"
            f"<w:tr><w:sdt><w:sdtContent>{CELL.format('a')}</w:sdtContent></w:sdt>"
            f"{CELL.format('b')}</w:tr></w:tbl>",
            "wide\tright\na\tb",
        ),
        (
            f"<w:tbl><w:tr><w:tc><w:tbl><w:tr>{CELL.format('in')}{CELL.format('side')}</w:tr>"
            f"</w:tbl><w:p/></w:tc>{CELL.format('out')}</w:tr></w:tbl>",
            "in\tside\tout",
        ),
        (f"<w:p>{RUN.format('10')}{UP.format('+')}{UP.format('6')}{SAID}</w:p>", "10^+6said"),
        (f"<w:p>{RUN.format('1')}{UP.format('st')}</w:p>", "1st"),
        (
            "<w:p><w:r><w:sym w:font='Symbol' w:char='F06D'/><w:t>m </w:t>"
            "<w:sym w:font='Wingdings' w:char='F0FE'/><w:sym w:char='00e9'/></w:r></w:p>",
            "μm ☑é",
        ),
        (
            f"<w:p><w:r><w:ruby><w:rt>{RUN.format('かん')}</w:rt>"
            f"<w:rubyBase>{RUN.format('漢')}</w:rubyBase></w:ruby></w:r>{SAID}</w:p>",
            "漢(かん)said",
        ),
        (f"<w:p><!-- no -->{RUN.format('x')} {FORMULA}</w:p>", "x(a+b)/(2^(n+1))+√c"),
    ],
    ids=[
        *("block control", "inline control", "insertion", "deletion", "move", "tab stop"),
        *("tab and break", "text box", "merged cells", "nested table"),
        *("power", "ordinal", "symbols", "reading", "equation"),
    ],
)
def test_all_that_a_word_document_says_is_read_once(body: str, text: str) -> None:
    assert text_of(files.docx_of_body(body), "docx") == text


def test_notes_follow_the_paragraph_that_refers_to_them() -> None:
    refer = "<w:r><w:{}Reference w:id='2'/></w:r>"
    own = "<w:{0} w:id='2'><w:p><w:r><w:{0}Ref/><w:t> {1}</w:t></w:r></w:p></w:{0}>"
    body = (
        f"<w:p>{RUN.format('30 days.')}{refer.format('footnote')}</w:p>"
        f"<w:tbl><w:tr>{CELL.format('cell')[:-13]}{refer.format('endnote')}</w:p></w:tc></w:tr>"
        f"</w:tbl><w:p>{SAID}{refer.format('endnote')}</w:p>"
    )
    notes = {f"{kind}s": own.format(kind, text) for kind, text in NOTES.items()}
    text = text_of(files.docx_of_body(body, **notes), "docx")
    assert text == ("30 days.[^1]\n\n[^1]: Not in Austria.\n\ncell[^2]\n\n[^2]: As of May.\n\nsaid")


NOTES = {"footnote": "Not in Austria.", "endnote": "As of May."}
LEVEL = (
    "<w:lvl w:ilvl='{}'><w:start w:val='{}'/><w:numFmt w:val='{}'/><w:lvlText w:val='{}'/></w:lvl>"
)
LISTS = (
    "<w:abstractNum w:abstractNumId='70'>"
    + LEVEL.format(0, 3, "decimal", "%1.")
    + LEVEL.format(1, 1, "lowerLetter", "%1.%2)")
    + LEVEL.format(2, 1, "bullet", "")
    + "</w:abstractNum><w:num w:numId='80'><w:abstractNumId w:val='70'/></w:num>"
    "<w:num w:numId='90'><w:abstractNumId w:val='70'/><w:lvlOverride w:ilvl='0'>"
    "<w:startOverride w:val='1'/></w:lvlOverride></w:num>"
)


def test_numbers_of_lists_and_clauses_are_counted() -> None:
    file = docx.Document()
    root = file.part.numbering_part.element
    for element in parse_xml(f"<w:numbering {nsdecls('w')}>{LISTS}</w:numbering>"):
        root.append(element)

    def add(text: str, list: int, level: int, style: str | None = None) -> None:
        properties = file.add_paragraph(text, style)._p.get_or_add_pPr()
        inner = f"<w:ilvl w:val='{level}'/><w:numId w:val='{list}'/>"
        properties.append(parse_xml(f"<w:numPr {nsdecls('w')}>{inner}</w:numPr>"))

    add("Terms", 80, 0, "Heading 2")
    add("one", 80, 1)
    add("two", 80, 1)
    add("plain", 80, 2)
    add("Costs", 80, 0, "Heading 2")
    add("three", 80, 1)
    add("again", 90, 0)
    add("", 90, 0)
    add("not", 0, 0, "List Number")
    file.add_paragraph("styled", "List Number")
    text = text_of(files.saved(file), "docx")
    assert text.split("\n\n") == [
        *("## 3. Terms", "3.a) one", "3.b) two", "plain", "## 4. Costs", "4.a) three"),
        *("1. again", "not", "1. styled"),
    ]
