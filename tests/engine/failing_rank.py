"""A real rank; the last one raises in the second chunk of the first prompt, once.

The file named by ``FAILED_ONCE`` says that it has.
"""

import os
from pathlib import Path
from typing import Any

from razor_dist.config.errors import EngineError
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.worker import main


def _fail_once(self: ModelRunner, pieces: Any) -> Any:
    failed = Path(os.environ["FAILED_ONCE"])
    if (
        self.sequences[pieces[-1].sequence].length > 0
        and self.comm.rank == self.comm.size - 1
        and not failed.exists()
    ):
        failed.touch()
        raise EngineError("a rank fails in the middle of a prompt")
    return _step(self, pieces)


if __name__ == "__main__":
    _step = ModelRunner._step
    ModelRunner._step = _fail_once
    main()
