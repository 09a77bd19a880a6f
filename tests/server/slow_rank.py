"""A real rank whose waves take a second, and that writes down when each begins.

``WAVES_LOG`` names the file: a line for each rank and wave, with the monotonic clock, which all
processes share.
"""

import os
import time
from typing import Any

from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.worker import main

WAVE_SECONDS = 1.0


def _slowly(self: ModelRunner, *arguments: Any) -> Any:
    with open(os.environ["WAVES_LOG"], "a") as log:
        log.write(f"{self.comm.rank} {time.monotonic()}\n")
    time.sleep(WAVE_SECONDS)
    return _prefill(self, *arguments)


if __name__ == "__main__":
    _prefill = ModelRunner._prefill
    ModelRunner._prefill = _slowly  # type: ignore[method-assign]
    main()
