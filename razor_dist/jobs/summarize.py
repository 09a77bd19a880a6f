"""Summaries of many documents as a job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.schema import EngineConfig
from razor_dist.documents.collect import Source
from razor_dist.documents.style import Style
from razor_dist.jobs.results import Record
from razor_dist.jobs.summary import Summarizer
from razor_dist.jobs.task import Item
from razor_dist.llm.llm import LLM

# Of readers, splitting and prompts: raised when the same document and style would give others.
_VERSION = 1


@dataclass(frozen=True)
class SummaryTask:
    """One item for each document; see `razor_dist.jobs.task.Task`.

    A document that cannot be read is an item that failed, with a `DocumentError`.

    Attributes
    ----------
    config : EngineConfig
    style : Style
    sources : list of Source
    """

    config: EngineConfig
    style: Style
    sources: list[Source]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The style, and which code applies it."""
        return {"task": "summarize", "version": _VERSION, "style": asdict(self.style)}

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        """One kind of engine."""
        return {"default": self.config}

    def items(self) -> Sequence[Item]:
        """The documents; a changed file is another item."""
        return [
            Item(item_id(source), max(1, source.size // 4), data={"source": source})
            for source in self.sources
        ]

    def run(self, llm: LLM, item: Item) -> Mapping[str, Any]:
        """Read a document and summarise it: `Summarizer.summarize`, with ``id`` and ``source``."""
        source: Source = item.data["source"]
        summary = Summarizer(llm, self.style).summarize(source.text())
        return {"id": source.id, "source": source.path, **summary}


def item_id(source: Source) -> str:
    """The name of a document's record in the results: its id, and a hash of its content."""
    return f"{source.id}#{source.digest or 'unreadable'}"


def write_pages(records: Iterable[Record], folder: Path) -> list[Path]:
    """Write a Markdown page for each summary.

    Parameters
    ----------
    records : iterable of dict
        Of a `SummaryTask`; those that failed get no page.
    folder : Path
        Made if missing.

    Returns
    -------
    list of Path
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for record in records:
        if record["status"] != "done":
            continue
        id, _, digest = record["id"].rpartition("#")
        name = re.sub(r"[^\w.-]+", "-", id).strip("-.")[-80:]
        path = folder / f"{name}-{digest}.md"
        path.write_text(_page(record), encoding="utf-8")
        written.append(path)
    return written


def _page(record: Record) -> str:
    result = record["result"]
    parts = result.get("part_summaries", [])
    how = f"{len(parts)} parts, each summarised, then their summaries" if parts else "one prompt"
    facts = {
        "source": result["source"],
        "tokens": result["tokens"],
        "read as": how,
        "finish reason": result["finish_reason"],
        "seconds": record["run"]["seconds"],
        "settings": record["settings"],
    }
    blocks = [f"# {result['id']}", "\n".join(f"- {name}: {fact}" for name, fact in facts.items())]
    blocks.append(result["summary"])
    for number, part in enumerate(parts, start=1):
        title = f"## Part {number} of {len(parts)} ({part['tokens']} tokens)"
        blocks += [title, part["summary"]]
    return "\n\n".join(blocks) + "\n"
