"""Summaries of many documents as a job, each of any length, by one model.

A document is one prompt as long as the model's context holds it: that is the point of a long
context. A longer one is cut at chapters or paragraphs (`split`), each part summarised, and then
the parts' summaries; where these are too many for one prompt, once more. Every part is stored as
soon as it is done (`PartResult`), and known again by the tokens of its prompt.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.collect import Source
from razor_dist.documents.read import Document
from razor_dist.documents.structure import Places, split
from razor_dist.frontend.passages import PromptText
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.jobs.results import Record
from razor_dist.jobs.style import Style
from razor_dist.jobs.summary_sources import Json, Material, as_told, merged, placed, traced_back
from razor_dist.jobs.task import Item, ItemSize, PartResult, Update, Work
from razor_dist.llm.generation import Encoded
from razor_dist.llm.llm import LLM

# Of readers, splitting and prompts: raised when the same document and style would give others.
_VERSION = 5
# The kinds of texts, as the prompts call them.
_WHOLE, _PART = "a document", "part {} of {} of a long document"
_SUMMARIES = "the summaries of the consecutive parts of a long document"
# How much less is tried when a part turns out longer than the sum of its units.
_LESS = 15 / 16
_QUOTE = 240  # characters of a passage on a page


class Asked(NamedTuple):
    """A prompt, what it asks to summarise and, for sources, where the tokens are in that."""

    material: Material
    ids: list[int]
    where: PromptText | None = None


class Summarizer:
    """Asks a model for summaries; one without a tokenizer raises `ConfigError`."""

    def __init__(self, llm: LLM, style: Style) -> None:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{llm.config.model} has no tokenizer, so it reads no documents")
        self._llm, self._style, self._tokenizer = llm, style, tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self._room = llm.info.max_model_len - (style.sampling.max_tokens or 0)

    def summarize(self, document: Document, stored: Mapping[str, Any]) -> Work:
        """Summarise a text, part by part if it is long; ``stored`` parts are not asked for again.

        The result has ``tokens`` (the text's), ``summary``, ``finish_reason`` ("stop", "length", or
        "repetition" if the answer ends in a loop), ``parts`` (the prompts that the text itself was
        read in; 1: whole), ``levels`` (the times that summaries were summarised), and, of more than
        one part, ``part_summaries``: each part's ``tokens``, ``summary`` and ``finish_reason``.
        With sources, summary and parts' summaries have ``sentences``, too
        (`razor_dist.jobs.summary_sources`).
        Raises `DocumentError` if the context is too short for any summary.
        """
        [tokens] = self._count([document.text])
        parts: list[Json] = []
        summaries: list[Json] = []
        places = Places(document)
        levels, kind, now = 0, _WHOLE, Material(document.text, [(0, len(document.text))])
        while len((prompt := self._encode(now, kind)).ids) > self._room:
            pieces, prompts = self._split(now, len(prompt.ids))
            if levels and len(pieces) >= len(summaries):
                raise DocumentError(
                    f"a context of {self._llm.info.max_model_len} tokens is too short for "
                    "summaries of summaries; ask for fewer words"
                )
            counts = self._count([piece.text for piece in pieces])
            answers = yield from self._ask_parts(prompts, counts, stored)
            summaries = [self._traced(answer, document, places, summaries) for answer in answers]
            counted = zip(counts, summaries, strict=True)
            parts = parts or [{"tokens": count, **summary} for count, summary in counted]
            now = merged([part["summary"] for part in summaries])
            levels, kind = levels + 1, _SUMMARIES
        yield ItemSize(len(prompt.ids))
        answer = self._traced(self._ask(prompt), document, places, summaries)
        result = {"tokens": tokens, **answer, "parts": len(parts) or 1, "levels": levels}
        return result | ({"part_summaries": parts} if parts else {})

    def _ask_parts(
        self, prompts: Sequence[Asked], counts: Sequence[int], stored: Mapping[str, Any]
    ) -> Generator[Update, None, list[Json]]:
        """Ask for what is not stored, as many at once as the engine holds."""
        keys = [hashlib.sha256(str(prompt.ids).encode()).hexdigest()[:16] for prompt in prompts]
        found = {key: stored[key] for key in keys if key in stored}
        missing = {key: number for number, key in enumerate(keys) if key not in found}
        left = sum(counts[number] for number in missing.values())
        yield ItemSize(left, len(keys), len(keys) - len(missing))
        threads = ThreadPoolExecutor(self._llm.config.max_num_seqs)
        asked = {threads.submit(self._ask, prompts[n]): (key, n) for key, n in missing.items()}
        try:
            for answer in as_completed(asked):
                key, number = asked[answer]
                found[key] = answer.result()
                yield PartResult(key, found[key], counts[number])
        finally:
            threads.shutdown(cancel_futures=True)
        return [found[key] for key in keys]

    def _split(self, now: Material, tokens: int) -> tuple[list[Material], list[Asked]]:
        """Cut a text into parts whose prompts fit the context; return both."""
        [alone] = self._count([now.text])
        empty = Material("", [])
        own = len(self._encode(empty, _PART.format(9999, 9999)).ids)
        limit = self._room - max(tokens - alone, own)
        while limit >= 1:
            pieces = now.cut(split(now.text, limit, self._count))
            kinds = [_PART.format(number, len(pieces)) for number in range(1, len(pieces) + 1)]
            prompts = list(map(self._encode, pieces, kinds))
            if max(len(prompt.ids) for prompt in prompts) <= self._room:
                return pieces, prompts
            limit = int(limit * _LESS)
        raise DocumentError(
            f"a context of {self._llm.info.max_model_len} tokens leaves no room for a part of the "
            "document beside the prompt and the answer; ask for fewer words"
        )

    def _encode(self, material: Material, kind: str) -> Asked:
        material = material.stripped()
        prompt = self._style.prompt(material.text, kind)
        messages = [{"role": "user", "content": prompt}]
        is_chat = bool(getattr(self._tokenizer, "chat_template", None))
        text = f"{prompt}\n\nSummary:"
        if not self._style.sources:
            ids = self._encoder.chat(messages) if is_chat else self._encoder.text(text)
            return Asked(material, ids)
        encoder = self._encoder
        ids, where = encoder.chat_with_ends(messages) if is_chat else encoder.text_with_ends(text)
        begin = self._style.document_begin(kind)
        parts = [part for at in where.parts for part in material.parts_at(at.begin + begin)]
        return Asked(material, ids, replace(where, parts=parts))

    def _count(self, texts: Sequence[str]) -> list[int]:
        encoded = self._tokenizer(list(texts), add_special_tokens=False)
        return [len(ids) for ids in encoded.input_ids]

    def _ask(self, prompt: Asked) -> Json:
        encoded = Encoded(None, prompt.ids, where=prompt.where)
        [output] = self._llm.generate([encoded], self._style.sampling)
        [answer] = output.outputs
        text = answer.text
        told = {"summary": text.strip(), "finish_reason": answer.finish_reason}
        if answer.sentences is None:
            return told
        lead = len(text) - len(text.lstrip())
        return told | {"sentences": as_told(answer.sentences, prompt.material, lead)}

    @staticmethod
    def _traced(
        answer: Json, document: Document, places: Places, summaries: Sequence[Json]
    ) -> Json:
        """Finish an answer's sources; it was made of ``summaries`` or, without any, the text."""
        if "sentences" not in answer:
            return answer
        told = answer["sentences"]
        found = traced_back(told, summaries) if summaries else placed(told, document, places)
        return {**answer, "sentences": found}


def loops(result: Mapping[str, Any]) -> bool:
    """Return whether a summary or that of a part ends in a loop."""
    answers = [result, *result.get("part_summaries", [])]
    return any(answer["finish_reason"] == "repetition" for answer in answers)


@dataclass(frozen=True)
class SummaryTask:
    """One item for each document; one that cannot be read fails with a `DocumentError`."""

    engines: Mapping[str, EngineConfig]
    style: Style
    sources: list[Source]

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"task": "summarize", "version": _VERSION, "style": asdict(self.style)}

    def items(self) -> Sequence[Item]:
        """Return the documents; a file that is changed, or read otherwise, is another item."""
        items = []
        for source in self.sources:
            encoding = f"-{source.encoding}" if source.encoding else ""
            id = f"{source.id}#{source.digest or 'unreadable'}{encoding}"
            items.append(Item(id, max(1, source.size // 4), data={"source": source}))
        return items

    def run(self, llm: LLM, item: Item) -> Work:
        """Read a document and summarise it: `Summarizer.summarize`, with ``id`` and ``source``."""
        source: Source = item.data["source"]
        summary = yield from Summarizer(llm, self.style).summarize(source.read(), item.parts)
        return {"id": source.id, "source": source.path, **summary}


def write_pages(records: Iterable[Record], folder: Path) -> list[Path]:
    """Write a Markdown page for each summary among the records of a `SummaryTask`."""
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

    A sentence of a summary of summaries has those of the parts that it was made of before them.
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
    return f'"{shorten(text, _QUOTE, placeholder=" ...")}"'
