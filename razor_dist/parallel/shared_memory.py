"""Links between ranks of one host: a segment of memory that all of them map.

gloo sends through TCP and a thread of its own, which has to be woken on both sides: with eight
processes on two cores an all-reduce of 2 KB takes 20 ms of waiting for wake-ups. Here a rank copies
its bytes into the segment and raises a counter, and the others see both.

The segment has boards for collectives, channels for messages, and counters of both
(`razor_dist.parallel.segment`). Data longer than a place goes through it piece by piece. A place is
written again only when all readers have read it. There is no lock: each counter has one writer,
except that of all boards, whose writers write the same number. A writer raises the counter after
the bytes, a reader reads it before them. x86 keeps stores and loads in that order; on other
processors gloo is used (`connect`).

A rank that waits for one transfer moves all others that are under way (`SharedMemory._advance`). So
two ranks that each wait until the other has read do not block each other.

Short steps wait for two or three small collectives in every layer. If no other transfer is under
way these bypass the queues (`SharedMemory._meet`), as one compiled operation each: a rank writes
its part, and sleeps on a counter of all boards (a futex) until the last rank raises it. If a rank
has no compiler, all collectives go through the queues.

An idle rank waits for a plan, which comes through a pipe: it sleeps there without any CPU time. The
end of another process ends every wait at once, by its ``pidfd``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from razor_dist.kernels.compiled import operations
from razor_dist.parallel.comm import Communicator, Work
from razor_dist.parallel.segment import (
    BOARD_BYTES,
    CHANNEL_BYTES,
    PLACES,
    Process,
    SharedSegment,
    host,
    own_files,
)

# A rank that waits in the queues sleeps this long between polls, at first and after `_SHORT_SLEEPS`
# polls. A busy loop in Python would take the cores from ranks that compute (docs/LOG.md).
_SHORT_SLEEP_SECONDS = 50e-6
_SHORT_SLEEPS = 100
_LONG_SLEEP_MS = 1
# A rank that sleeps on a counter looks this often whether another rank has ended.
_FUTEX_SLEEP_SECONDS = 0.005
# The results of `meet` in `kernels/cpu/links.h`.
_NO_PLACE, _DONE, _WAITING = range(3)

# After another rank has ended, a rank waits this long for a last plan of rank 0.
_LAST_PLAN_MS = 2000
# A process that runs looks at least this often, on the busiest machine. A longer gap means that it
# was stopped, and counts as this much of the time-out.
_MOST_LOOK_SECONDS = 1.0


def connect(
    group: dist.ProcessGroup, timeout: timedelta, *, compiles: bool = True
) -> SharedMemory | None:
    """Join the ranks of a gloo group by shared memory; None on every rank if that is impossible.

    It is if ranks are on several hosts, in containers that do not see each other's processes, or on
    a machine other than Linux on x86. Collectives go through the queues unless it ``compiles``,
    which takes 20 s on a new machine.
    """
    size = dist.get_world_size(group)
    links: SharedMemory | None = None
    with contextlib.ExitStack() as files:
        first = dist.get_rank(group) == 0
        mine, reading = own_files(SharedSegment.nbytes(size) if first else 0, files)
        compiled = operations() if compiles else None
        peers = [(host(), mine, compiled is not None)] * size
        dist.all_gather_object(peers, peers[0], group=group)
        processes = [process for _, process, _ in peers if process is not None]
        compiled = compiled if all(there for *_, there in peers) else None
        if len(processes) == size and len({host for host, *_ in peers}) == 1:
            with contextlib.suppress(OSError):
                links = SharedMemory(group, timeout, processes, reading, compiled)
        joined = [False] * size
        dist.all_gather_object(joined, links is not None, group=group)
    if links is not None and not all(joined):
        links.close()
    return links if all(joined) else None


class _Patience:
    """A time-out for the other ranks, in seconds.

    Time during which this process was stopped itself does not count.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self._waited, self._last = timeout, 0.0, time.monotonic()

    def look(self) -> None:
        """Add the time since the last look; `RuntimeError` if the sum reaches the time-out."""
        now = time.monotonic()
        self._waited, self._last = self._waited + min(now - self._last, _MOST_LOOK_SECONDS), now
        if self._waited >= self._timeout:
            silent = f"no rank has answered for {self._timeout:g} s (collective_timeout)"
            raise RuntimeError(silent)


class _Transfer:
    """Bytes under way through the places of a channel or of the boards, piece by piece."""

    done = False

    def __init__(self, links: SharedMemory) -> None:
        self._links = links

    def wait(self) -> None:
        self._links.wait_for(lambda: self.done)


class _Message(_Transfer):
    """A message that this rank sends or receives; ``data`` is uint8 ``[n]``."""

    def __init__(self, links: SharedMemory, source: int, target: int, data: np.ndarray) -> None:
        super().__init__(links)
        self.channel, self._sends, self._left = (source, target), source == links.rank, data
        self._places = links.segment.channels[self.channel]
        at = (source, slice(target, target + 1))
        self._sent, self._received = links.segment.sent[at], links.segment.received[at]

    def advance(self) -> bool:
        """Move the pieces that can be moved now; return whether there were any."""
        count = self._sent if self._sends else self._received
        moved = False
        while len(self._left):
            unread = self._sent[0] - self._received[0]
            if unread == (PLACES if self._sends else 0):
                break
            piece, self._left = np.split(self._left, [CHANNEL_BYTES])
            place = self._places[count[0] % PLACES, : len(piece)]
            to, what = (place, piece) if self._sends else (piece, place)
            to[:] = what
            count[0] += 1
            moved = True
        self.done = not len(self._left)
        return moved


class _Gather(_Transfer):
    """Collects every rank's ``mine`` (uint8 ``[n]``) in ``out`` ``[P, n]``."""

    def __init__(self, links: SharedMemory, mine: np.ndarray, out: np.ndarray) -> None:
        super().__init__(links)
        self._unposted, self._missing = mine, out

    def advance(self) -> bool:
        segment, rank, moved = self._links.segment, self._links.rank, False
        posted, read = segment.posted, segment.read
        if len(self._unposted) and posted[rank] - read.min() < PLACES:
            piece, self._unposted = np.split(self._unposted, [BOARD_BYTES])
            segment.boards[rank, posted[rank] % PLACES, : len(piece)] = piece
            self._links.post(int(posted[rank]))
            moved = True
        if self._missing.shape[1] and read[rank] < posted.min():
            pieces, self._missing = np.split(self._missing, [BOARD_BYTES], axis=1)
            pieces[:] = segment.boards[:, read[rank] % PLACES, : pieces.shape[1]]
            read[rank] += 1
            moved = True
        self.done = not self._missing.shape[1]
        return moved


class _Sum(NamedTuple):
    """A `_Gather` whose parts are then added up."""

    gather: _Gather
    parts: Tensor
    tensor: Tensor

    def wait(self) -> None:
        self.gather.wait()
        _add_up(self.parts, self.tensor)


class SharedMemory(Communicator):
    """A `Communicator` for the CPU tensors of ranks that are processes of one host.

    Made by `connect`. ``processes`` are the ranks', in order; ``inbox`` is the reading end of this
    rank's pipe, which the caller closes; ``compiled`` are the `operations`, if all ranks have them.
    `OSError` if a file of another process cannot be opened.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta,
        processes: Sequence[Process],
        inbox: int,
        compiled: Any,
    ) -> None:
        super().__init__(group)
        self._timeout = timeout.total_seconds()
        self._ranks: dict[int, int] = {}  # by pidfd
        self._ends, self._inbox_or_end, self._inbox_only = (select.poll() for _ in range(3))
        with contextlib.ExitStack() as files:

            def opened(fd: int) -> int:
                files.callback(os.close, fd)
                return fd

            def file_of(rank: int, fd: int, flags: int) -> int:
                return opened(os.open(f"/proc/{processes[rank].pid}/fd/{fd}", flags))

            self._inbox = opened(os.dup(inbox))
            os.set_blocking(self._inbox, False)
            for poll in (self._inbox_or_end, self._inbox_only):
                poll.register(self._inbox, select.POLLIN)
            for rank in self.others:
                end = opened(os.pidfd_open(processes[rank].pid))
                self._ranks[end] = rank
                self._ends.register(end, select.POLLIN)
                self._inbox_or_end.register(end, select.POLLIN)
            flags, readers = os.O_WRONLY | os.O_NONBLOCK, self.others if self.rank == 0 else []
            self._outboxes = [file_of(rank, processes[rank].pipe, flags) for rank in readers]
            self.segment = SharedSegment(file_of(0, processes[0].segment, os.O_RDWR), self.size)
            self._files = files.pop_all()
        # Under way: collectives, by (), and each channel's messages, in their order.
        self._queues: defaultdict[tuple[int, ...], deque[_Gather | _Message]] = defaultdict(deque)
        self._compiled = compiled

    def close(self) -> None:
        """Close the files; the memory goes with the last process that maps it."""
        self._files.close()

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Move everything that is under way until ``done``.

        `RuntimeError` if another rank's process has ended, or nothing has moved for the time-out.
        """
        looks, patience = 0, _Patience(self._timeout)
        while not done():
            if self._advance():
                looks, patience = 0, _Patience(self._timeout)
                continue
            looks += 1
            if looks <= _SHORT_SLEEPS:
                time.sleep(_SHORT_SLEEP_SECONDS)
                continue
            ended = self._ends.poll(_LONG_SLEEP_MS)
            # A rank's last pieces are still read after it has ended.
            if ended and not self._advance():
                raise RuntimeError(f"rank {self._ranks[ended[0][0]]} has ended")
            patience.look()

    def _advance(self) -> bool:
        moved = False
        for queue in self._queues.values():
            while queue:
                moved |= queue[0].advance()
                if not queue[0].done:
                    break
                queue.popleft()
        return moved

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[Work]:
        works = [_Message(self, peer, self.rank, _bytes(buffer)) for peer, buffer in receives]
        works += [_Message(self, self.rank, peer, _bytes(tensor)) for peer, tensor in sends]
        for work in works:
            self._queues[work.channel].append(work)
        self._advance()
        return list(works)

    def _gather(self, tensor: Tensor, out: Tensor) -> _Gather:
        gather = _Gather(self, _bytes(tensor), _bytes(out).reshape(self.size, -1))
        self._queues[()].append(gather)
        self._advance()
        return gather

    def _meet(self, mine: Tensor, out: Tensor, *, add: bool) -> bool:
        """Add up every rank's ``mine`` in ``out``, or gather it there.

        Return False, having done nothing, if it has to go through the queues: other transfers are
        under way, there are no `operations`, ``mine`` is longer than a place, or no place is free.
        Numbers that are added up must be float32.
        """
        if self._compiled is None or not 0 < mine.nbytes <= BOARD_BYTES:
            return False
        if any(self._queues.values()):
            return False
        meet, of = self._compiled.meet, (mine, out, *self.segment.for_torch, self.rank, add)
        met = meet(*of, True, _FUTEX_SLEEP_SECONDS)
        if met != _WAITING:
            return bool(met == _DONE)
        patience = _Patience(self._timeout)
        while met == _WAITING:
            ended = self._ends.poll(0)
            met = meet(*of, False, _FUTEX_SLEEP_SECONDS)  # also of a rank that has just ended
            if met == _WAITING and ended:
                raise RuntimeError(f"rank {self._ranks[ended[0][0]]} has ended")
            patience.look()
        return bool(met == _DONE)

    def post(self, number: int) -> None:
        """Note that this rank's ``number``-th piece is on its board, and wake waiting ranks."""
        if self._compiled is None:
            self.segment.posted[self.rank] = number + 1
            return
        _, posted, _, complete = self.segment.for_torch
        self._compiled.post(posted, complete, self.rank, number)

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        if not self._meet(tensor, out, add=False):
            self._gather(tensor, out).wait()

    def _sum(self, tensor: Tensor) -> None:
        if tensor.dtype != torch.float32:
            parts = tensor.new_empty((self.size, *tensor.shape))
            self._all_gather(tensor, parts)
            _add_up(parts, tensor)
        elif not self._meet(tensor, tensor, add=True):
            self._all_reduce(tensor).wait()

    def _all_reduce(self, tensor: Tensor) -> Work:
        parts = tensor.new_empty((self.size, *tensor.shape))
        return _Sum(self._gather(tensor.contiguous(), parts), parts, tensor)

    def _broadcast(self, tensor: Tensor) -> None:
        data = _bytes(tensor).data
        if self.rank == 0:
            for outbox in self._outboxes:
                self._write(outbox, data)
        else:
            self._read(data)

    def _write(self, outbox: int, data: memoryview) -> None:
        writable = select.poll()
        writable.register(outbox, select.POLLOUT)
        while data:
            self._sleep_until(writable)
            try:
                data = data[os.write(outbox, data) :]
            except BrokenPipeError:
                raise RuntimeError("a rank has ended") from None

    def _read(self, data: memoryview) -> None:
        while data:
            ready = self._sleep_until(self._inbox_or_end)
            # Rank 0 sends the last plan rank by rank: a rank may end before another gets it.
            if self._inbox not in ready and not self._inbox_only.poll(_LAST_PLAN_MS):
                raise RuntimeError(f"rank {self._ranks[ready.pop()]} has ended")
            count = os.readv(self._inbox, [data])
            if not count:  # no process can write any more
                raise RuntimeError("rank 0 has ended")
            data = data[count:]

    def _sleep_until(self, poll: select.poll) -> set[int]:
        """Wait for files to be ready, without CPU time unless transfers are under way.

        Those are moved meanwhile: another rank may wait for one of them before it writes.
        """
        self.wait_for(lambda: bool(poll.poll(0)) or not any(self._queues.values()))
        patience = _Patience(self._timeout)
        while not (ready := poll.poll(1000 * _MOST_LOOK_SECONDS)):
            patience.look()
        return {fd for fd, _ in ready}


def _add_up(parts: Tensor, out: Tensor) -> None:
    """Add up every rank's part, so that all ranks get the same bits, over either transport."""
    if parts.dtype == torch.float32:  # in the order of ranks, as `_meet` does
        out.copy_(functools.reduce(torch.add, parts.unbind()))
    else:
        out.copy_(parts.sum(0))


def _bytes(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
