"""A real rank whose chunks take a second, and that writes down when each begins.

``CHUNKS_LOG`` names the file: a line for each rank and chunk, with the monotonic clock, which all
processes share.
"""

import os
import time
from typing import Any

from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.worker import main

CHUNK_SECONDS = 1.0


def _slowly(self: ModelRunner, *arguments: Any) -> Any:
    with open(os.environ["CHUNKS_LOG"], "a") as log:
        log.write(f"{self.comm.rank} {time.monotonic()}\n")
    time.sleep(CHUNK_SECONDS)
    return _long(self, *arguments)


if __name__ == "__main__":
    _long = ModelRunner._long
    ModelRunner._long = _slowly
    main()
