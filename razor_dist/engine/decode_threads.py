"""Fewer threads for decode steps while other programs want the same cores.

A decode step is some hundred parallel regions of a few microseconds each, and a region ends with
its slowest thread. Where another program has the core of one thread, all wait at every region, and
one thread alone can be twice as fast as two; on a quiet machine it is slower. Which it is follows
from steps that are timed with either number. Chunks of prompts have long regions, and keep all
threads.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

log = logging.getLogger(__name__)

# Seconds between two looks at how long threads waited for a core, and the share of these seconds,
# of all threads together, from which on other programs count as busy.
_LOOK = 0.5
_BUSY = 0.1
# Looks in a row at which they are busy before the log says so: a frontend that tokenises a long
# prompt takes a core for less.
_LOOKS = 4
# Decode steps timed with each number of threads; the median counts, since three of them may be
# those that record and compare a step.
_TIMED_STEPS = 7
# Fewer threads must take less than this share of the time of all threads.
_FASTER = 0.9
# Seconds after which the numbers of threads are compared again.
_AGAIN = 15.0


def seconds_waited() -> float | None:
    """Return how long this process's threads have been ready to run without a core, in seconds.

    None where the kernel does not count that (`/proc/PID/task/TID/schedstat`, Linux).
    """
    waited = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            try:
                waited += int((task / "schedstat").read_text().split()[1])
            except ProcessLookupError:  # the thread has ended
                continue
    except (OSError, IndexError, ValueError):
        return None
    return waited / 1e9


class DecodeThreads:
    """Chooses the number of torch's threads for each step on a CPU.

    All threads compute, unless these have waited for a core for `_BUSY` of the last `_LOOK` seconds
    or more: then the next decode steps are timed with fewer, and the fastest number is kept for
    `_AGAIN` seconds.

    Parameters
    ----------
    every : int
        The number of all threads.
    clock, waited, use : callable
        The time, `seconds_waited`, and what sets the number of threads; replaced in tests.
    crowded : bool
        True if the ranks have more threads than there are cores: then they wait for each other,
        and nothing is said of other programs.
    """

    def __init__(
        self,
        every: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float | None] = seconds_waited,
        use: Callable[[int], None] = torch.set_num_threads,
        crowded: bool = False,
    ) -> None:
        self._every, self._clock, self._waited, self._use = every, clock, waited, use
        self._candidates = sorted({every, every - 1, every // 2, 1} - {0}, reverse=True)
        self._best = every  # for decode steps
        self._timed: dict[int, list[float]] | None = None  # of a comparison, seconds of its steps
        self._sequences = 0  # of the steps that are compared
        self._compare_at = -float("inf")
        self._looked_at, self._waited_then = clock(), waited()
        self._crowded, self._busy_looks, self._said = crowded, 0, False

    @contextmanager
    def step(self, decoded: int) -> Iterator[None]:
        """Run a step with the threads chosen for it.

        ``decoded`` is the number of sequences of a step that reads no prompt, and 0 for others.
        """
        count = self._choose(decoded) if decoded else self._every
        began = self._clock()
        if count != self._every:
            self._use(count)
        try:
            yield
        finally:
            if count != self._every:
                self._use(self._every)  # for all else that this process computes
        ended = self._clock()
        if decoded and self._timed is not None:
            self._timed[count].append(ended - began)
            if all(len(seconds) >= _TIMED_STEPS for seconds in self._timed.values()):
                self._decide(self._timed, ended)
        if ended - self._looked_at >= _LOOK:
            self._look(ended)

    def _choose(self, decoded: int) -> int:
        if self._timed is None:
            return self._best
        if decoded != self._sequences:  # their times cannot be compared
            self._begin()
            self._sequences = decoded
        # In turn, as the machine may become busier meanwhile.
        return min(self._timed, key=lambda count: len((self._timed or {})[count]))

    def _begin(self) -> None:
        self._timed, self._sequences = {count: [] for count in self._candidates}, 0

    def _decide(self, timed: dict[int, list[float]], now: float) -> None:
        seconds = {count: statistics.median(of) for count, of in timed.items()}
        best = min(seconds, key=lambda count: seconds[count])
        faster = seconds[best] < _FASTER * seconds[self._every]
        self._best = best if faster else self._every
        self._timed, self._compare_at = None, now + _AGAIN
        log.info(
            "decode steps take %s ms with %s threads: %d are used",
            ", ".join(f"{1e3 * of:.0f}" for of in seconds.values()),
            ", ".join(map(str, seconds)),
            self._best,
        )

    def _look(self, now: float) -> None:
        """Begin a comparison if threads waited for cores, or fewer threads are in use already."""
        waited, since, before = self._waited(), self._looked_at, self._waited_then
        self._looked_at, self._waited_then = now, waited
        if waited is None or before is None:
            return
        fewer = self._best < self._every
        busy = fewer or waited - before >= _BUSY * (now - since)
        self._busy_looks = self._busy_looks + 1 if busy else 0
        if self._busy_looks >= _LOOKS and not (self._crowded or self._said):
            self._said = True
            log.warning(
                "other programs use this machine's cores, so that requests take longer%s",
                f"; tokens are computed by {self._best} of {self._every} threads, which is faster"
                if fewer
                else "",
            )
        if busy and self._timed is None and now >= self._compare_at and self._every > 1:
            self._begin()
