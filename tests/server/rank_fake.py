"""``launch/serve.py`` under torchrun with ranks that compute nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import types
from unittest import mock

from razor_dist.cli import main
from razor_dist.config.schema import EngineConfig
from tests.fake_engine import FakeEngine


def run_rank(config: EngineConfig, socket_path: str | None) -> None:
    """As `razor_dist.engine.worker.run_rank`."""
    if int(os.environ["RANK"]) == 0:
        assert socket_path is not None
        engine = FakeEngine(config.model_dump(), config.world_size)
        asyncio.run(engine.run(socket_path))
    else:
        assert socket_path is None
        while os.getppid() != 1:  # torch's agent may fail before it has ended its ranks
            time.sleep(0.2)


if __name__ == "__main__":
    worker = types.ModuleType("razor_dist.engine.worker")
    worker.run_rank = run_rank
    with mock.patch.dict(sys.modules, {"razor_dist.engine.worker": worker}):
        sys.exit(main(["serve", *sys.argv[1:]]))
