"""The structure of a document: where its text may be cut, and where in it a character is."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence
from typing import Any

from razor_dist.documents.read import Document

# From texts to their numbers of tokens.
Count = Callable[[Sequence[str]], list[int]]

# Before a chapter's title in a plain text, which stands alone between empty lines.
_PLAIN_CHAPTER = (
    r"(?<=\n\n)(?=[ \t]*(?:BOOK|PART|Part|CHAPTER|Chapter) +[\dIVXLC]+\b[^\n]{0,80}\n\s*\n)"
)
# Where a text may be cut, the best places first: empty matches before a unit's beginning.
_BOUNDARIES = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"(?=^# )",
        _PLAIN_CHAPTER,
        r"(?=^## )",
        r"(?=^#{3,6} )",
        r"(?<=\n)(?=\n)",
        r"(?<=\n)",
        "(?<=[.!?])(?=\\s)|(?<=[\u3002\uff01\uff1f])",
        r"(?=\s)",
    )
]
# Text between fences is code, where # begins a comment.
_HEADING = re.compile(
    rf"^```.*?^```|^(?P<marks>#{{1,6}}) +(?P<title>[^\n]+)|{_PLAIN_CHAPTER}(?P<plain>[^\n]+)",
    re.MULTILINE | re.DOTALL,
)


def split(text: str, limit: int, count: Count) -> list[str]:
    """Cut a text into as few, and as even, parts as hold it, each of at most ``limit`` tokens.

    Parts consist of whole units: chapters, or a long chapter's sections, or in turn paragraphs,
    lines, sentences, words, characters; joined, they are the text. A part's length is the sum of
    its units' tokens, which may differ a little from its own tokens.
    """
    units = _units(text, limit, count, 0)
    fewest = len(_packed(units, limit))
    # The smallest limit that needs no more parts makes them even.
    least, enough = 1, limit
    while least < enough:
        middle = (least + enough) // 2
        if len(_packed(units, middle)) > fewest:
            least = middle + 1
        else:
            enough = middle
    return ["".join(part) for part in _packed(units, enough)]


def _packed(units: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    """Put units into parts, in order, as long as they fit; a unit too long is a part alone."""
    parts: list[list[str]] = []
    size = 0
    for unit, tokens in units:
        if not parts or size + tokens > limit:  # white space may have no tokens
            parts.append([])
            size = 0
        parts[-1].append(unit)
        size += tokens
    return parts


def _units(text: str, limit: int, count: Count, level: int) -> list[tuple[str, int]]:
    """Return units of at most ``limit`` tokens and their tokens, cut from ``level`` on."""
    if level == len(_BOUNDARIES):
        return _characters(text, limit, count)
    pieces = [piece for piece in _BOUNDARIES[level].split(text) if piece]
    if level and len(pieces) == 1:  # it is known to be too long
        return _units(text, limit, count, level + 1)
    units: list[tuple[str, int]] = []
    for piece, tokens in zip(pieces, count(pieces), strict=True):
        if tokens <= limit:
            units.append((piece, tokens))
        else:
            units += _units(piece, limit, count, level + 1)
    return units


def _characters(text: str, limit: int, count: Count) -> list[tuple[str, int]]:
    [tokens] = count([text])
    if tokens <= limit or len(text) == 1:
        return [(text, min(tokens, limit))]
    middle = len(text) // 2
    return _characters(text[:middle], limit, count) + _characters(text[middle:], limit, count)


class Outline:
    """The pages of a PDF file, or other documents' headings: with #, or a plain "CHAPTER 1"."""

    def __init__(self, document: Document) -> None:
        self._pages = document.pages
        self._begins: list[int] = []
        self._headings: list[list[str]] = []
        if self._pages:
            return
        path: list[tuple[int, str]] = []  # levels and titles, from the outermost in
        for found in _HEADING.finditer(document.text):
            title = found["title"] or found["plain"]
            if title is None:
                continue
            level = len(found["marks"] or "#")
            path = [above for above in path if above[0] < level] + [(level, title.strip())]
            self._begins.append(found.start())
            self._headings.append([title for _, title in path])

    def at(self, character: int) -> dict[str, Any]:
        """Return the ``page`` of a character, from 1, or its ``headings``, the chapter's first."""
        if self._pages:
            return {"page": bisect.bisect_right(self._pages, character)}
        index = bisect.bisect_right(self._begins, character) - 1
        return {"headings": self._headings[index]} if index >= 0 else {}
