"""Prompts of summaries while they are answered, and their answers' stored beginnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from razor_dist.frontend.passages import PromptText
from razor_dist.jobs.summary_sources import Json, Material
from razor_dist.jobs.task import ANSWER_TOKEN, PartResult, TokensDone
from razor_dist.protocol.messages import Progress


class Asked(NamedTuple):
    """A prompt, the text that it asks to summarise and, for sources, each token's place in it."""

    material: Material
    ids: list[int]
    where: PromptText | None = None


# A thread's messages about a running prompt: prefill progress, all tokens generated so far (a
# tuple once the answer is complete), and the thread's end.
News = Progress | list[int] | tuple[int, ...] | Future[Json]


class Answering:
    """A running prompt: its prefill progress and its answer, which begins with ``draft``."""

    def __init__(self, key: str, prompt: Asked, draft: list[int]) -> None:
        self.key, self.prompt, self.draft = key, prompt, draft
        self._read, self._begun = 0, False
        self._new: Sequence[int] = ()
        self._stored = len(draft)

    def work(self, max_tokens: int) -> int:
        """Return the remaining work in prefilled tokens, for an answer of ``max_tokens``."""
        unread = max(0, len(self.prompt.ids) + len(self.draft) - self._read)
        return unread + ANSWER_TOKEN * max(0, max_tokens - len(self.draft) - len(self._new))

    def read(self, progress: Progress) -> TokensDone:
        before, self._read = self._read, progress.processed
        if self._begun:
            return TokensDone(progress.processed - before)
        self._begun = True  # the first message counts tokens found in caches
        return TokensDone(found=progress.processed, found_answer=len(self.draft))

    def written(self, tokens: Sequence[int]) -> TokensDone:
        before, self._new = len(self._new), tokens
        return TokensDone(generated=len(tokens) - before)

    def to_store(self) -> PartResult:
        """Return the answer's tokens that are not stored yet, as a part that `draft_of` finds."""
        answer = [*self.draft, *self._new]
        at, self._stored = self._stored, len(answer)
        return PartResult(_draft_key(self.key, at), {"tokens": answer[at:]}, 0, whole=False)


def _draft_key(key: str, at: int) -> str:
    return f"{key}+{at}"


def draft_of(stored: Mapping[str, Any], key: str) -> list[int]:
    """Return the tokens of an answer that an earlier attempt had stored."""
    tokens: list[int] = []
    while (more := stored.get(_draft_key(key, len(tokens)))) is not None and more["tokens"]:
        tokens += more["tokens"]
    return tokens
