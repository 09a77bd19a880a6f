"""Text of PDF files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pypdfium2  # type: ignore[import-untyped]
import pypdfium2.raw as raw  # type: ignore[import-untyped]

from razor_dist.config.errors import DocumentError
from razor_dist.documents.read import ReadLimits

# A line was broken because it was full if, with the next word, it is longer than this share of the
# page's longest line.
_FULL = 0.8
# A page whose longest line is shorter is a list.
_LEAST_CHARACTERS = 40
_GOES_ON = re.compile(r"(?:[^\W\d_]|[,;])$")
# PDFium's mark of a word that is hyphenated at the end of a line.
_HYPHENATED = re.compile("[\x02\ufffe](\r?\n)?")


def read(data: bytes, limits: ReadLimits) -> Iterator[str]:
    """Yield the text of each page; `DocumentError` for passwords, scans and too many pages."""
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error):
            raise DocumentError("is encrypted with a password") from None
        raise
    pages, found = len(document), False
    limits.check_pages(pages)
    document.init_forms()
    for number in range(pages):
        page = document[number]
        # What a form was filled in with, and notes, become text of the page once it is read again.
        if raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY) == raw.FLATTEN_SUCCESS:
            page.close()
            page = document[number]
        text = _HYPHENATED.sub("", page.get_textpage().get_text_bounded())
        page.close()  # with its text
        found = found or bool(text.strip())
        yield _unwrapped(text.replace("\r\n", "\n").strip())
    if not found:
        raise DocumentError(
            f"holds no text on its {pages} pages; a scan must be recognised first (OCR)"
        )


def _unwrapped(page: str) -> str:
    """Join lines that were broken only because they were full, so that sentences are whole.

    A line is full if the next line's first word would have made it nearly as long as the page's
    longest line. A full line that ends with a letter or a comma is joined with the next; headings,
    lists and rows of numbers stay as they are.
    """
    lines = page.split("\n")
    longest = max(map(len, lines))
    parts = [lines[0]]
    for line, following in itertools.pairwise(lines):
        first = following.split(" ", 1)[0]
        full = longest >= _LEAST_CHARACTERS and len(line) + 1 + len(first) > _FULL * longest
        parts += [" " if first and full and _GOES_ON.search(line) else "\n", following]
    return "".join(parts)
