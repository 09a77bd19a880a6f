"""Cuts a text into parts that fit, at the most significant boundaries that make them fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# From texts to their numbers of tokens.
Count = Callable[[Sequence[str]], list[int]]

# Before a chapter's title in a plain text, which stands alone between empty lines.
PLAIN_CHAPTER = (
    r"(?<=\n\n)(?=[ \t]*(?:BOOK|PART|Part|CHAPTER|Chapter) +[\dIVXLC]+\b[^\n]{0,80}\n\s*\n)"
)
# Where a text may be cut, the best places first. Each matches nothing, before what begins a unit.
_BOUNDARIES = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"(?=^# )",
        PLAIN_CHAPTER,
        r"(?=^## )",
        r"(?=^#{3,6} )",
        r"(?<=\n)(?=\n)",
        r"(?<=\n)",
        "(?<=[.!?])(?=\\s)|(?<=[\u3002\uff01\uff1f])",
        r"(?=\s)",
    )
]


def split(text: str, limit: int, count: Count) -> list[str]:
    """Cut a text into parts of at most ``limit`` tokens; joined they are the text.

    Units (chapters; where one is too long its sections, then its paragraphs, lines, sentences,
    words, characters) are put together, in order, as long as they fit. A part's tokens are the sum
    of its units', from which those of the whole may differ a little where units meet.
    """
    parts: list[str] = []
    size = limit
    for unit, tokens in _units(text, limit, count, 0):
        if size + tokens > limit:
            parts.append("")
            size = 0
        parts[-1] += unit
        size += tokens
    return parts


def _units(text: str, limit: int, count: Count, level: int) -> list[tuple[str, int]]:
    """Return units of at most ``limit`` tokens and their tokens, cut from ``level`` on."""
    if level == len(_BOUNDARIES):
        return _characters(text, limit, count)
    pieces = [piece for piece in _BOUNDARIES[level].split(text) if piece]
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
