"""An engine that is kept alive: its ranks are started, watched, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from razor_dist.config.errors import ClusterError, EngineError, RazorError
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.ranks import RankExit, RankGroup, Ranks, StartRanks
from razor_dist.protocol.heartbeat import interval
from razor_dist.protocol.messages import EXIT_USER_ERROR

log = logging.getLogger(__name__)

# Time after a rank's failure for rank 0 to end or to say why: ranks fail one after the other.
_GRACE_SECONDS = 3.0
# Starts in a row that may fail before the engine has served for the first time.
_MAX_FAILED_STARTS = 3
# Starts in a row that may fail after that.
_MAX_FAILED_RESTARTS = 10
# Pause before the next start, doubled by each failure up to the longest.
_BACKOFF_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
# Least time for rank 0 to import its libraries and connect: cold disks take minutes.
_LEAST_PATIENCE_SECONDS = 120.0
# An unlocked folder of this age was left by a killed process; a younger one may yet be locked.
_ABANDONED_SECONDS = 60.0


class ManagedEngine:
    """Ranks started by this process, and the client that talks to them and knows their state.

    Rank 0 must run on this host, wherever ``start_ranks`` starts the others.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_queue: int | None = None,
        start_ranks: StartRanks = RankGroup.start,
    ) -> None:
        try:
            remove_abandoned_folders()
            # mkdtemp makes the folder for the user alone (0700), which is what guards the socket.
            self._folder = Path(tempfile.mkdtemp(prefix="razor-"))
            self._lock = lock_folder(self._folder)
        except OSError as error:
            problem = f"cannot make a folder in TMPDIR: {error.strerror or error}"
            raise EngineError(problem) from None
        self.client = EngineClient(self._folder / "engine", max_queue=max_queue)
        self._config = config
        self._start_ranks = start_ranks
        self._ranks: Ranks | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        return self._ranks.pids if self._ranks else []

    async def start(self) -> None:
        """Listen, start the ranks and watch over them in the background; returns at once."""
        await self.client.rank0.listen()
        self._task = asyncio.create_task(self._supervise(), name="razor-engine")

    async def close(self, patience: float = 2.0, reason: str = "the engine was closed") -> None:
        """End the ranks and remove the folder; unfinished requests fail with ``reason``.

        Ranks that do not end within ``patience`` seconds are terminated, and after as many killed.
        """
        self.client.shutdown(reason)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._ranks is not None:
            await self._ranks.wait(patience)
            await self._ranks.stop(patience)
            self._ranks = None
        await self.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    async def _supervise(self) -> None:
        try:
            await self._keep_running()
        except Exception as error:
            if isinstance(error, RazorError):
                log.warning("the ranks cannot be started: %s", error)
            else:
                log.exception("the ranks cannot be supervised")
            self.client.failed(f"the ranks cannot be started: {error}")

    async def _keep_running(self) -> None:
        """Start the ranks and watch them, again and again, until they fail or are closed."""
        failed_starts = 0
        while True:
            self.client.loading()
            reason = await self._serve_once()
            if self.client.status.state in ("failed", "closed"):
                return
            failed_starts = 0 if self.client.info is not None else failed_starts + 1
            most = _MAX_FAILED_RESTARTS if self.client.served else _MAX_FAILED_STARTS
            if failed_starts >= most:
                self.client.failed(f"{failed_starts} starts failed in a row; the last: {reason}")
                return
            await asyncio.sleep(min(_LONGEST_PAUSE_SECONDS, _BACKOFF_SECONDS * 2**failed_starts))

    async def _serve_once(self) -> str:
        """Start the ranks, wait for their end and return its reason; no rank is left running.

        Raises if the engine's first ranks cannot be started, later only for `ClusterError`.
        """
        try:
            # A rendezvous file is good for one start only.
            folder = Path(tempfile.mkdtemp(prefix="start-", dir=self._folder))
            ranks = await self._start_ranks(self._config, folder, self.client.rank0.path)
        except (OSError, RazorError) as error:
            if not self.client.served or isinstance(error, ClusterError):
                raise
            reason = f"the ranks cannot be started: {error}"
            self.client.lost(reason)
            log.warning("%s", reason)
            return reason
        self._ranks = ranks
        reason = await self._watch(ranks)
        if self.client.status.state not in ("failed", "closed"):
            self.client.lost(reason)
            log.warning("%s; the other ranks are ended", reason)
        await ranks.stop()
        return reason

    async def _watch(self, ranks: Ranks) -> str:
        """Wait until a rank ends, or rank 0 hangs up or falls silent; return it in words."""
        death = asyncio.create_task(ranks.first_exit())
        hangup = asyncio.create_task(self._hangup())
        stuck = asyncio.create_task(silence(self.client, self._config.heartbeat_timeout))
        try:
            await asyncio.wait({death, hangup, stuck}, return_when=asyncio.FIRST_COMPLETED)
            if stuck.done() and not death.done():
                ranks.kill()  # a stopped process obeys no other signal
                return stuck.result()
            if not death.done():
                # A rank 0 that hangs up is about to end, and its exit code says more.
                await asyncio.wait({death}, timeout=_GRACE_SECONDS)
            if not death.done():
                return self.client.status.reason
            if death.result().code == EXIT_USER_ERROR:
                return await self._user_error(death.result())
            return str(death.result())
        finally:
            for task in (death, hangup, stuck):
                task.cancel()

    async def _hangup(self) -> None:
        while self.client.status.state in ("loading", "ready"):
            await self.client.wait_change()

    async def _user_error(self, exit: RankExit) -> str:
        """Return rank 0's message after a user's error; another rank may have ended before it came.

        At the first start the engine fails for good: a mistake in the settings does not pass.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                while self.client.status.state not in ("restarting", "failed"):
                    await self.client.wait_change()
        if self.client.status.state not in ("restarting", "failed"):
            reason = f"{exit} and rank 0 did not say why"
            if self.client.served:
                self.client.lost(reason)
            else:
                self.client.failed(reason, refused=True)
        return self.client.status.reason


async def silence(client: EngineClient, timeout: float) -> str:
    """Wait until rank 0 is silent for ``timeout`` seconds or connects too late; return it in words.

    Counts only time in which this process runs: if it was stopped itself, it has heartbeats to
    read when it goes on.
    """
    step, silent, before = interval(timeout), 0.0, (client.rank0.is_open, client.rank0.received)
    while silent < (timeout if client.rank0.is_open else patience(timeout)):
        await asyncio.sleep(step)
        now = client.rank0.is_open, client.rank0.received
        silent, before = (silent + step if now == before else 0.0), now
    if client.rank0.is_open:
        return f"rank 0 gave no sign of life for {timeout:g} s"
    return f"rank 0 did not connect within {patience(timeout):g} s"


def patience(timeout: float) -> float:
    """Return the seconds until rank 0 must connect, which it does before it loads the model."""
    return max(_LEAST_PATIENCE_SECONDS, 10 * timeout)


def lock_folder(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed; `BlockingIOError` if it is locked."""
    # Not a file in the folder, which a cleaner of /tmp may remove; systemd spares locked folders.
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise
    return lock


def remove_abandoned_folders() -> None:
    """Remove this user's folders whose frontends were killed, so that their locks are free."""
    for socket in Path(tempfile.gettempdir()).glob("razor-*/engine"):
        with contextlib.suppress(OSError):
            found = socket.lstat()
            own = socket.is_socket() and found.st_uid == os.getuid()
            if own and time.time() - found.st_mtime > _ABANDONED_SECONDS:
                os.close(lock_folder(socket.parent))
                shutil.rmtree(socket.parent, ignore_errors=True)
