"""Links between ranks that share a GPU: by way of the host's memory and gloo.

NCCL refuses two ranks on one device, and gloo sends from the host's memory only. So several ranks
can be tried on one GPU, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator, Pending, Purpose


@dataclass
class _Landing(Pending):
    """Receives into the host's memory that end on the device."""

    inner: Pending = field(default_factory=lambda: Pending([]))
    buffers: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        for buffer, arrived in zip(self.buffers, self.inner.wait(), strict=True):
            buffer.copy_(arrived)
        return super().wait()


class HostLinks(Communicator):
    """A `Communicator` over gloo whose tensors may be on a device."""

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        purpose: Purpose,
    ) -> Pending:
        """As `Communicator.exchange`."""
        buffers = [buffer for _, buffer in receives]
        inner = super().exchange(
            [(peer, tensor.cpu()) for peer, tensor in sends],
            [(peer, torch.empty_like(buffer, device="cpu")) for peer, buffer in receives],
            purpose,
        )
        return _Landing(buffers, inner=inner, buffers=buffers)

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
        inner = super().all_reduce(tensor.cpu(), purpose)
        return _Landing([tensor], inner=inner, buffers=[tensor])
