"""Where in a document a character is: its page, or the headings that it stands under."""

from __future__ import annotations

import bisect
import re
from typing import Any

from razor_dist.documents.read import Document
from razor_dist.documents.split import PLAIN_CHAPTER

# What is between fences is code, where # begins a comment.
_HEADING = re.compile(
    rf"^```.*?^```|^(?P<marks>#{{1,6}}) +(?P<title>[^\n]+)|{PLAIN_CHAPTER}(?P<plain>[^\n]+)",
    re.MULTILINE | re.DOTALL,
)


class Places:
    """Pages of a PDF file; of other documents the headings, which are lines that begin with #."""

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
        """Return ``page``, from 1, or ``headings``, the chapter's first; nothing if none is known.

        Of a passage that goes on over a page it is the page on which it begins.
        """
        if self._pages:
            return {"page": bisect.bisect_right(self._pages, character)}
        index = bisect.bisect_right(self._begins, character) - 1
        return {"headings": self._headings[index]} if index >= 0 else {}
