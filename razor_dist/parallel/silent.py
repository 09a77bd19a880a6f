"""A communicator of one rank among several that sends nothing: to count bytes, or time one rank.

Results are there at once: this rank's own data, or random numbers, which are finite. As with a real
communicator, bytes are counted, and each collective launches the kernels of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator, Pending, Work

_NOISE = 1 << 16  # random numbers that are sent again and again


class SilentCommunicator(Communicator):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size
        self._noise: Tensor | None = None

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Sequence[Work]:
        for _, buffer in receives:
            if buffer.is_floating_point() and not buffer.is_meta:
                self._fill(buffer.view(-1))
            else:
                buffer.zero_()
        return []

    def _fill(self, buffer: Tensor) -> None:
        """Write the same random numbers each time, so that a replay can be compared.

        A GPU that multiplies zeros would draw less power and keep a higher clock.
        """
        if self._noise is None:
            self._noise = torch.randn(_NOISE, device=buffer.device)
        whole = len(buffer) // _NOISE * _NOISE
        buffer[:whole].view(-1, _NOISE).copy_(self._noise.expand(whole // _NOISE, -1))
        buffer[whole:].copy_(self._noise[: len(buffer) - whole])

    def _broadcast(self, tensor: Tensor) -> None:
        pass

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        out.copy_(tensor.expand_as(out))

    def _all_reduce(self, tensor: Tensor) -> Work:
        return Pending([tensor])

    def _sum(self, tensor: Tensor) -> None:
        pass
