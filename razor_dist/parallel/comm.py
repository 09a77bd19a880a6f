"""One communicator: every byte between ranks goes through it and is counted by purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

Purpose = Literal[
    "ring",
    "halo",
    "sinks",
    "compensation",
    "merge",
    "sources",
    "tensor",
    "weights",
    "control",
]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

# Older torch has it under its other name only.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work(Protocol):
    """A transfer under way, such as `torch.distributed.Work`."""

    def wait(self) -> object:
        """Block until it is done."""


@dataclass
class Pending:
    """Receives in flight. `wait` must be called exactly once.

    The sent tensors are held so that their memory outlives the transfer.
    """

    received: list[Tensor]
    works: list[Work] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    done: bool = False

    def wait(self) -> list[Tensor]:
        """Block until everything is sent and received; return what was received."""
        if self.done:
            raise RuntimeError("this transfer was already waited for")
        for work in self.works:
            work.wait()
        self.done = True
        # A work keeps the tensors that it moved alive.
        self.works.clear()
        self.sent.clear()
        return self.received


# Runs a collective; the tensors get its results.
Run = Callable[[Callable[[], None], Sequence[Tensor]], None]


def _at_once(collective: Callable[[], None], results: Sequence[Tensor]) -> None:
    collective()


class Communicator:
    """Collectives over one process group, with byte counters.

    ``group`` None makes a communicator of one rank that needs no process group. ``bytes_sent``
    counts what this rank has sent, by purpose. A collective is counted as what its data must cross
    the links for: all-gather ``(P-1) * n``, all-reduce ``2 * (P-1)/P * n``, broadcast ``(P-1) * n``
    at its source.

    ``host`` is the communicator for tensors in host memory if this one is for tensors on devices: a
    rank that waits in it keeps no device busy.
    """

    def __init__(self, group: dist.ProcessGroup | None, host: Communicator | None = None) -> None:
        self.group = group
        self._host = host
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self.bytes_sent: Counter[Purpose] = Counter() if host is None else host.bytes_sent
        self._run: Run = _at_once

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def host(self) -> Communicator:
        return self if self._host is None else self._host

    @contextmanager
    def handing_to(self, run: Run) -> Iterator[None]:
        """Have ``run`` execute every collective, from its beginning to its end."""
        self._run = run
        try:
            yield
        finally:
            self._run = _at_once

    def note(self, purpose: Purpose, nbytes: int) -> None:
        """Count bytes sent; public for libraries that send over our group."""
        self.bytes_sent[purpose] += nbytes

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        purpose: Purpose,
    ) -> Pending:
        """Start point-to-point transfers of contiguous tensors.

        ``sends`` are pairs (destination, tensor), ``receives`` pairs (source, buffer to fill); an
        empty tensor is not sent, and its receiver passes an empty buffer. Between two ranks,
        messages match in the order in which they are posted.
        """
        for peer, tensor in [*sends, *receives]:
            if peer == self.rank or not tensor.is_contiguous():
                raise ValueError("pass contiguous tensors, and other ranks than this one")
        outgoing = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        incoming = [(peer, buffer) for peer, buffer in receives if buffer.numel()]
        for _, tensor in outgoing:
            self.note(purpose, tensor.nbytes)
        works = []
        if outgoing or incoming:
            buffers = [buffer for _, buffer in incoming]
            works = self._started(lambda: self._exchange(outgoing, incoming), buffers)
        return Pending([b for _, b in receives], works, [t for _, t in sends])

    def shift(self, tensor: Tensor, buffer: Tensor, offset: int, purpose: Purpose) -> Pending:
        """Send ``tensor`` to rank + ``offset``, receive ``buffer`` from rank - ``offset``."""
        to, source = (self.rank + offset) % self.size, (self.rank - offset) % self.size
        return self.exchange([(to, tensor)], [(source, buffer)], purpose)

    def broadcast(self, tensor: Tensor, purpose: Purpose) -> None:
        """Copy rank 0's contiguous ``tensor`` to every rank, in place."""
        if self.size > 1:
            self._run(lambda: self._broadcast(tensor), [tensor])
            if self.rank == 0:
                self.note(purpose, (self.size - 1) * tensor.nbytes)

    def all_gather(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """``tensor`` of every rank, stacked to ``[P, ...]`` in the order of ranks."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        out = tensor.new_empty((self.size, *tensor.shape))
        own = tensor.contiguous()
        self._run(lambda: self._all_gather(own, out), [out])
        self.note(purpose, (self.size - 1) * tensor.nbytes)
        return out

    def all_reduce(self, tensor: Tensor, purpose: Purpose) -> Pending:
        """Start summing ``tensor`` over the ranks, in place."""
        if self.size == 1:
            return Pending([tensor])
        self.note(purpose, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return Pending([tensor], self._started(lambda: [self._all_reduce(tensor)], [tensor]))

    def sum(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """Sum a contiguous ``tensor`` over all ranks, in place, and return it."""
        if self.size > 1:
            self.note(purpose, 2 * tensor.nbytes * (self.size - 1) // self.size)
            self._run(lambda: self._sum(tensor), [tensor])
        return tensor

    def _started(
        self, start: Callable[[], Sequence[Work]], results: Sequence[Tensor]
    ) -> list[Work]:
        """Start transfers; under `handing_to` they have ended when this returns."""
        if self._run is _at_once:
            return list(start())

        def whole() -> None:
            for work in start():
                work.wait()

        self._run(whole, results)
        return []

    # How the bytes travel between several ranks: here as torch.distributed's backend does it.

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Sequence[Work]:
        ops = [
            dist.P2POp(post, tensor, self._global(peer), self.group)
            for post, transfers in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in transfers
        ]
        return dist.batch_isend_irecv(ops)

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, self._global(0), group=self.group)

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        # Flat: gloo takes no other shape.
        gather_into(out.view(-1), tensor.view(-1), group=self.group)

    def _all_reduce(self, tensor: Tensor) -> Work:
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def _sum(self, tensor: Tensor) -> None:
        # Not started and waited for: on CUDA that would be two events and a change of streams.
        dist.all_reduce(tensor, group=self.group)

    def _global(self, rank: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)


class _Landing(NamedTuple):
    """A transfer into host memory whose result `wait` copies to the device."""

    works: Sequence[Work]
    arrived: Sequence[Tensor]
    buffers: Sequence[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for buffer, arrived in zip(self.buffers, self.arrived, strict=True):
            buffer.copy_(arrived)


class HostLinks(Communicator):
    """A `Communicator` for tensors on a GPU that ranks share, which sends through host memory.

    NCCL refuses two ranks on one device. This lets several ranks be tried on one GPU, slowly.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.group, inner)

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Sequence[Work]:
        arriving = [(peer, torch.empty_like(buffer, device="cpu")) for peer, buffer in receives]
        works = self.host._exchange([(peer, sent.cpu()) for peer, sent in sends], arriving)
        return [_Landing(works, [host for _, host in arriving], [buffer for _, buffer in receives])]

    def _broadcast(self, tensor: Tensor) -> None:
        host = tensor.cpu()
        self.host._broadcast(host)
        tensor.copy_(host)

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        host = torch.empty_like(out, device="cpu")
        self.host._all_gather(tensor.cpu(), host)
        out.copy_(host)

    def _all_reduce(self, tensor: Tensor) -> Work:
        host = tensor.cpu()
        return _Landing([self.host._all_reduce(host)], [host], [tensor])

    def _sum(self, tensor: Tensor) -> None:
        self._all_reduce(tensor).wait()
