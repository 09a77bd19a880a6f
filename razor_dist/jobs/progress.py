"""How a job gets on: a line for each finished item, and a bar where somebody watches."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from razor_dist.jobs.pool import Outcome
from razor_dist.jobs.task import Item

log = logging.getLogger(__name__)


class Progress:
    """Tells of finished items; a context manager.

    The time left is that of the rest at the rate since the first item was begun, in units of
    `Item.size`.

    Parameters
    ----------
    items : sequence of Item
        Those to be computed now.
    before : int
        Items whose results an earlier run left.
    bar : bool, optional
        Draw a bar; by default where standard error is a terminal.
    clock : callable
        Seconds from any point.
    """

    def __init__(
        self,
        items: Sequence[Item],
        before: int = 0,
        *,
        bar: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = before + len(items)
        self._finished, self._failed = before, 0
        self._size_left = sum(item.size for item in items)
        self._size_done = 0
        self._clock = clock
        self._begin: float | None = None  # not before an engine was ready for an item
        shown = sys.stderr.isatty() if bar is None else bar
        self._redirect = logging_redirect_tqdm() if shown else None
        if self._redirect is not None:
            self._redirect.__enter__()  # log lines go above the bar
        self._bar = tqdm(
            total=self._size_left, disable=not shown, unit="tok", unit_scale=True, desc="job"
        )
        if before:
            log.info("%d of %d items are there already", before, self._total)

    def finished(self, outcome: Outcome) -> None:
        """Tell of one more."""
        size = outcome.item.size
        if self._begin is None:
            self._begin = self._clock() - outcome.seconds
        self._finished += 1
        self._failed += outcome.error is not None
        self._size_done += size
        self._size_left -= size
        self._bar.update(size)
        log.info("%s", self.line(outcome))

    def line(self, outcome: Outcome) -> str:
        """What the log says of an outcome that has been counted."""
        assert self._begin is not None
        rate = self._size_done / max(self._clock() - self._begin, 1e-9)
        failed = f" ({self._failed} failed)" if self._failed else ""
        what = f"done in {outcome.seconds:.1f} s"
        if outcome.error is not None:
            what = f"FAILED (attempts: {outcome.attempts}): {outcome.error!r:.200}"
        left = tqdm.format_interval(self._size_left / rate)
        return (
            f"{self._finished}/{self._total}{failed} | {outcome.item.id} {what} | "
            f"{rate:,.1f} tokens/s, {left} left"
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()
        if self._redirect is not None:
            self._redirect.__exit__(None, None, None)
