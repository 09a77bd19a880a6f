"""Keeps an engine's ranks alive: starts them, notices a death, starts them again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from pathlib import Path

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.heartbeat import silence
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.ranks import EXIT_USER_ERROR, RankExit, RankGroup, Ranks, StartRanks

log = logging.getLogger(__name__)

# Seconds that processes which fail together are given to end, or to say why.
_GRACE = 3.0


class LocalLauncher:
    """Supervises one set of ranks and tells the client what becomes of them.

    Parameters
    ----------
    config : EngineConfig
        Handed to every rank.
    client : EngineClient
        Listens on the socket that rank 0 connects to.
    folder : Path
        A private folder; each start gets a new one in it.
    start_ranks : callable
        Makes one generation of ranks.
    max_failed_starts : int
        Consecutive starts that may fail before the engine is given up.
    backoff : float
        Seconds before the first new start; doubled by each failed one.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        *,
        folder: Path,
        start_ranks: StartRanks = RankGroup.start,
        max_failed_starts: int = 3,
        backoff: float = 0.5,
    ) -> None:
        self._config = config
        self._client = client
        self._start = start_ranks
        self._max_failed_starts = max_failed_starts
        self._backoff = backoff
        self._folder = folder
        self._ranks: Ranks | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks by rank; empty between two starts."""
        return self._ranks.pids if self._ranks else []

    def start(self) -> None:
        """Start the ranks and watch over them in the background."""
        self._task = asyncio.create_task(self._supervise(), name="razor-launcher")

    async def close(self, patience: float = 2.0) -> None:
        """End the ranks: those that do not obey ``shutdown`` in time are terminated, then killed.

        Parameters
        ----------
        patience : float
            Seconds for each of the two first stages.
        """
        self._client.shutdown()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._ranks is not None:
            await self._ranks.wait(patience)
            await self._ranks.stop(patience)
            self._ranks = None

    async def _supervise(self) -> None:
        try:
            await self._keep_running()
        except Exception as error:
            log.exception("the ranks cannot be supervised")
            self._client.failed(f"the ranks cannot be started: {error}")

    async def _keep_running(self) -> None:
        """Start, watch and start again, until that is no use."""
        failed_starts = 0
        while True:
            ranks = await self._start_ranks()
            reason = await self._watch(ranks)
            if self._client.status.state in ("failed", "closed"):
                await ranks.stop()
                return
            was_ready = self._client.info is not None
            self._client.lost(reason)
            log.warning("%s; the other ranks are ended", reason)
            await ranks.stop()
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts >= self._max_failed_starts:
                self._client.failed(f"{failed_starts} starts failed in a row; the last: {reason}")
                return
            await asyncio.sleep(self._backoff * 2**failed_starts)

    async def _start_ranks(self) -> Ranks:
        self._client.loading()
        # A rendezvous file is good for one start only.
        folder = Path(tempfile.mkdtemp(prefix="start-", dir=self._folder))
        self._ranks = await self._start(self._config, folder, self._client.socket_path)
        return self._ranks

    async def _watch(self, ranks: Ranks) -> str:
        """Wait until a rank ends, hangs up or falls silent; returns what happened, in words."""
        death = asyncio.create_task(ranks.first_exit())
        hangup = asyncio.create_task(self._hangup())
        stuck = asyncio.create_task(silence(self._client, self._config.heartbeat_timeout))
        try:
            await asyncio.wait({death, hangup, stuck}, return_when=asyncio.FIRST_COMPLETED)
            if stuck.done() and not death.done():
                ranks.kill()  # a stopped process would not obey anything milder
                return stuck.result()
            if not death.done():
                # A rank 0 that hangs up is about to end, and its exit code tells more.
                await asyncio.wait({death}, timeout=_GRACE)
            if not death.done():
                return self._client.status.reason
            if death.result().code == EXIT_USER_ERROR:
                await self._user_error(ranks, death.result())
            return str(death.result())
        finally:
            death.cancel()
            hangup.cancel()
            stuck.cancel()

    async def _hangup(self) -> None:
        while self._client.status.state in ("loading", "ready"):
            await self._client.wait_change()

    async def _user_error(self, ranks: Ranks, exit: RankExit) -> None:
        """Give up, with rank 0's message, for which another rank's exit may be too early."""
        if self._client.status.state == "failed":
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE):
                while self._client.status.state != "failed":
                    await self._client.wait_change()
        if self._client.status.state != "failed":
            self._client.failed(f"{exit} and rank 0 did not say why")
