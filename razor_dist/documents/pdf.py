"""Text of PDF files."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pypdfium2  # type: ignore[import-untyped]

from razor_dist.config.errors import DocumentError
from razor_dist.documents.read import ReadLimits

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
    for number in range(pages):
        page = document[number]
        text = _HYPHENATED.sub("", page.get_textpage().get_text_bounded())
        page.close()  # with its text
        found = found or bool(text.strip())
        yield text.replace("\r\n", "\n").strip()
    if not found:
        raise DocumentError(
            f"holds no text on its {pages} pages; a scan must be recognised first (OCR)"
        )
