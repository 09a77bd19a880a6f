"""A real rank; the last one raises in the second chunk of the first prompt, once.

The file named by ``FAILED_ONCE`` says that it has.
"""

import os
from pathlib import Path
from typing import Any

from razor_dist.config.errors import EngineError
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.worker import main
from razor_dist.protocol.step_plan import Compute, StepPlan


def _fail_once(self: ModelRunner, plan: StepPlan) -> Any:
    failed = Path(os.environ["FAILED_ONCE"])
    if (
        isinstance(plan, Compute)
        and self.sequences[plan.entries[-1].sequence].length > 0
        and self.comm.rank == self.comm.size - 1
        and not failed.exists()
    ):
        failed.touch()
        raise EngineError("a rank fails in the middle of a prompt")
    return _execute(self, plan)


if __name__ == "__main__":
    _execute = ModelRunner.execute
    ModelRunner.execute = _fail_once
    main()
