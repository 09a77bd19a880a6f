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


def _slowly(self: ModelRunner, pieces: Any) -> Any:
    if any(piece.sharded for piece in pieces):
        with open(os.environ["CHUNKS_LOG"], "a") as log:
            log.write(f"{self.comm.rank} {time.monotonic()}\n")
        time.sleep(CHUNK_SECONDS)
    return _step(self, pieces)


if __name__ == "__main__":
    _step = ModelRunner._step
    ModelRunner._step = _slowly
    main()
