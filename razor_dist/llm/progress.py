"""Progress of reading prompts: a bar for the offline API, lines in the log of a job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from tqdm import tqdm

from razor_dist.protocol.messages import Progress

log = logging.getLogger(__name__)

# True shows a bar; a callable makes it, as tqdm or `ray.experimental.tqdm_ray` do.
UseTqdm = bool | Callable[..., Any]
OnProgress = Callable[[Progress], None]


class PromptBar:
    """Counts the prompt tokens that have been read, chunk by chunk, and the answers.

    A context manager. A callable ``use_tqdm`` is called with ``total``, ``desc`` and ``unit``; its
    result needs tqdm's ``update``, ``set_description`` and ``close``. ``prompt_tokens`` are the
    prompts' lengths without their prefix.
    """

    def __init__(self, use_tqdm: UseTqdm, prompt_tokens: Sequence[int]) -> None:
        self._prompts, self._answered = len(prompt_tokens), 0
        make = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        self._bar: Any = make(total=sum(prompt_tokens), desc=self._description, unit="tok")
        self._read: dict[str, int] = {}

    @property
    def _description(self) -> str:
        return f"{self._answered}/{self._prompts} prompts answered"

    def progress(self, message: Progress) -> None:
        read = message.processed - message.prefix
        before = self._read.get(message.id, 0)
        self._read[message.id] = read
        self._bar.update(read - before)

    def answered(self) -> None:
        self._answered += 1
        self._bar.set_description(self._description)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()


class ReadingLog:
    """Replaces the bar of `PromptBar`: a line in the log every ``every`` seconds at most.

    Lines begin with ``what`` and are written when a chunk ends, so a prompt that is read within
    ``every`` seconds gets none.
    """

    def __init__(
        self, what: str, *, every: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.what, self._every, self._clock = what, every, clock

    def __call__(self, *, total: int, desc: str, unit: str) -> Self:
        """Begin anew for ``total`` tokens, as a call of tqdm does."""
        self._total, self._read = total, 0
        self._began = self._told = self._clock()
        return self

    def update(self, tokens: int) -> None:
        self._read += tokens
        now = self._clock()
        if now - self._told >= self._every and self._read < self._total:
            self._told = now
            read = f"{self._read:,} of {self._total:,}"
            log.info("%s: read %s tokens in %.0f s", self.what, read, now - self._began)

    def set_description(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
