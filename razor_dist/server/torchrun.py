"""Serving when torchrun starts the ranks.

Every process is a rank. Rank 0 also starts the frontend, as a process that outlives it: torchrun
may restart the ranks (``--max-restarts``), and the new rank 0 finds the frontend where the old one
left it, or starts another if it was killed. The frontend ends when torchrun's agent does; when the
frontend is killed, the ranks fail, and torchrun restarts them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from razor_dist.config.errors import ConfigError, RazorError
from razor_dist.config.logs import set_up_logging
from razor_dist.config.schema import EngineConfig, ServerConfig
from razor_dist.frontend.guard import child_environment, independent
from razor_dist.frontend.managed_engine import lock_folder
from razor_dist.protocol.messages import FrontendUnreachableError

RunRank = Callable[[EngineConfig, str | None], None]
FRONTEND = "razor_dist.server.main"
# Seconds that the other ranks leave rank 0 to tell of an error that all of them have met: torchrun
# ends every process of a node as soon as one has failed.
HOLD_BACK_SECONDS = 5.0


class Torchrun(NamedTuple):
    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Torchrun | None:
        """Read the environment; ``None`` unless torchrun started more than one process.

        A single process under torchrun is a frontend that starts the ranks itself.
        """
        if "TORCHELASTIC_RUN_ID" not in env or int(env["WORLD_SIZE"]) == 1:
            return None
        return cls(int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"]))

    def check(self, config: EngineConfig) -> None:
        if config.world_size != self.world_size:
            raise ConfigError(
                f"world_size is {config.world_size}, but torchrun started {self.world_size} "
                "processes; leave --world-size out or make the two agree"
            )


def serve_as_rank(config: ServerConfig, torchrun: Torchrun, run_rank: RunRank) -> int:
    """Be one of torchrun's ranks, and return its exit code; rank 0 first finds the frontend.

    Raises `RazorError` on other ranks than 0, and on rank 0 only if it cannot reach the frontend,
    which tells the user otherwise.
    """
    set_up_logging(config.log_level, config.log_format)
    socket_path = None
    if torchrun.rank == 0:
        socket_path = str(ensure_frontend(config, agent=os.getppid()))
    os.environ.pop("RAZOR_API_KEY", None)  # code that the model brings runs here
    try:
        run_rank(EngineConfig.from_json(config.engine_json()), socket_path)
    except FrontendUnreachableError:
        # A frontend that was killed has left its folder, and torchrun may not start us again.
        if socket_path is not None:
            shutil.rmtree(Path(socket_path).parent, ignore_errors=True)
        raise
    except RazorError:
        if torchrun.rank > 0:
            raise
        return 2  # the frontend tells the user
    return 0


def ensure_frontend(config: ServerConfig, agent: int, patience: float = 60.0) -> Path:
    """Return the socket of the frontend of this agent's job, which is started if there is none.

    It may take ``patience`` seconds to import its libraries and listen.

    Exits if the new frontend ends at once (the port is in use), after it has logged why. Raises
    `FrontendUnreachableError` if it does not listen in time.
    """
    frontend: subprocess.Popen[bytes] | None = None
    deadline = time.monotonic() + patience
    while True:
        if frontend is None:
            # In each round: the frontend of an earlier rank 0 may end, and then removes the folder.
            folder = private_folder(agent)
            frontend = _start_frontend(config, agent, folder)
        if (folder / "engine").exists():
            return folder / "engine"
        if frontend is not None and (code := frontend.poll()) is not None:
            sys.exit(code)
        if time.monotonic() > deadline:
            if frontend is not None:
                frontend.kill()
            raise FrontendUnreachableError(f"the frontend did not listen within {patience:g} s")
        time.sleep(0.05)


def _start_frontend(
    config: ServerConfig, agent: int, folder: Path
) -> subprocess.Popen[bytes] | None:
    """Start the frontend; ``None`` if there is an earlier rank 0's, which may not listen yet."""
    socket_path = folder / "engine"
    # The frontend holds the lock for as long as it lives: it inherits the descriptor.
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        return None
    try:
        socket_path.unlink(missing_ok=True)
        config_file = folder / "config.json"
        config_file.write_text(config.model_dump_json())
        arguments = ["--config-json", str(config_file), "--socket", str(socket_path)]
        return subprocess.Popen(
            independent(FRONTEND, *arguments, "--agent", str(agent)),
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=[lock],
            start_new_session=True,  # torchrun ends the rank's process group, not the frontend
        )
    finally:
        os.close(lock)


def private_folder(agent: int) -> Path:
    """Return this user's folder for the job of one agent, the same for each of its rank 0s."""
    # With the time of its start: its number alone may be used again.
    folder = Path(tempfile.gettempdir()) / f"razor-{os.getuid()}-{agent}-{_start_of(agent)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # The name can be guessed: another user may have made the folder first.
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"the folder {folder} is not private to this user; remove it")
    return folder


def _start_of(pid: int) -> int:
    """Return when a process started, in units of 10 ms or so."""
    try:
        # Since boot: psutil's time moves when the clock is set.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except FileNotFoundError:  # another system than Linux
        return round(psutil.Process(pid).create_time() * 100)
