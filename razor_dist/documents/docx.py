"""Text of Word's documents."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

from docx import Document
from docx.oxml.ns import qn
from docx.text.paragraph import Paragraph

from razor_dist.config.errors import DocumentError
from razor_dist.documents.detect import COMPOUND
from razor_dist.documents.read import ReadLimits

_P, _TABLE, _ROW, _CELL = map(qn, ("w:p", "w:tbl", "w:tr", "w:tc"))
# Elements between a parent and its paragraphs, rows or cells: content controls, insertions.
_WRAPPERS = set(map(qn, ("w:sdt", "w:sdtContent", "w:customXml", "w:ins", "w:moveTo")))
# Elements of which python-docx's ``str`` is the text.
_CHARACTERS = set(map(qn, ("w:t", "w:tab", "w:br", "w:cr", "w:noBreakHyphen", "w:ptab")))
# What is deleted or was moved, tab stops, and the second form of a text box.
_UNREAD = {
    *map(qn, ("w:del", "w:moveFrom", "w:pPr")),
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",
}


def read(data: bytes, limits: ReadLimits) -> Iterator[str]:
    """Yield paragraphs, and tables with their rows as lines; `DocumentError` if encrypted."""
    if data.startswith(COMPOUND):
        raise DocumentError("is encrypted, or a .doc file under another name")
    document = Document(io.BytesIO(data))
    levels: dict[str | None, str] = {}  # by styles, which python-docx looks up slowly
    for element in _children(document.element.body, _P, _TABLE):
        text = _text_of(element)
        if element.tag == _P and text.strip():
            if element.style not in levels:
                levels[element.style] = _level(Paragraph(element, document))
            text = levels[element.style] + text
        yield text if text.strip() else ""


def _children(parent: Any, *tags: str) -> Iterator[Any]:
    """Yield the children with one of the tags, also those in content controls and insertions."""
    for child in parent:
        if child.tag in tags:
            yield child
        elif child.tag in _WRAPPERS:
            yield from _children(child, *tags)


def _text_of(element: Any) -> str:
    """Return the text of a paragraph, or of a table with its rows as lines."""
    if element.tag == _P:
        return _inline(element).strip("\n")
    return "\n".join(
        "\t".join(map(_cell, _children(row, _CELL))) for row in _children(element, _ROW)
    )


def _cell(cell: Any) -> str:
    return "\n".join(map(_text_of, _children(cell, _P, _TABLE))).strip("\n")


def _inline(element: Any) -> str:
    """Return what the elements in a paragraph say; a text box in it is lines of their own."""
    parts = []
    for child in element:
        if child.tag in _CHARACTERS:
            parts.append(str(child))
        elif child.tag == _P:
            parts.append(f"\n{_inline(child)}\n")
        elif child.tag not in _UNREAD:
            parts.append(_inline(child))
    return "".join(parts)


def _level(paragraph: Paragraph) -> str:
    """Return the mark of a heading by the paragraph's style; empty for other styles."""
    style = paragraph.style.name if paragraph.style is not None else None
    if style == "Title":
        return "# "
    level = re.fullmatch(r"Heading ([1-9])", style or "")
    return "#" * int(level[1]) + " " if level else ""
