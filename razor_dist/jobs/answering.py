"""Prompts of summaries while they are answered, and what is stored of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from razor_dist.frontend.passages import PromptText
from razor_dist.jobs.summary_sources import Json, Material
from razor_dist.jobs.task import ANSWER_TOKEN, PartResult, TokensDone
from razor_dist.protocol.messages import Progress


class Asked(NamedTuple):
    """A prompt, what it asks to summarise and, for sources, where the tokens are in that."""

    material: Material
    ids: list[int]
    where: PromptText | None = None


# What a thread tells of a prompt in work: a chunk was read, these tokens were generated, the end.
# The tokens are a tuple when the answer is whole.
News = Progress | list[int] | tuple[int, ...] | Future[Json]


class Answering:
    """A prompt in work: what of it was read, and the answer so far, which begins with ``draft``."""

    def __init__(self, key: str, prompt: Asked, draft: list[int]) -> None:
        self.key, self.prompt, self.draft = key, prompt, draft
        self._read, self._begun = 0, False
        self._new: Sequence[int] = ()
        self._stored = len(draft)

    def work(self, max_tokens: int) -> int:
        """Return the work that is left, in prefilled tokens, if the answer gets its full length."""
        unread = max(0, len(self.prompt.ids) + len(self.draft) - self._read)
        return unread + ANSWER_TOKEN * max(0, max_tokens - len(self.draft) - len(self._new))

    def read(self, progress: Progress) -> TokensDone:
        before, self._read = self._read, progress.processed
        if self._begun:
            return TokensDone(progress.processed - before)
        self._begun = True  # the first message tells what was in the caches
        return TokensDone(found=progress.processed, found_answer=len(self.draft))

    def written(self, tokens: Sequence[int]) -> TokensDone:
        before, self._new = len(self._new), tokens
        return TokensDone(generated=len(tokens) - before)

    def to_store(self) -> PartResult:
        """Return what of the answer is not stored yet; `draft_of` finds it."""
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
