"""Summaries of many documents as a job, each of any length, by one model.

A document is one prompt as long as the model's context holds it: that is the point of a long
context. A longer one is cut at chapters or paragraphs (`split`), each part summarised, and then
the parts' summaries; where these are too many for one prompt, once more. Every part is stored as
soon as it is done (`PartResult`), and known again by the tokens of its prompt. Of
a part in work the prompt's caches are in the engine's prefix store, and the answer's beginning is
stored every few seconds, so that a run that is killed loses seconds.
"""

from __future__ import annotations

import hashlib
import logging
import math
import queue
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.config.cores import usable_cores
from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.collect import DocumentSource
from razor_dist.documents.read import Document
from razor_dist.documents.structure import Outline, split
from razor_dist.frontend.detokenizer import token_texts
from razor_dist.frontend.prompts import JOB_TEMPLATE, PromptEncoder
from razor_dist.jobs.answering import Answering, Asked, News, draft_of
from razor_dist.jobs.style import Style
from razor_dist.jobs.summary_sources import Json, Material, as_told, merged, traced
from razor_dist.jobs.task import (
    ANSWER_TOKEN,
    Item,
    ItemSize,
    PartResult,
    TokensDone,
    Update,
    Updates,
)
from razor_dist.llm.generation import Encoded
from razor_dist.llm.llm import LLM
from razor_dist.models.loader import read_config
from razor_dist.models.registry import resolve_model
from razor_dist.models.shape import ModelShape
from razor_dist.models.tokenizer import count_tokens, load_tokenizer
from razor_dist.protocol.messages import Progress

log = logging.getLogger(__name__)

# Raised when readers, splitting or prompts change the results for the same document and style.
_VERSION = 9
# The kinds of texts, as the prompts call them.
_WHOLE, _PART = "a document", "part {} of {} of a long document"
_SUMMARIES = "the summaries of the consecutive parts of a long document"
# Factor of the next limit when a part turns out longer than the sum of its units.
_LESS = 15 / 16
# Documents that an engine works on at once, so that short ones need not wait for a long one, and
# parts of each. With more, more answers share steps, but more work is lost when a run is killed.
_DOCUMENTS_AT_ONCE = 4
_PARTS_AT_ONCE = 8
# Seconds that counting all documents' tokens may take before the first is summarised.
_COUNTING_SECONDS = 20.0
# Most documents whose tokens are counted at once: each takes its text, and 150 MB.
_COUNTING_THREADS = 8
# Most long texts are known to be too long by their first 2**20 characters, and 8 for each token
# that fits.
_BEGINNING_CHARACTERS, _TOKEN_CHARACTERS = 2**20, 8


class Summarizer:
    """Asks a model for summaries; one without a tokenizer raises `ConfigError`.

    An answer's beginning is stored after ``draft_seconds`` of generating, again and again.
    """

    def __init__(self, llm: LLM, style: Style, *, draft_seconds: float = 3.0) -> None:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{llm.config.model} has no tokenizer, so it reads no documents")
        self._llm, self._style, self._tokenizer = llm, style, tokenizer
        self._draft_seconds = draft_seconds
        self._encoder = PromptEncoder(tokenizer)
        self._room = llm.info.max_model_len - (style.sampling.max_tokens or 0)

    def summarize(self, document: Document, stored: Mapping[str, Any]) -> Updates:
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
        outline = Outline(document)
        levels, kind, now = 0, _WHOLE, Material(document.text, [(0, len(document.text))])
        while len((prompt := self._prompt(now, kind)).ids) > self._room:
            pieces, prompts = self._split(now, kind)
            if levels and len(pieces) >= len(summaries):
                raise DocumentError(
                    f"a context of {self._llm.info.max_model_len} tokens is too short for "
                    "summaries of summaries; ask for fewer words"
                )
            counts = self._count([piece.text for piece in pieces])
            answers = yield from self._ask_all(prompts, stored, counts)
            summaries = [traced(answer, document, outline, summaries) for answer in answers]
            counted = zip(counts, summaries, strict=True)
            parts = parts or [{"tokens": count, **summary} for count, summary in counted]
            now = merged([part["summary"] for part in summaries])
            levels, kind = levels + 1, _SUMMARIES
        [found] = yield from self._ask_all([prompt], stored)
        answer = traced(found, document, outline, summaries)
        result = {"tokens": tokens, **answer, "parts": len(parts) or 1, "levels": levels}
        return result | ({"part_summaries": parts} if parts else {})

    def _ask_all(
        self, prompts: Sequence[Asked], stored: Mapping[str, Any], counts: Sequence[int] = ()
    ) -> Generator[Update, None, list[Json]]:
        """Return the prompts' answers, several asked at once; with ``counts`` they are stored.

        ``stored`` answers are not asked again. After an error, prompts in work are still answered,
        others not, and the error is raised at the end.
        """
        keys = [hashlib.sha256(str(prompt.ids).encode()).hexdigest()[:16] for prompt in prompts]
        found = {key: stored[key] for key in keys if key in stored}
        asked = {
            key: Answering(key, prompt, draft_of(stored, key) if self._resumes else [])
            for key, prompt in zip(keys, prompts, strict=True)
            if key not in found
        }
        limit = self._style.sampling.max_tokens or 0
        work = {key: one.work(limit) for key, one in asked.items()}
        yield ItemSize(max(1, sum(work.values())), len(keys), len(keys) - len(asked))
        news: queue.SimpleQueue[tuple[Answering, News]] = queue.SimpleQueue()
        threads = ThreadPoolExecutor(min(self._llm.config.max_num_seqs, _PARTS_AT_ONCE))
        for one in asked.values():
            tell = partial(lambda one, what: news.put((one, what)), one)
            threads.submit(self._ask, one.prompt, one.draft, tell).add_done_callback(tell)
        sizes = dict(zip(keys, counts, strict=True)) if counts else {}
        failed: BaseException | None = None
        try:
            while work:
                one, what = news.get()
                if isinstance(what, Future):
                    del work[one.key]
                    if what.cancelled() or what.exception() is not None:
                        threads.shutdown(wait=False, cancel_futures=True)
                        failed = failed or what.exception()
                    else:
                        found[one.key] = what.result()
                        if sizes:
                            yield PartResult(one.key, found[one.key], sizes[one.key])
                    yield TokensDone(left=sum(work.values()))
                    continue
                done = one.read(what) if isinstance(what, Progress) else one.written(what)
                work[one.key] = one.work(limit)
                yield replace(done, left=sum(work.values()))
                if isinstance(what, list) and self._resumes:
                    yield one.to_store()
        finally:
            threads.shutdown(cancel_futures=True)
        if failed is not None:
            raise failed
        return [found[key] for key in keys]

    @property
    def _resumes(self) -> bool:
        """True if an answer can go on from its stored beginning.

        False for sampled answers: draws are counted from the first token. False with sources: they
        are traced while a token is generated. False with exact prefill: it would read the
        beginning with full attention, but decoding wrote it with streaming heads.
        """
        style, is_local = self._style, self._llm.config.prefill == "local"
        return style.temperature == 0 and not style.sources and is_local

    def _split(self, now: Material, kind: str) -> tuple[list[Material], list[Asked]]:
        """Cut a text into parts whose prompts fit the context; return parts and prompts."""
        begin = self._beginning(now)
        around = len(self._encode(begin, kind).ids) - self._count([begin.text])[0]
        own = len(self._encode(Material("", []), _PART.format(9999, 9999)).ids)
        limit = self._room - max(around, own)
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

    def _beginning(self, now: Material) -> Material:
        """Return a text, or its beginning if it is very long."""
        return now._replace(text=now.text[: _BEGINNING_CHARACTERS + _TOKEN_CHARACTERS * self._room])

    def _prompt(self, now: Material, kind: str) -> Asked:
        """Return a text's prompt, or its beginning's prompt if that already exceeds the context."""
        prompt = self._encode(begin := self._beginning(now), kind)
        is_enough = len(prompt.ids) > self._room or len(begin.text) == len(now.text)
        return prompt if is_enough else self._encode(now, kind)

    def _encode(self, material: Material, kind: str) -> Asked:
        material = material.stripped()
        prompt = self._style.prompt(material.text, kind)
        messages = [{"role": "user", "content": prompt}]
        is_chat = bool(getattr(self._tokenizer, "chat_template", None))
        encoder, text = self._encoder, f"{prompt}\n\nSummary:"
        if not self._style.sources:
            ids = encoder.chat(messages, **JOB_TEMPLATE) if is_chat else encoder.text(text)
            return Asked(material, ids)
        ids, where = (
            encoder.chat_with_ends(messages, **JOB_TEMPLATE)
            if is_chat
            else encoder.text_with_ends(text)
        )
        begin = self._style.document_begin(kind)
        parts = [part for at in where.parts for part in material.parts_at(at.begin + begin)]
        return Asked(material, ids, replace(where, parts=parts))

    def _count(self, texts: Sequence[str]) -> list[int]:
        return count_tokens(self._tokenizer, texts)

    def _ask(self, prompt: Asked, draft: list[int], tell: Callable[[News], None]) -> Json:
        """Continue the answer from ``draft``; ``tell`` gets prefill progress and new tokens."""
        params = self._style.sampling
        encoded = Encoded(None, [*prompt.ids, *draft], where=prompt.where)
        params = replace(params, max_tokens=(params.max_tokens or 0) - len(draft))
        due = time.monotonic()
        for output in self._llm.stream(encoded, params, on_progress=tell):
            [answer] = output.outputs
            if time.monotonic() >= due and not output.finished:
                tell(list(answer.token_ids))
                due = time.monotonic() + self._draft_seconds
        tell(tuple(answer.token_ids))
        text, reason, ids = answer.text, answer.finish_reason, [*draft, *answer.token_ids]
        detection = params.repetition_detection
        assert detection is not None
        if draft and (end := detection.first_loop(ids)) is not None:
            # The engine looks for loops in new tokens only, so a loop may begin in the draft.
            ids, reason = ids[:end], "repetition"
        if reason == "repetition":
            ids = ids[: detection.once(ids)]
        if draft or reason == "repetition":
            text = token_texts(self._tokenizer).decode(ids)  # as the stream, with a first space
        summary = {"summary": text.strip(), "finish_reason": reason}
        if answer.sentences is None:
            return summary
        lead, end = len(text) - len(text.lstrip()), len(text.rstrip())
        kept = [replace(s, end=min(s.end, end)) for s in answer.sentences if s.start < end]
        return summary | {"sentences": as_told(kept, prompt.material, lead)}


def loops(result: Mapping[str, Any]) -> bool:
    """Return whether the summary, or the summary of any part, ends in a loop."""
    answers = [result, *result.get("part_summaries", [])]
    return any(answer["finish_reason"] == "repetition" for answer in answers)


@dataclass(frozen=True)
class SummaryTask:
    """One item for each document; unreadable documents fail with a `DocumentError`."""

    engines: Mapping[str, EngineConfig]
    style: Style
    sources: list[DocumentSource]

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"task": "summarize", "version": _VERSION, "style": asdict(self.style)}

    @property
    def at_once(self) -> int:
        """Documents that an engine gets at a time."""
        return _DOCUMENTS_AT_ONCE

    def measured(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items with their sizes, and log how many tokens and parts there are.

        A size is the number of tokens to read, plus `ANSWER_TOKEN` for each token to write. Tokens
        are counted for `_COUNTING_SECONDS`; the other documents' are estimated by their bytes.
        Documents are read and tokenised again when they are summarised, perhaps on another host, so
        that no text is held until its turn: 5 s of one thread for 24 files of 417,000 tokens, a
        hundredth of the model's time for them.
        """
        [config] = self.engines.values()
        log.info("documents: %d; counting their tokens", len(items))
        trust = config.trust_remote_code
        folder = resolve_model(config.model, trust_remote_code=trust, weights=False)
        tokenizer = load_tokenizer(folder, trust_remote_code=trust)
        if tokenizer is None:
            raise ConfigError(f"{config.model} has no tokenizer, so it reads no documents")
        counts, exact = _counted(tokenizer, [item.data["source"] for item in items])
        limit = self.style.sampling.max_tokens or 0
        own = len(tokenizer(self.style.prompt("", _WHOLE))["input_ids"])
        model = read_config(folder, **config.model_options)
        context = config.max_model_len or ModelShape.from_config(model).max_positions
        room = max(1, context - limit - 2 * own)
        parts = [math.ceil(count / room) for count in counts]
        prompts = [n + (n > 1) for n in parts]  # and one for the summaries
        read, left_out = sum(map(bool, counts)), counts.count(0)
        about = "" if exact else "about "
        unread = f", {left_out} that cannot be read" if left_out else ""
        log.info(
            *("documents: %d, of %s%s tokens, about %d parts%s", read, about, f"{sum(counts):,}"),
            *(sum(parts), unread),
        )
        sizes = [n + ANSWER_TOKEN * limit * m for n, m in zip(counts, prompts, strict=True)]
        return [replace(item, size=max(1, n)) for item, n in zip(items, sizes, strict=True)]

    def items(self) -> Sequence[Item]:
        """Return the documents; a changed file, or one read in another encoding, is a new item."""
        items = []
        for source in self.sources:
            encoding = f"-{source.encoding}" if source.encoding else ""
            id = f"{source.id}#{source.digest or 'unreadable'}{encoding}"
            items.append(Item(id, max(1, source.size // 4), data={"source": source}))
        return items

    def run(self, llm: LLM, item: Item) -> Updates:
        """Read a document and summarise it: `Summarizer.summarize`, with ``id`` and ``source``."""
        source: DocumentSource = item.data["source"]
        summary = yield from Summarizer(llm, self.style).summarize(source.read(), item.parts)
        return {"id": source.id, "source": source.path, **summary}


def _counted(
    tokenizer: PreTrainedTokenizerBase, sources: Sequence[DocumentSource]
) -> tuple[list[int], bool]:
    """Return each document's token count, 0 if unreadable, and True if no count is an estimate.

    Each reason why documents cannot be read is logged with one document, before the model is
    loaded; every error is reported when its document is summarised.
    """
    end = time.monotonic() + _COUNTING_SECONDS
    reasons: dict[str, str] = {}

    def count(source: DocumentSource) -> int | None:
        if time.monotonic() > end:
            return None
        try:
            text = source.read().text
        except DocumentError as error:
            reasons.setdefault(str(error), source.path)
            return 0
        return max(1, *count_tokens(tokenizer, [text]))

    with ThreadPoolExecutor(min(usable_cores(), _COUNTING_THREADS)) as threads:
        found = list(threads.map(count, sources))
    for reason, path in reasons.items():
        log.warning("%s: %s", path, reason)
    pairs = [(n, source.size) for n, source in zip(found, sources, strict=True) if n]
    each = sum(n for n, _ in pairs) / sum(size for _, size in pairs) if pairs else 1 / 4
    guesses = [max(1, int(each * source.size)) for source in sources]
    counts = [guess if n is None else n for n, guess in zip(found, guesses, strict=True)]
    return counts, None not in found
