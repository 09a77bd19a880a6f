"""Links between ranks that share a GPU: by way of the host's memory and gloo.

NCCL refuses two ranks on one device, and gloo sends from the host's memory only. So several ranks
can be tried on one GPU, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator, Pending, Purpose


class HostLinks(Communicator):
    """A `Communicator` over gloo whose tensors may be on a device."""

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
