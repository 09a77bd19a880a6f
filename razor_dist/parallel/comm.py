"""One communicator: every byte between ranks goes through it and is counted by purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

Purpose = Literal["ring", "halo", "sinks", "compensation", "merge", "weights", "control"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


@dataclass
class Pending:
    """Receives in flight. `wait` must be called exactly once.

    The sent tensors are held so that their memory outlives the transfer.
    """

    received: list[Tensor]
    works: list[dist.Work] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    # Where to copy what was received, if not received in place (`HostLinks`).
    onto: list[Tensor] | None = None
    done: bool = False

    def wait(self) -> list[Tensor]:
        """Block until everything is sent and received; return what was received."""
        if self.done:
            raise RuntimeError("this transfer was already waited for")
        for work in self.works:
            work.wait()
        self.done = True
        # A work keeps the tensors that it moved, for as long as it lives itself.
        self.works.clear()
        self.sent.clear()
        if self.onto is not None:
            for buffer, arrived in zip(self.onto, self.received, strict=True):
                buffer.copy_(arrived)
            self.received = self.onto
        return self.received


class Communicator:
    """Collectives over one process group, with byte counters.

    ``group`` None makes a communicator of one rank that needs no process group. ``bytes_sent``
    counts what this rank has sent, by purpose. A collective is counted as what its data must cross
    the links for: all-gather ``(P-1) * n``, all-reduce ``2 * (P-1)/P * n``, broadcast ``(P-1) * n``
    at its source.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self.bytes_sent: Counter[Purpose] = Counter()

    def note(self, purpose: Purpose, nbytes: int) -> None:
        """Count bytes; public for what another library sends over our group."""
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
        ops = []
        for peer, tensor in sends:
            if peer == self.rank or not tensor.is_contiguous():
                raise ValueError("send contiguous tensors, to other ranks only")
            if tensor.numel():
                ops.append(dist.P2POp(dist.isend, tensor, self._global(peer), self.group))
                self.note(purpose, tensor.nbytes)
        for peer, buffer in receives:
            if peer == self.rank or not buffer.is_contiguous():
                raise ValueError("receive into contiguous tensors, from other ranks only")
            if buffer.numel():
                ops.append(dist.P2POp(dist.irecv, buffer, self._global(peer), self.group))
        works = dist.batch_isend_irecv(ops) if ops else []
        return Pending([b for _, b in receives], works, [t for _, t in sends])

    def shift(self, tensor: Tensor, buffer: Tensor, offset: int, purpose: Purpose) -> Pending:
        """Send ``tensor`` to rank + ``offset``, receive ``buffer`` from rank - ``offset``."""
        to, source = (self.rank + offset) % self.size, (self.rank - offset) % self.size
        return self.exchange([(to, tensor)], [(source, buffer)], purpose)

    def broadcast(self, tensor: Tensor, source: int, purpose: Purpose) -> None:
        """Copy ``tensor`` of rank ``source`` to every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, self._global(source), group=self.group)
            if self.rank == source:
                self.note(purpose, (self.size - 1) * tensor.nbytes)

    def all_gather(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """``tensor`` of every rank, stacked to ``[P, ...]`` in the order of ranks."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather(list(out.unbind(0)), tensor.contiguous(), group=self.group)
        self.note(purpose, (self.size - 1) * tensor.nbytes)
        return out

    def all_reduce(self, tensor: Tensor, purpose: Purpose) -> Pending:
        """Start summing ``tensor`` over the ranks, in place."""
        if self.size == 1:
            return Pending([tensor])
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        self.note(purpose, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return Pending([tensor], [work])

    def _global(self, rank: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)


class HostLinks(Communicator):
    """A `Communicator` over gloo whose tensors may be on a device: for ranks that share a GPU.

    NCCL refuses two ranks on one device, and gloo sends from the host's memory only. So several
    ranks can be tried on one GPU, slowly.
    """

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        purpose: Purpose,
    ) -> Pending:
        """As `Communicator.exchange`."""
        pending = super().exchange(
            [(peer, tensor.cpu()) for peer, tensor in sends],
            [(peer, torch.empty_like(buffer, device="cpu")) for peer, buffer in receives],
            purpose,
        )
        pending.onto = [buffer for _, buffer in receives]
        return pending

    def broadcast(self, tensor: Tensor, source: int, purpose: Purpose) -> None:
        """As `Communicator.broadcast`."""
        host = tensor.cpu()
        super().broadcast(host, source, purpose)
        tensor.copy_(host)

    def all_gather(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """As `Communicator.all_gather`."""
        return super().all_gather(tensor.cpu(), purpose).to(tensor.device)

    def all_reduce(self, tensor: Tensor, purpose: Purpose) -> Pending:
        """As `Communicator.all_reduce`."""
        pending = super().all_reduce(tensor.cpu(), purpose)
        pending.onto = [tensor]
        return pending
