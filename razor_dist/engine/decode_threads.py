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

# Seconds between two looks at how long threads waited for a core.
_LOOK_SECONDS = 0.5
# Share of these seconds that one thread waited, from which on other programs count as busy.
_BUSY = 0.1
# Looks in a row at which they are busy before the log says so: a frontend that tokenises a long
# prompt takes a core for less.
_LOOKS = 4
# Largest slowdown that is reported. It bounds how long a request may wait for the end of a chunk
# that was started while nothing else was there.
_MAX_SLOWDOWN = 8.0
# Decode steps timed with each of two numbers of threads; the median counts, since three of them may
# be those that record and compare a step.
_TIMED_STEPS = 7
# Fewer threads must take less than this share of the time of the fastest number so far.
_FASTER = 0.9
# If two steps with fewer threads take more than this share, no smaller number is tried.
_HOPELESS = 1.3
# Steps after which a comparison ends that batches of other sizes begin anew again and again.
_MOST_STEPS = 100
# Seconds after which the numbers are compared again; doubled each time that all threads were the
# fastest, up to the second number.
_AGAIN_SECONDS, _LONGEST_SECONDS = 15.0, 240.0


def seconds_waited() -> dict[str, float] | None:
    """Return for each thread of this process how long it has been ready to run without a core.

    None where the kernel does not count that (`/proc/PID/task/TID/schedstat`, Linux).
    """
    waited: dict[str, float] = {}
    try:
        for task in Path("/proc/self/task").iterdir():
            try:
                waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
            except (ProcessLookupError, FileNotFoundError):  # the thread has ended
                continue
    except (OSError, IndexError, ValueError):
        return None
    return waited or None


class DecodeThreads:
    """Chooses the number of torch's threads for each step on a CPU.

    All threads compute, unless one of them has waited for a core for `_BUSY` of the last
    `_LOOK_SECONDS` or more. Then decode steps are timed with all threads and with fewer in turn,
    until fewer are much slower, and the fastest number is kept for `_AGAIN_SECONDS`.

    Parameters
    ----------
    every : int
        The number of all threads.
    chooses : bool
        False where fewer threads are never tried: ranks wait for each other in every step, so that
        the time of a rank's own threads cannot be seen.
    crowded : bool
        True if the ranks of this host have more threads than there are cores: then they wait for
        each other, and nothing is said of other programs.
    clock, waited, use : callable
        The time, `seconds_waited`, and what sets the number of threads; replaced in tests.
    """

    def __init__(
        self,
        every: int,
        *,
        chooses: bool = True,
        crowded: bool = False,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], dict[str, float] | None] = seconds_waited,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._every, self._clock, self._waited, self._use = every, clock, waited, use
        fewer = {every - 1, every * 3 // 4, every // 2, 1} - {0, every} if chooses else set()
        self._fewer = sorted(fewer, reverse=True)
        self._used = self._best = every  # now, and for decode steps
        self._comparison: _Comparison | None = None
        self._compare_at, self._again = clock(), _AGAIN_SECONDS
        self._looked_at, self._waited_then = clock(), waited()
        self._crowded, self._busy_looks, self._said = crowded, 0, False
        #: Estimated time of a step over its time on a quiet machine, 1 to `_MAX_SLOWDOWN`: the
        #: time between the last two looks, over the part in which no thread waited for a core.
        self.slowdown = 1.0

    @contextmanager
    def step(self, decoded: int) -> Iterator[None]:
        """Run a step with the threads chosen for it.

        ``decoded`` is the number of sequences of a step that reads no prompt, and 0 for others.
        """
        comparison = self._comparison if decoded else None
        count = self._best if decoded else self._every
        self._set(count if comparison is None else comparison.next(decoded))
        began = self._clock()
        yield
        ended = self._clock()
        if comparison is not None:
            comparison.note(self._used, ended - began)
            if comparison.over:
                self._decide(comparison.best, ended)
        if ended - self._looked_at >= _LOOK_SECONDS:
            self._look(ended)

    def use_all(self) -> None:
        """Return to all threads, for what else this process computes."""
        self._set(self._every)

    def _set(self, count: int) -> None:
        # Only where it changes: OpenMP ends threads that are no longer wanted, and starts new ones.
        if count != self._used:
            self._use(count)
            self._used = count

    def _decide(self, best: int, now: float) -> None:
        self._best, self._comparison = best, None
        self._again = (
            _AGAIN_SECONDS if best < self._every else min(2 * self._again, _LONGEST_SECONDS)
        )
        self._compare_at = now + self._again
        log.debug("decode steps are computed by %d of %d threads", best, self._every)

    def _look(self, now: float) -> None:
        """Begin a comparison if threads waited for cores, or fewer threads are in use already."""
        waited, since, before = self._waited(), self._looked_at, self._waited_then
        self._looked_at, self._waited_then = now, waited
        if waited is None or before is None:
            return
        longest = max(seconds - before.get(thread, 0.0) for thread, seconds in waited.items())
        if not self._crowded:
            running = max(now - since - longest, (now - since) / _MAX_SLOWDOWN)
            self.slowdown = max(1.0, (now - since) / running)
        fewer = self._best < self._every
        busy = fewer or longest >= _BUSY * (now - since)
        self._busy_looks = self._busy_looks + 1 if busy else 0
        if self._busy_looks >= _LOOKS and not (self._crowded or self._said):
            self._said = True
            log.warning(
                "threads wait for cores, which other programs or a CPU quota take: requests take "
                "longer%s",
                f"; tokens are computed by {self._best} of {self._every} threads, which is faster"
                if fewer
                else "",
            )
        if busy and self._fewer and self._comparison is None and now >= self._compare_at:
            self._comparison = _Comparison(self._every, self._fewer)


class _Comparison:
    """Times decode steps with the fastest number of threads so far, ``best``, and a smaller one.

    They take turns, since the machine may become busier meanwhile; then comes the next smaller
    number. ``over`` is True once there is nothing more to compare.
    """

    def __init__(self, every: int, fewer: list[int]) -> None:
        self.best, self.over, self._fewer = every, False, list(fewer)
        self._decoded, self._steps = 0, 0
        self._timed: dict[int, list[float]] = {}  # seconds of the steps with both numbers

    def next(self, decoded: int) -> int:
        """Return the number of threads for a step of ``decoded`` sequences."""
        if decoded != self._decoded or not self._timed:  # times of other batches do not compare
            self._decoded, self._timed = decoded, {self.best: [], self._fewer[0]: []}
        times = self._timed
        return min(times, key=lambda count: (len(times[count]), -count))

    def note(self, count: int, seconds: float) -> None:
        """Note the time of a step with a number of threads that `next` returned."""
        self._timed[count].append(seconds)
        self._steps += 1
        larger, smaller = self._timed[self.best], self._timed[self._fewer[0]]
        hopeless = len(smaller) > 1 and min(smaller) > _HOPELESS * statistics.median(larger)
        self.over = hopeless or self._steps >= _MOST_STEPS
        if len(smaller) >= _TIMED_STEPS and not hopeless:
            fewer = self._fewer.pop(0)
            if statistics.median(smaller) < _FASTER * statistics.median(larger):
                self.best = fewer
            self._timed, self.over = {}, self.over or not self._fewer
