"""A frontend's client of an engine that is the test."""

from __future__ import annotations

import asyncio
from pathlib import Path

from razor_dist.frontend.client import EngineClient
from razor_dist.protocol.messages import Abort, Add, EngineInfo, Progress, Ready, ToEngine


class FakeClient(EngineClient):
    """Takes what is sent to the engine; the engine's messages come from the test.

    With ``reads`` the engine prefills each pinned prefix at once. ``folder`` is its prefix store.
    """

    def __init__(self, folder: Path | None = None, *, reads: bool = False) -> None:
        super().__init__(Path("unused"))
        self.reads, self.sent = reads, list[ToEngine]()
        self.rank0.send = self._take  # type: ignore[method-assign]
        place = None if folder is None else str(folder)
        self.receive(Ready(EngineInfo(10**6, 49152, prefix_folder=place)))

    @property
    def adds(self) -> list[Add]:
        return [message for message in self.sent if isinstance(message, Add)]

    @property
    def aborted(self) -> list[str]:
        return [message.id for message in self.sent if isinstance(message, Abort)]

    def _take(self, message: ToEngine) -> None:
        self.sent.append(message)
        if self.reads and isinstance(message, Add) and message.pin:
            whole = Progress(message.id, processed=1, total=1, prefix=0, cached=0, seconds=0.0)
            asyncio.get_running_loop().call_soon(self.receive, whole)
