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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.collect import Source
from razor_dist.documents.split import split
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.jobs.results import Record
from razor_dist.jobs.style import Style
from razor_dist.jobs.task import Item, ItemSize, PartResult, Update, Work
from razor_dist.llm.llm import LLM

# Of readers, splitting and prompts: raised when the same document and style would give others.
_VERSION = 2
# The kinds of texts, as the prompts call them.
_WHOLE, _PART = "a document", "part {} of {} of a long document"
_SUMMARIES = "the summaries of the consecutive parts of a long document"
# How much less is tried when a part turns out longer than the sum of its units.
_LESS = 15 / 16
# An answer ends in a loop if a phrase stands this often at its end, in so many tokens at least.
_REPEATS, _LOOP = 4, 24

Json = dict[str, Any]


class Summarizer:
    """Asks a model for summaries; one without a tokenizer raises `ConfigError`."""

    def __init__(self, llm: LLM, style: Style) -> None:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{llm.config.model} has no tokenizer, so it reads no documents")
        self._llm, self._style, self._tokenizer = llm, style, tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self._room = llm.info.max_model_len - (style.sampling.max_tokens or 0)

    def summarize(self, text: str, stored: Mapping[str, Any]) -> Work:
        """Summarise a text, part by part if it is long; ``stored`` parts are not asked for again.

        The result has ``tokens`` (the text's), ``summary``, ``finish_reason`` ("stop", "length", or
        "repetition" if the answer ends in a loop), ``parts`` (the prompts that the text itself was
        read in; 1: whole), ``levels`` (the times that summaries were summarised), and, of more than
        one part, ``part_summaries``: each part's ``tokens``, ``summary`` and ``finish_reason``.
        Raises `DocumentError` if the context is too short for any summary.
        """
        [tokens] = self._count([text])
        parts: list[Json] = []
        summaries: list[Json] = []
        levels, kind, now = 0, _WHOLE, text
        while len(prompt := self._encode(now, kind)) > self._room:
            texts, prompts = self._split(now, len(prompt))
            if levels and len(texts) >= len(summaries):
                raise DocumentError(
                    f"a context of {self._llm.info.max_model_len} tokens is too short for "
                    "summaries of summaries; ask for fewer words"
                )
            counts = self._count(texts)
            summaries = yield from self._ask_parts(prompts, counts, stored)
            counted = zip(counts, summaries, strict=True)
            parts = parts or [{"tokens": count, **summary} for count, summary in counted]
            # One text, which can be cut between the summaries.
            numbered = enumerate(summaries, start=1)
            now = "\n\n".join(f"# Part {n}\n\n{part['summary']}" for n, part in numbered)
            levels, kind = levels + 1, _SUMMARIES
        yield ItemSize(len(prompt))
        result = {"tokens": tokens, **self._ask(prompt), "parts": len(parts) or 1, "levels": levels}
        return result | ({"part_summaries": parts} if parts else {})

    def _ask_parts(
        self, prompts: Sequence[list[int]], counts: Sequence[int], stored: Mapping[str, Any]
    ) -> Generator[Update, None, list[Json]]:
        """Ask for what is not stored, as many at once as the engine holds."""
        keys = [hashlib.sha256(str(prompt).encode()).hexdigest()[:16] for prompt in prompts]
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

    def _split(self, text: str, tokens: int) -> tuple[list[str], list[list[int]]]:
        """Cut a text into parts whose prompts fit the context; return both."""
        [alone] = self._count([text])
        limit = self._room - max(tokens - alone, len(self._encode("", _PART.format(9999, 9999))))
        while limit >= 1:
            parts = split(text, limit, self._count)
            kinds = [_PART.format(number, len(parts)) for number in range(1, len(parts) + 1)]
            prompts = list(map(self._encode, parts, kinds))
            if max(map(len, prompts)) <= self._room:
                return parts, prompts
            limit = int(limit * _LESS)
        raise DocumentError(
            f"a context of {self._llm.info.max_model_len} tokens leaves no room for a part of the "
            "document beside the prompt and the answer; ask for fewer words"
        )

    def _encode(self, text: str, kind: str) -> list[int]:
        prompt = self._style.prompt(text.strip(), kind)
        if getattr(self._tokenizer, "chat_template", None):
            return self._encoder.chat([{"role": "user", "content": prompt}])
        return self._encoder.text(f"{prompt}\n\nSummary:")

    def _count(self, texts: Sequence[str]) -> list[int]:
        encoded = self._tokenizer(list(texts), add_special_tokens=False)
        return [len(ids) for ids in encoded.input_ids]

    def _ask(self, prompt: list[int]) -> Json:
        [output] = self._llm.generate([{"prompt_token_ids": prompt}], self._style.sampling)
        [answer] = output.outputs
        ids = answer.token_ids
        loops = ends_in_loop(ids) or ends_in_loop(ids[:-1])  # the last may end the sequence
        reason = "repetition" if loops else answer.finish_reason
        return {"summary": answer.text.strip(), "finish_reason": reason}


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Return whether the tokens end with a phrase that is repeated again and again."""
    for phrase in range(1, len(ids) // _REPEATS + 1):
        end = ids[-max(_REPEATS * phrase, _LOOP) :]
        if len(end) >= _LOOP and end[phrase:] == end[:-phrase]:
            return True
    return False


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
        summary = yield from Summarizer(llm, self.style).summarize(source.text(), item.parts)
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
    blocks = [facts, result["summary"]]
    for number, part in enumerate(parts, start=1):
        title = f"## Part {number} of {len(parts)} ({part['tokens']} tokens)"
        blocks += [title, part["summary"]]
    return "\n\n".join(blocks) + "\n"
