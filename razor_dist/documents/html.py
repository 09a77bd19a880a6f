"""Text of web pages, with their headings and paragraphs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bs4 import BeautifulSoup, NavigableString, Tag
from bs4.dammit import UnicodeDammit

from razor_dist.config.errors import DocumentError
from razor_dist.documents.marks import grouped, numbered, raised, reading
from razor_dist.documents.read import ReadLimits

# Elements that are not read: programs, pictures, menus, parentheses around a `reading`.
_SKIPPED = re.compile("head|script|style|template|noscript|svg|nav|iframe|object|rp")
# Elements within a paragraph; every other one begins and ends a block of its own.
_INLINE = re.compile(
    "a|abbr|acronym|b|bdi|bdo|big|cite|code|data|del|dfn|em|font|i|img|ins|kbd|label"
    "|mark|q|ruby|rb|s|samp|small|span|strike|strong|sub|sup|time|tt|u|var|wbr"
)
# Roles, classes (Sphinx's, DocBook's, Publican's) and ids (Publican's) of elements around a page's
# text, such as menus.
_ROLES = {"navigation", "banner", "contentinfo", "search"}
_CLASSES = {"headerlink", "related", "sphinxsidebar", "navheader", "navfooter", "docnav"}
_IDS = {"banner"}
_HEADING = re.compile("h[1-6]")
_SPACE = re.compile(r"[ \t\r\n\f]+")
_HASH = re.compile("^#", re.MULTILINE)
# Tags of a page. Each takes about 12 microseconds and 700 bytes: all of them 20 s and 1 GiB. Text
# has one in 40 bytes or fewer.
_MOST_TAGS = 1_500_000
_INTEGER = re.compile(r"-?\d{1,9}")
# Elements of MathML: the text before each of their parts.
_MARKS = {
    **{"mfrac": ("", "/"), "msup": ("", "^"), "msub": ("", "_"), "msubsup": ("", "_", "^")},
    **{"mover": ("", "^"), "munder": ("", "_"), "munderover": ("", "_", "^")},
}
_DECLARATION = re.compile(r"\s*<\?xml[^>]*\?>")
# Declarations of pages that may be UTF-8 with a few wrong bytes; None is a page without any.
_UTF8 = {None, "utf-8", "utf8"}
_ASCII = bytes(range(128))
# In pages that are declared as ISO-8859-1 these stand for Windows' quotation marks and dashes.
_CONTROL = re.compile("[\x80-\x9f]")


def read(data: bytes, limits: ReadLimits) -> Iterator[str]:
    """Yield the text of an HTML page; `DocumentError` if its encoding cannot be found."""
    yield text_of(BeautifulSoup(decoded(data), "lxml"))


def decoded(data: bytes) -> str:
    """Decode a page by its declarations or, without them, by its bytes.

    Raises `DocumentError` if its encoding cannot be found, or if it has too many tags to be read.
    """
    found = UnicodeDammit(data, is_html=True)
    text = found.unicode_markup
    if found.declared_html_encoding in _UTF8 and found.original_encoding not in _UTF8:
        # One wrong byte makes Beautiful Soup guess, and read the whole page as another script's.
        likely = data.decode("utf-8-sig", "replace")
        if 2 * likely.count("\ufffd") < len(data.translate(None, _ASCII)):
            text = likely
    if text is None:
        raise DocumentError("is in an unknown encoding")
    text = _CONTROL.sub(lambda one: one[0].encode("latin-1").decode("cp1252", "ignore"), text)
    if text.count("<") > _MOST_TAGS:
        raise DocumentError(f"has more than {_MOST_TAGS:,} tags; split it")
    return _DECLARATION.sub("", text, count=1)


def text_of(page: Tag) -> str:
    """Return an element's text: blocks separated by empty lines, headings marked by ``#``."""
    blocks = _Blocks()
    blocks.walk(page)
    blocks.end()
    return "\n\n".join(blocks.done)


class _Blocks:
    def __init__(self) -> None:
        self.done: list[str] = []
        self._open: list[str] = []
        self._mark = ""
        self._numbers: dict[int, int] = {}  # of the next item of each list, by its ``id``

    def walk(self, element: Tag) -> None:
        for child in element.children:
            if isinstance(child, Tag):
                self._enter(child)
            elif type(child) is NavigableString:  # its subclasses are comments and the like
                self._open.append(_SPACE.sub(" ", child))

    def _enter(self, tag: Tag) -> None:
        name = tag.name.lower()
        if _SKIPPED.fullmatch(name):
            return
        if _surrounds(tag):
            # A chapter's or a page's title may stand in its header.
            for heading in tag.find_all(_HEADING) if name == "header" else []:
                if heading.find_parent("nav") is None:
                    self._enter(heading)
        elif name == "br":
            self._open.append("\n")
            self.walk(tag)  # XML lets it hold text
        elif name == "sup":
            begin = len(self._open)
            self.walk(tag)
            self._open[begin:] = [raised("".join(self._open[begin:]))]
        elif name == "math":
            self._open.append(_SPACE.sub(" ", str(tag.get("alttext") or _formula(tag))))
        elif _INLINE.fullmatch(name):
            self.walk(tag)
        elif name == "rt":
            self._open.append(reading(_SPACE.sub(" ", tag.get_text())))
        elif name in ("td", "th"):
            self.walk(_inner(tag))
            self._open.append("\t")
        elif name == "pre":
            self.end()
            for line_break in tag.find_all("br"):  # between lines of code, as Docusaurus writes it
                line_break.append("\n")
            # A comment or a prompt of a shell is no heading.
            self.done.append(_HASH.sub(" #", tag.get_text().strip("\n")))
        else:
            self.end()
            mark = ""
            if _HEADING.fullmatch(name):
                mark = "#" * int(name[1]) + " "
            elif name == "li":
                mark = self._item(tag)
            self._mark = mark or self._mark
            self.walk(tag)
            self.end()
            if mark:
                self._mark = ""  # an empty heading or item has left it

    def _item(self, tag: Tag) -> str:
        """Return the mark of an item, in an ordered list its number."""
        items = tag.parent
        if items is None or items.name != "ol":
            return "- "
        is_reversed = items.has_attr("reversed")
        if id(items) not in self._numbers:
            first = len(items.find_all("li", recursive=False)) if is_reversed else 1
            self._numbers[id(items)] = _integer(items.get("start"), first)
        number = _integer(tag.get("value"), self._numbers[id(items)])
        self._numbers[id(items)] = number - 1 if is_reversed else number + 1
        return f"{numbered(number, str(items.get('type')))}. "

    def end(self) -> None:
        # A tab ends each cell: rows keep their columns also where a cell is empty.
        lines = (
            "\t".join(" ".join(cell.split()) for cell in line.split("\t")).removesuffix("\t")
            for line in "".join(self._open).split("\n")
        )
        text = "\n".join(line for line in lines if line.strip())
        self._open = []
        if text:
            if self._mark.startswith("#"):
                text = text.replace("\n", " ")
            self.done.append(self._mark + text)
            self._mark = ""


def _inner(cell: Tag) -> Tag:
    """Return the only paragraph of a table's cell, or the cell: the row remains one line."""
    while True:
        children = [one for one in cell.children if isinstance(one, Tag) or str(one).strip()]
        only = children[0] if len(children) == 1 else None
        if not isinstance(only, Tag) or only.name not in ("p", "div") or _surrounds(only):
            return cell
        cell = only


def _surrounds(tag: Tag) -> bool:
    """Return whether an element is a menu, a page's header or footer, or a mark to link to."""
    if tag.name in ("header", "footer") and tag.parent is not None and tag.parent.name == "body":
        return True
    if tag.get("role") in _ROLES or tag.get("id") in _IDS:
        return True
    return not _CLASSES.isdisjoint(tag.get_attribute_list("class"))


def _integer(value: object, default: int) -> int:
    return int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else default


def _formula(element: Tag) -> str:
    """Return a formula of MathML as a line: its TeX if it has some, else such as ``x^2/(a+b)``."""
    parts = []
    for child in element.children:
        if isinstance(child, Tag):
            if child.name == "annotation" and child.get("encoding") == "application/x-tex":
                return child.get_text()
            if not child.name.startswith("annotation"):
                parts.append(_formula(child))
        elif type(child) is NavigableString and child.strip():
            parts.append(child.strip())
    if element.name == "msqrt":
        return f"\u221a{grouped(''.join(parts))}"
    marks = _MARKS.get(element.name, ())
    if len(marks) != len(parts):
        return "".join(parts)
    return "".join(f"{mark}{grouped(part)}" for mark, part in zip(marks, parts, strict=True))
