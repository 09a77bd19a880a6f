"""A real rank whose chunks take a second, and that writes down when each begins.

``CHUNKS_LOG`` names the file: a line for each rank and chunk, with the monotonic clock, which all
processes share.
"""

import os
import time
from typing import Any

from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.worker import main
from razor_dist.protocol.step_plan import Compute, StepPlan

CHUNK_SECONDS = 1.0


def _slowly(self: ModelRunner, plan: StepPlan) -> Any:
    if isinstance(plan, Compute) and any(entry.sharded for entry in plan.entries):
        with open(os.environ["CHUNKS_LOG"], "a") as log:
            log.write(f"{self.comm.rank} {time.monotonic()}\n")
        time.sleep(CHUNK_SECONDS)
    return _execute(self, plan)


if __name__ == "__main__":
    _execute = ModelRunner.execute
    ModelRunner.execute = _slowly
    main()
