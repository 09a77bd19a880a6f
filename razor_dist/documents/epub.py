"""Text of electronic books: the pages of their spine, in its order.

An EPUB file is a zip archive of XHTML pages; the package EbookLib, which also reads it, is AGPL.
"""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from collections.abc import Iterator
from html.entities import name2codepoint as known
from typing import Any
from urllib.parse import unquote, urldefrag

from bs4 import BeautifulSoup
from lxml import etree
from lxml.html.defs import empty_tags

from razor_dist.config.errors import DocumentError
from razor_dist.documents.html import decoded, text_of
from razor_dist.documents.read import ReadLimits

# Unpacked bytes of one file at most: an archive of kilobytes can hold gigabytes of zeros.
_LARGEST_BYTES = 256 * 2**20
_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
# Fonts may be obfuscated; the text of such a book is open.
_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
_SELF_CLOSED = re.compile(r"<([\w:-]+)([^<>]*)/>")
_ENTITY = re.compile(r"&(?!amp;|lt;|gt;|quot;|apos;)(\w+);")


def read(data: bytes, limits: ReadLimits) -> Iterator[str]:
    """Yield the text of each page; `DocumentError` if it is encrypted, too long or incomplete."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        book = _Book(archive)
        pages = book.pages()
        limits.check_pages(len(pages))
        yield from map(book.page, pages)


def _parser(**given: Any) -> etree.XMLParser:
    """A parser that raises at a mistake, where Beautiful Soup's own would end the page there."""
    return etree.XMLParser(**given | {"resolve_entities": False, "recover": False})


def _with_end(tag: re.Match[str]) -> str:
    """Return an empty element as HTML has it, where ``<title/>`` would swallow the page."""
    return tag[0] if tag[1] in empty_tags else f"<{tag[1]}{tag[2]}></{tag[1]}>"


class _Book:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._names = set(archive.namelist())
        if _ENCRYPTION in self._names:
            methods = self._xml(_ENCRYPTION).iter("{*}EncryptionMethod")
            if any(method.get("Algorithm") not in _FONTS for method in methods):
                raise DocumentError("is encrypted")

    def pages(self) -> list[str]:
        """Return the names of the pages' files, each once: the spine may name places in a file."""
        root = next(self._xml(_CONTAINER).iter("{*}rootfile"), None)
        package = root.get("full-path") if root is not None else None
        if not package:
            raise DocumentError(f"names no package file in {_CONTAINER}")
        tree = self._xml(package)
        files = {item.get("id"): item.get("href", "") for item in tree.iter("{*}item")}
        folder = posixpath.dirname(package)
        names = []
        for reference in tree.iter("{*}itemref"):
            if reference.get("idref") not in files:
                raise DocumentError(f"has no page {reference.get('idref')!r} of its spine")
            href = unquote(urldefrag(files[reference.get("idref")]).url)
            names.append(posixpath.normpath(posixpath.join(folder, href)))
        return list(dict.fromkeys(names))

    def page(self, name: str) -> str:
        page = decoded(self._bytes(name))
        # Named characters of HTML, which XML does not know.
        page = _ENTITY.sub(lambda e: chr(known[e[1]]) if e[1] in known else e[0], page)
        try:
            return text_of(BeautifulSoup(page, "xml", parser=_parser))
        except etree.XMLSyntaxError:
            return text_of(BeautifulSoup(_SELF_CLOSED.sub(_with_end, page), "lxml"))

    def _xml(self, name: str) -> etree._Element:
        return etree.fromstring(self._bytes(name), _parser())

    def _bytes(self, name: str) -> bytes:
        if name not in self._names:
            raise DocumentError(f"lacks the file {name}")
        info = self._archive.getinfo(name)
        if info.flag_bits & 1:
            raise DocumentError("is encrypted")
        if info.file_size > _LARGEST_BYTES:
            raise DocumentError(
                f"holds {name} of {info.file_size} bytes, more than {_LARGEST_BYTES}"
            )
        return self._archive.read(name)
