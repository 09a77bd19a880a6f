"""Text of Word's documents."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from docx import Document
from docx.document import Document as DocxDocument
from docx.oxml import parse_xml
from docx.oxml.ns import qn
from docx.text.paragraph import Paragraph

from razor_dist.config.errors import DocumentError
from razor_dist.documents.detect import COMPOUND
from razor_dist.documents.docx_lists import Numbering
from razor_dist.documents.marks import grouped, raised, reading, symbol
from razor_dist.documents.read import ReadLimits

_P, _TABLE, _ROW, _CELL, _RUN = map(qn, ("w:p", "w:tbl", "w:tr", "w:tc", "w:r"))
# Elements between a parent and its paragraphs, rows or cells: content controls, insertions.
_WRAPPERS = set(map(qn, ("w:sdt", "w:sdtContent", "w:customXml", "w:ins", "w:moveTo")))
# Elements of which python-docx's ``str`` is the text.
_CHARACTERS = set(map(qn, ("w:t", "w:tab", "w:br", "w:cr", "w:noBreakHyphen", "w:ptab")))
# What is deleted or was moved, tab stops, and the second form of a text box.
_UNREAD = {
    *map(qn, ("w:del", "w:moveFrom", "w:pPr")),
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",
}
_SYMBOL, _RUBY = qn("w:sym"), qn("w:ruby")
_REFERENCES = {qn("w:footnoteReference"): "footnote", qn("w:endnoteReference"): "endnote"}
_RAISED = f"{qn('w:rPr')}/{qn('w:vertAlign')}[@{qn('w:val')}='superscript']"
# Elements of equations: the text before some of their parts.
_M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_BEFORE = {"num": "", "den": "/", "sup": "^", "sub": "_"}
_CODE = re.compile("[0-9A-Fa-f]{4}")


def read(data: bytes, limits: ReadLimits) -> Iterator[str]:
    """Yield paragraphs, and tables with their rows as lines; `DocumentError` if encrypted.

    Behind each are the notes that it refers to.
    """
    if data.startswith(COMPOUND):
        raise DocumentError("is encrypted, or a .doc file under another name")
    document = Document(io.BytesIO(data))
    body = _Body(document)
    levels: dict[str | None, str] = {}  # by styles, which python-docx looks up slowly
    for element in _children(document.element.body, _P, _TABLE):
        text = body.text_of(element)
        if element.tag == _P and text.strip():
            if element.style not in levels:
                levels[element.style] = _level(Paragraph(element, document))
            text = levels[element.style] + text
        yield text if text.strip() else ""
        yield from body.notes()


def _children(parent: Any, *tags: str) -> Iterator[Any]:
    """Yield the children with one of the tags, also those in content controls and insertions."""
    for child in parent:
        if child.tag in tags:
            yield child
        elif child.tag in _WRAPPERS:
            yield from _children(child, *tags)


class _Body:
    """Returns elements' text, in the document's order, since it numbers lists and notes."""

    def __init__(self, document: DocxDocument) -> None:
        self._numbering = Numbering(_part(document, "numbering"), document.styles.element)
        self._notes = {
            (kind, note.get(qn("w:id"))): note
            for kind in _REFERENCES.values()
            for note in _part(document, f"{kind}s")
        }
        self._cited: list[Any] = []  # notes that are to follow
        self._written = 0  # notes before them

    def text_of(self, element: Any) -> str:
        """Return the text of a paragraph, or of a table with its rows as lines."""
        if element.tag == _P:
            mark = self._numbering.mark(element)
            text = self._inline(element).strip("\n")
            return mark + text if text.strip() else text
        return "\n".join(
            "\t".join(map(self._blocks, _children(row, _CELL))) for row in _children(element, _ROW)
        )

    def notes(self) -> Iterator[str]:
        """Yield the notes that the texts since the last call refer to."""
        while self._cited:
            self._written += 1
            yield f"[^{self._written}]: {self._blocks(self._cited.pop(0)).strip()}"

    def _blocks(self, parent: Any) -> str:
        return "\n".join(map(self.text_of, _children(parent, _P, _TABLE))).strip("\n")

    def _inline(self, element: Any) -> str:
        """Return the text of a paragraph's elements; a power may consist of several runs."""
        parts = []
        for is_raised, children in groupby(element, _is_raised):
            text = "".join(map(self._said, children))
            parts.append(raised(text) if is_raised else text)
        return "".join(parts)

    def _said(self, element: Any) -> str:
        tag = element.tag
        if tag in _CHARACTERS:
            return str(element)
        if tag in _UNREAD:
            return ""
        if tag == _SYMBOL:
            code = element.get(qn("w:char"), "")
            return symbol(element.get(qn("w:font")), int(code, 16)) if _CODE.fullmatch(code) else ""
        if tag == _RUBY:  # the reading stands before its characters
            parts = {part.tag: self._inline(part) for part in element}
            return parts.get(qn("w:rubyBase"), "") + reading(parts.get(qn("w:rt"), ""))
        if tag in _REFERENCES:
            return self._reference(_REFERENCES[tag], element.get(qn("w:id")))
        if str(tag).startswith(_M):  # a comment has a function for a tag
            return self._formula(element)
        said = self._inline(element)
        return f"\n{said}\n" if tag == _P else said  # a text box is lines of its own

    def _reference(self, kind: str, id: str) -> str:
        note = self._notes.pop((kind, id), None)
        if note is None:
            return ""
        self._cited.append(note)
        return f"[^{self._written + len(self._cited)}]"

    def _formula(self, element: Any) -> str:
        """Return an equation's element as one line of text: ``x^2/(a+b)``."""
        name = element.tag.removeprefix(_M)
        if name == "t":
            return element.text or ""
        said = self._inline(element)
        if name in _BEFORE:
            return _BEFORE[name] + grouped(said) if said else ""
        if name == "rad":
            return f"\u221a{grouped(said)}"
        if name == "d":
            begin, end = (element.find(f"{_M}dPr/{_M}{side}Chr") for side in ("beg", "end"))
            return f"{_sign(begin, '(')}{said}{_sign(end, ')')}"
        sign = element.find(f"{_M}naryPr/{_M}chr")
        return (_sign(sign, "\u222b") if name == "nary" else "") + said


def _part(document: DocxDocument, name: str) -> Any:
    """Return the elements of another part of the file; none if there is no such part."""
    for relation in document.part.rels.values():
        if relation.reltype.endswith(f"/{name}") and not relation.is_external:
            return parse_xml(relation.target_part.blob)
    return ()


def _sign(element: Any, default: str) -> str:
    return default if element is None else element.get(f"{_M}val", "")


def _is_raised(element: Any) -> bool:
    return element.tag == _RUN and element.find(_RAISED) is not None


def _level(paragraph: Paragraph) -> str:
    """Return the mark of a heading by the paragraph's style; empty for other styles."""
    style = paragraph.style.name if paragraph.style is not None else None
    if style == "Title":
        return "# "
    level = re.fullmatch(r"Heading ([1-9])", style or "")
    return "#" * int(level[1]) + " " if level else ""
