"""Text of PDF files."""

from __future__ import annotations

import io

from pypdf import PasswordType, PdfReader

from razor_dist.config.errors import DocumentError


def read(data: bytes) -> str:
    """The text of a PDF file, page by page.

    Raises
    ------
    DocumentError
        If it asks for a password, or its pages are pictures.
    """
    reader = PdfReader(io.BytesIO(data))
    # Files that only restrict printing and the like open with an empty password.
    if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
        raise DocumentError("is encrypted")
    pages = [page.extract_text().strip() for page in reader.pages]
    text = "\n\n".join(filter(None, pages))
    if not text:
        raise DocumentError(
            f"holds no text on its {len(pages)} pages; a scan must be recognised first (OCR)"
        )
    return text
