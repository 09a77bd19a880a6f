"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal


def markdown(rows: Iterable[Sequence[str]], align: Literal["left", "numbers"] = "left") -> str:
    """Return a Markdown table whose head is the first of the rows.

    With ``numbers``, every column but the first is aligned to the right.
    """
    head, *body = rows
    others = "---:" if align == "numbers" else "---"
    rule = ["---", *[others] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])
