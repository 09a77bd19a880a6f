"""A communicator of one rank among several that sends nothing: for counting, and for timing alone.

What other ranks would send is there at once, and is this rank's own data, so that numbers stay
finite. Everything else is as with a real communicator: bytes are counted, and each collective is
as many kernels as a copy takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from razor_dist.parallel.comm import Communicator, Work


class SilentCommunicator(Communicator):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Sequence[Work]:
        for _, buffer in receives:
            # Random, since a GPU that multiplies zeros draws less power and keeps a higher clock.
            if buffer.is_floating_point():
                buffer.normal_()
            else:
                buffer.random_(0, 2)
        return []

    def _broadcast(self, tensor: Tensor) -> None:
        pass

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        out.copy_(tensor.expand_as(out))

    def _all_reduce(self, tensor: Tensor) -> Work:
        return _Done()

    def _sum(self, tensor: Tensor) -> None:
        pass


class _Done:
    def wait(self) -> None:
        pass
