"""The recorder of steps on CPU as a stand-in for CUDA graphs: it repeats what these would."""

from __future__ import annotations

import weakref

from torch import Tensor

from razor_dist.engine.graph import batch_bucket
from razor_dist.engine.tape import StepFunction, Tape
from razor_dist.parallel.comm import Communicator


class CountingTape(Tape):
    """Counts how often it ``recorded`` and ``replayed``; pads batches, and short sequences.

    ``last`` is what replays the last, as long as anybody holds it.
    """

    def __init__(self, comm: Communicator, pad: int = 16) -> None:
        super().__init__(comm)
        self.recorded, self.replayed, self.pad = 0, 0, pad

    def rows(self, sequences: int) -> int:
        return batch_bucket(sequences)

    def record(self, step: StepFunction) -> StepFunction:
        self.recorded += 1
        replay = super().record(step)

        def counted() -> tuple[Tensor, ...]:
            self.replayed += 1
            return replay()

        self.last = weakref.ref(counted)
        return counted
