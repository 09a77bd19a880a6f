"""Progress of a job: a line for each finished item or part, and a bar on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from razor_dist.jobs.pool import ItemUpdate, Outcome
from razor_dist.jobs.task import ANSWER_TOKEN, Item, ItemSize, PartResult, TokensDone

log = logging.getLogger(__name__)

# Seconds between two lines about prompts and answers that are not done.
_EVERY_SECONDS = 5.0
# Fewer cached tokens of a prompt are not logged: the parts of a document begin alike.
_LEAST_CACHED_TOKENS = 512


class JobProgress(ExitStack):
    """Logs finished items and parts of items, with a bar on a terminal; a context manager.

    Work is counted in prefilled tokens since the first item was begun: by `TokensDone`, or by
    `ItemSize` or `Item.size` when an item or a part ends. Failed items do not count. ``before`` is
    the number of items that earlier runs have finished.
    """

    def __init__(
        self, items: Sequence[Item], before: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._total = before + len(items)
        self._finished, self._failed = before, 0
        self._left = {item.id: item.size for item in items}
        self._all_left = sum(self._left.values())
        self._parts: dict[str, tuple[int, int | None]] = {}  # parts done, and in all once known
        self._live: set[str] = set()  # items with a `TokensDone` so far
        self._done = self._read = self._written = 0
        self._clock = clock
        self._begin: float | None = None  # not before an engine was ready for an item
        self._told = -_EVERY_SECONDS
        shown = sys.stderr.isatty()
        if shown:
            self.enter_context(logging_redirect_tqdm())  # log lines go above the bar
        bar_of_tokens = tqdm(disable=not shown, unit="tok", unit_scale=True, desc="job")
        self._bar = self.enter_context(bar_of_tokens)
        if before:
            log.info("%d of %d items are there already", before, self._total)

    def updated(self, news: ItemUpdate) -> None:
        item, update = news
        if self._begin is None:
            self._begin = self._clock()
        match update:
            case ItemSize():
                self._set_left(item.id, update.tokens)
                self._parts[item.id] = update.stored, update.parts
                if update.stored:
                    log.info("%s: %d of %d parts are there already", item.id, *self._parts[item.id])
            case TokensDone():
                self._count_tokens(item.id, update)
            case PartResult(whole=True):
                if item.id not in self._live:
                    self._count(item.id, update.tokens)
                done, parts = self._parts.get(item.id, (0, None))
                self._parts[item.id] = done + 1, parts
                of = "" if parts is None else f" of {parts}"
                log.info("%s: part %d%s done | %s", item.id, done + 1, of, self.rate())

    def finished(self, outcome: Outcome) -> None:
        id = outcome.item.id
        if self._begin is None:
            self._begin = self._clock() - outcome.seconds
        self._finished += 1
        self._failed += outcome.error is not None
        if outcome.error is None and id not in self._live:
            self._count(id, self._left[id])
        self._set_left(id, 0)
        log.info("%s", self.line(outcome))

    def line(self, outcome: Outcome) -> str:
        failed = f" ({self._failed} failed)" if self._failed else ""
        end = f"done in {outcome.seconds:.1f} s"
        if outcome.error is not None:
            end = f"FAILED (attempts: {outcome.attempts}): {outcome.error!r:.200}"
        return f"{self._finished}/{self._total}{failed} | {outcome.item.id} {end} | {self.rate()}"

    def rate(self) -> str:
        """Return tokens per second and the time left, in words."""
        if not self._done or self._begin is None:
            return "nothing read so far, time left unknown"
        seconds = max(self._clock() - self._begin, 1e-9)
        left = tqdm.format_interval(self._all_left / (self._done / seconds))
        return f"{self._read / seconds:,.1f} tokens/s, {left} left"

    def _count(self, id: str, tokens: int) -> None:
        self._read += tokens
        self._advance(id, tokens, max(0, self._left[id] - tokens))

    def _count_tokens(self, id: str, update: TokensDone) -> None:
        self._live.add(id)
        self._read += update.prefilled
        self._written += update.generated
        if update.found >= _LEAST_CACHED_TOKENS or update.found_answer:
            there = f"{update.found:,} tokens of a prompt and {update.found_answer:,} of its answer"
            log.info("%s: %s are there from an earlier run", id, there)
        self._advance(id, update.prefilled + ANSWER_TOKEN * update.generated, update.left)
        if self._clock() - self._told >= _EVERY_SECONDS:
            self._told = self._clock()
            share = self._done / max(1, self._done + self._all_left)
            counts = f"{self._read:,} tokens of prompts read, {self._written:,} of answers written"
            log.info("%s (%.0f %%) | %s", counts, 100 * share, self.rate())

    def _advance(self, id: str, work: int, left: int) -> None:
        self._done += work
        self._set_left(id, left)
        self._bar.total = self._done + self._all_left
        self._bar.update(work)

    def _set_left(self, id: str, left: int) -> None:
        self._all_left += left - self._left[id]
        self._left[id] = left
