"""Markdown pages of summaries, with the places that their sentences came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten

from razor_dist.files import digest_of, make_folder, replacing
from razor_dist.jobs.results import Record
from razor_dist.jobs.summary_sources import Json

_QUOTE_CHARACTERS = 240  # characters of a passage on a page


def write_pages(records: Iterable[Record], folder: Path) -> set[Path]:
    """Write a Markdown page for each summary among the records of a `SummaryTask`."""
    make_folder(folder)
    written: set[Path] = set()
    for record in records:
        if record["status"] != "done":
            continue
        id, _, digest = record["id"].rpartition("#")
        name = re.sub(r"[^\w.-]+", "-", id).strip("-.")[-80:]
        # File systems take 255 bytes, and letters may have four.
        name = name.encode()[-200:].decode(errors="ignore")
        path = folder / f"{name}-{digest}.md"
        if path in written:  # the same text under another id, which the name cannot show
            path = path.with_stem(f"{path.stem}-{digest_of(id.encode(errors='backslashreplace'))}")
        with replacing(path) as draft:
            # The name of a document need not be UTF-8.
            draft.write_text(_page(record), encoding="utf-8", errors="replace")
        written.add(path)
    return written


def _page(record: Record) -> str:
    result = record["result"]
    parts = result.get("part_summaries", [])
    how = f"{len(parts)} parts, each summarised, then their summaries" if parts else "one prompt"
    facts = f"""# {result["id"]}

- source: {result["source"]}
- tokens: {result["tokens"]}
- read as: {how}
- finish reason: {result["finish_reason"]}
- seconds: {record["run"]["seconds"]}
- settings: {record["settings"]}"""
    blocks = [facts, result["summary"], *_sources_of(result, parts, "## Sources")]
    for number, part in enumerate(parts, start=1):
        title = f"## Part {number} of {len(parts)} ({part['tokens']} tokens)"
        blocks += [title, part["summary"], *_sources_of(part, parts, "### Sources")]
    return "\n\n".join(blocks) + "\n"


def _sources_of(answer: Json, parts: Sequence[Json], heading: str) -> list[str]:
    """Return a heading and the list of a summary's sentences with their places, if there are any.

    In a summary of summaries, the sentences of the parts' summaries come before the places.
    """
    if "sentences" not in answer:
        return []
    lines = []
    for number, sentence in enumerate(answer["sentences"], start=1):
        lines.append(f"{number}. {_quoted(answer['summary'][sentence['start'] : sentence['end']])}")
        for at in sentence.get("parts", []):
            part = parts[at["part"] - 1]
            own = part["sentences"][at["sentence"]]
            words = _quoted(part["summary"][own["start"] : own["end"]])
            where = f"part {at['part']}, sentence {at['sentence'] + 1}"
            lines.append(f"    - {where} ({at['weight']:.2f}): {words}")
        for source in sentence["sources"]:
            page = f"page {source['page']}" if "page" in source else ""
            where = page or " > ".join(source.get("headings", [])) or "the text"
            lines.append(f"    - {where} ({source['weight']:.2f}): {_quoted(source['text'])}")
        if not sentence["sources"]:
            lines.append("    - no place found")
    return [heading, "\n".join(lines)]


def _quoted(text: str) -> str:
    """Return a text on one line, cut off if it is long."""
    return f'"{shorten(text, _QUOTE_CHARACTERS, placeholder=" ...")}"'
