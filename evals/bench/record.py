"""A bench's record: figures as JSON, and tables for a page or a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from razor_dist.evals.bench.settings import BenchSettings
from razor_dist.evals.markdown import Align, markdown
from razor_dist.evals.run_notes import machine

# Cells are not padded beyond so many characters.
_WIDEST = 48


@dataclass(frozen=True)
class Table:
    """A table in Markdown, its columns padded so that a terminal shows them straight."""

    title: str
    rows: Sequence[Sequence[str]]
    align: Align = "numbers"

    def __str__(self) -> str:
        columns: list[list[str]] = []
        for column in zip(*self.rows, strict=True):
            width = min(max(map(len, column)), _WIDEST)
            right = columns and self.align == "numbers"
            columns.append([f"{cell:>{width}}" if right else f"{cell:{width}}" for cell in column])
        return f"{self.title}\n\n{markdown(zip(*columns, strict=True), self.align)}".lstrip()


@dataclass(frozen=True)
class BenchRecord:
    """The result of a bench: ``figures`` for JSON; tables, and notes below them, for a page."""

    bench: str  # subcommand of ``razor-dist bench``
    settings: BenchSettings
    figures: dict[str, Any]
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    others: dict[Path, bytes] = field(default_factory=dict)  # files beside JSON and Markdown

    def as_json(self) -> dict[str, Any]:
        command, values = self.settings.command(self.bench), self.settings.values()
        return {"command": command, "machine": machine(), "settings": values, **self.figures}

    def page(self) -> str:
        command = f"`{self.settings.command(self.bench)}`"
        return "\n\n".join([command, *map(str, self.tables), *self.notes]) + "\n"

    def write(self) -> None:
        figures, page, *_ = self.settings.files
        if figures is not None:
            figures.write_text(json.dumps(self.as_json(), indent=2, default=str) + "\n")
        if page is not None:
            page.write_text(self.page())
        for file, content in self.others.items():
            file.write_bytes(content)
