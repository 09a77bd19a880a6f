"""Numbers that Word counts itself: of lists' items, clauses and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from docx.oxml.ns import qn

from razor_dist.documents.marks import numbered

_VALUE = qn("w:val")
_PROPERTIES = f"{qn('w:pPr')}/{qn('w:numPr')}"
# Forms of `numbered`; the others are written as decimal numbers.
_FORMS = {"lowerLetter": "a", "upperLetter": "A", "lowerRoman": "i", "upperRoman": "I"}
_DEEPEST = 9  # levels


@dataclass
class _Level:
    start: int
    form: str
    text: str  # such as "%1.%2)"
    legal: bool  # all numbers are decimal


@dataclass
class _List:
    levels: dict[int, _Level]
    counts: dict[int, int] = field(default_factory=dict)

    def next(self, at: int) -> str:
        """Count an item of a level, and return its mark; empty for bullets."""
        level = self.levels.get(at)
        if level is None:
            return ""
        self.counts[at] = self.counts.get(at, level.start - 1) + 1
        for deeper in range(at + 1, _DEEPEST):
            self.counts.pop(deeper, None)
        if level.form in ("bullet", "none"):
            return ""

        def number(found: re.Match[str]) -> str:
            above = self.levels.get(int(found[1]) - 1, level)
            count = self.counts.setdefault(int(found[1]) - 1, above.start)
            return numbered(count, "" if level.legal else _FORMS.get(above.form, ""))

        return re.sub("%([1-9])", number, level.text)


class Numbering:
    """Counts a document's paragraphs, which are to be given in their order."""

    def __init__(self, numbering: Any, styles: Any) -> None:
        kinds = {kind.get(qn("w:abstractNumId")): kind for kind in _each(numbering, "abstractNum")}
        lists = {id: _List(dict(_levels(kind))) for id, kind in kinds.items()}
        self._lists: dict[str, _List] = {}
        self._restarts: dict[str, dict[int, int]] = {}  # of lists whose first item is to come
        for own in _each(numbering, "num"):
            if (kind := _value(own, "abstractNumId")) in lists:
                id = own.get(qn("w:numId"))
                self._lists[id] = lists[kind]
                self._restarts[id] = {
                    _integer(level.get(qn("w:ilvl"))): _integer(_value(level, "startOverride"))
                    for level in _each(own, "lvlOverride")
                    if _value(level, "startOverride")
                }
        self._styles = {style.get(qn("w:styleId")): style for style in _each(styles, "style")}
        self._of_styles: dict[str | None, dict[str, str]] = {}

    def mark(self, paragraph: Any) -> str:
        """Return the number before a paragraph and a space; empty if it has none."""
        id, level = self._place(paragraph)
        if id is None or id not in self._lists:
            return ""
        own = self._lists[id]
        if (start := self._restarts[id].pop(level, None)) is not None:
            own.counts[level] = start - 1
        mark = own.next(level)
        return f"{mark} " if mark else ""

    def _place(self, paragraph: Any) -> tuple[str | None, int]:
        """Return the list and the level of a paragraph, or else of its style."""
        style = paragraph.style
        if style not in self._of_styles:
            self._of_styles[style] = self._of_style(style)
        found = {**self._of_styles[style], **_number_properties(paragraph)}
        return found.get("numId"), _integer(found.get("ilvl"))

    def _of_style(self, style: str | None) -> dict[str, str]:
        """Return the list and level of a style, or else of the style that it is based on."""
        found: dict[str, str] = {}
        seen = set[str | None]()
        while style in self._styles and style not in seen:
            seen.add(style)
            element = self._styles[style]
            found = {**_number_properties(element), **found}
            style = _value(element, "basedOn")
        return found


def _number_properties(element: Any) -> dict[str, str]:
    """Return the list (``numId``) and level (``ilvl``) that a paragraph or style names itself."""
    properties = element.find(_PROPERTIES)
    if properties is None:
        return {}
    values = {name: _value(properties, name) for name in ("numId", "ilvl")}
    return {name: value for name, value in values.items() if value is not None}


def _levels(kind: Any) -> Iterator[tuple[int, _Level]]:
    for level in _each(kind, "lvl"):
        yield (
            _integer(level.get(qn("w:ilvl"))),
            _Level(
                _integer(_value(level, "start")),
                _value(level, "numFmt") or "decimal",
                _value(level, "lvlText") or "",
                level.find(qn("w:isLgl")) is not None,
            ),
        )


def _each(parent: Any, name: str) -> Any:
    return [child for child in parent if child.tag == qn(f"w:{name}")]


def _value(parent: Any, name: str) -> str | None:
    child = parent.find(qn(f"w:{name}"))
    return None if child is None else child.get(_VALUE)


def _integer(value: str | None) -> int:
    return int(value) if value is not None and re.fullmatch(r"\d{1,9}", value) else 0
