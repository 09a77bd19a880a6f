"""An engine of this host: the client, the ranks, and the private folder of their socket."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.launcher import LocalLauncher
from razor_dist.frontend.ranks import WORKER, RankGroup, StartRanks


class LocalEngine:
    """Ranks started by this process, and the client that talks to them.

    Parameters
    ----------
    config : EngineConfig
        Handed to every rank.
    max_queue : int or None
        As in `EngineClient`.
    worker : str
        The ranks' module, if they are processes.
    start_ranks : callable, optional
        How else they are started: rank 0 must run on this host.

    Attributes
    ----------
    client : EngineClient
        Takes requests once it is ready.
    launcher : LocalLauncher
        Restarts the ranks when one dies.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_queue: int | None = None,
        worker: str = WORKER,
        start_ranks: StartRanks | None = None,
    ) -> None:
        # mkdtemp makes the folder for the user alone (0700), which is what guards the socket.
        self._folder = Path(tempfile.mkdtemp(prefix="razor-"))
        self.client = EngineClient(self._folder / "engine", max_queue=max_queue)
        self.launcher = LocalLauncher(
            config,
            self.client,
            folder=self._folder,
            start_ranks=start_ranks or partial(RankGroup.start, module=worker),
        )

    async def start(self) -> None:
        """Listen and start the ranks; returns at once."""
        await self.client.start()
        self.launcher.start()

    async def close(self) -> None:
        """End the ranks and remove every trace; unfinished requests fail."""
        await self.launcher.close()
        await self.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)
