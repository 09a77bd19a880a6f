"""Text of Word's documents."""

from __future__ import annotations

import io
import re

from docx import Document
from docx.table import Table
from docx.text.paragraph import Paragraph

from razor_dist.config.errors import DocumentError

# What a .docx file with a password is wrapped in, as was every .doc file.
_COMPOUND = bytes.fromhex("d0cf11e0a1b11ae1")


def read(data: bytes) -> str:
    """The text of a document, with its tables' rows as lines.

    Raises
    ------
    DocumentError
        If it is encrypted.
    """
    if data.startswith(_COMPOUND):
        raise DocumentError("is encrypted, or a .doc file under another name")
    blocks = []
    for part in Document(io.BytesIO(data)).iter_inner_content():
        blocks.append(_table(part) if isinstance(part, Table) else _paragraph(part))
    return "\n\n".join(block for block in blocks if block.strip())


def _paragraph(paragraph: Paragraph) -> str:
    style = paragraph.style.name if paragraph.style is not None else None
    level = re.fullmatch(r"Heading ([1-9])", style or "")
    if paragraph.text.strip() and (level or style == "Title"):
        return "#" * (int(level[1]) if level else 1) + f" {paragraph.text}"
    return paragraph.text


def _table(table: Table) -> str:
    return "\n".join("\t".join(cell.text for cell in row.cells) for row in table.rows)
