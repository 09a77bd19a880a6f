"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

Align: TypeAlias = Literal["left", "numbers"]  # numbers: all columns but the first to the right


def markdown(rows: Iterable[Sequence[str]], align: Align = "left") -> str:
    """Return a Markdown table whose head is the first of the rows."""
    head, *body = rows
    others = "---:" if align == "numbers" else "---"
    rule = ["---", *[others] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


def section(
    title: str, rows: Sequence[Sequence[str]], note: str = "", align: Align = "left"
) -> str:
    """Return a table beneath its title and above a note; an empty text if it has no body."""
    return join(title, markdown(rows, align), note) if len(rows) > 1 else ""


def join(*parts: str) -> str:
    """Return the parts of a page as paragraphs, without the empty ones."""
    return "\n\n".join(filter(None, parts))


def write_page(path: Path, *parts: str) -> str:
    page = join(*parts)
    path.write_text(page + "\n", encoding="utf-8")
    return page
