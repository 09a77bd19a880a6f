"""Text of Word's documents."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

from docx import Document
from docx.table import Table
from docx.text.paragraph import Paragraph

from razor_dist.config.errors import DocumentError
from razor_dist.documents.read import ReadLimits

# The beginning of a .docx file with a password, and of every .doc file.
_COMPOUND = bytes.fromhex("d0cf11e0a1b11ae1")


def read(data: bytes, limits: ReadLimits) -> Iterator[str]:
    """Yield paragraphs, and tables with their rows as lines; `DocumentError` if encrypted."""
    if data.startswith(_COMPOUND):
        raise DocumentError("is encrypted, or a .doc file under another name")
    levels: dict[str | None, str] = {}  # by styles, which python-docx looks up slowly
    for part in Document(io.BytesIO(data)).iter_inner_content():
        if isinstance(part, Table):
            text = "\n".join("\t".join(cell.text for cell in row.cells) for row in part.rows)
        else:
            style = part._p.style
            if style not in levels:
                levels[style] = _level(part)
            text = levels[style] + part.text if part.text.strip() else ""
        yield text if text.strip() else ""


def _level(paragraph: Paragraph) -> str:
    """Return the mark of a heading by the paragraph's style; empty for other styles."""
    style = paragraph.style.name if paragraph.style is not None else None
    if style == "Title":
        return "# "
    level = re.fullmatch(r"Heading ([1-9])", style or "")
    return "#" * int(level[1]) + " " if level else ""
