"""The frontend as a process of its own, started by rank 0 under torchrun.

``python -m razor_dist.server.torchrun_frontend --config-json FILE --socket PATH --agent PID``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from razor_dist.config.errors import RazorError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.managed_engine import silence
from razor_dist.models.registry import check_local_model
from razor_dist.server.logs import set_up_logging
from razor_dist.server.main import Frontend, bind


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-json", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--agent", type=int, required=True)
    arguments = parser.parse_args()
    config = ServerConfig.from_json(arguments.config_json.read_text())
    set_up_logging(config.log_level)
    try:
        check_local_model(config.model)
        with bind(config) as listener:
            return asyncio.run(_run(config, listener, arguments.socket, arguments.agent))
    except RazorError as error:
        print(f"razor-dist: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(arguments.socket.parent, ignore_errors=True)


async def _run(config: ServerConfig, listener: socket.socket, path: Path, agent: int) -> int:
    client = EngineClient(path, max_queue=config.max_queue)
    # At once, not when the model is found: rank 0 waits for the socket.
    await client.start()
    frontend = Frontend(config, client, listener, start=_nothing, agent=agent)
    watch = asyncio.create_task(_kill_when_silent(client, config.heartbeat_timeout))
    try:
        return await frontend.run()
    finally:
        watch.cancel()
        await client.close()


async def _kill_when_silent(client: EngineClient, timeout: float) -> None:
    """Kill a rank 0 that is stuck; torchrun sees its death and does the rest.

    One that has not connected is left alone: torchrun may still wait for other nodes, and /health
    says so.
    """
    while True:
        reason = await silence(client, timeout)
        stuck = client.rank0_pid
        client.lost(reason)
        if stuck is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stuck, signal.SIGKILL)


async def _nothing() -> None:
    """The ranks are torchrun's to start."""


if __name__ == "__main__":
    sys.exit(main())
