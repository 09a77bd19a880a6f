"""One engine of the application: a frontend, and its ranks in the replica's placement group."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import filelock
from ray import serve, util
from starlette.types import Message, Scope

from razor_dist.config.errors import EngineError
from razor_dist.config.logs import set_up_logging
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.managed_engine import ManagedEngine
from razor_dist.jobs.cluster import Reservation
from razor_dist.jobs.host_engine import numbered
from razor_dist.jobs.ray_ranks import ActorRanks
from razor_dist.ray_serve.routing import Route, engine_tag
from razor_dist.server.access import load_keys
from razor_dist.server.app import build_app
from razor_dist.server.main import close, load
from razor_dist.server.request_log import current_record
from razor_dist.server.service import Service

# Messages of a response that wait for the ingress; beyond them the response is held back.
_WAITING = 64
# Time for a request to end by itself once its client has gone.
_GOODBYE_SECONDS = 5.0


@dataclass(frozen=True)
class Forwarded:
    """A request as the ingress sends it to an engine.

    ``scope`` is ASGI's scope without the ingress's own objects. With ``is_last`` the engine must
    answer; otherwise it may decline (`Unanswered`), and another engine is asked.
    """

    scope: Mapping[str, Any]
    body: bytes
    route: Route
    is_last: bool = False


class Head(NamedTuple):
    """The beginning of a response; ``engine`` is the engine's number, from 0 on."""

    engine: int
    status: int
    headers: list[tuple[bytes, bytes]]

    @property
    def is_stream(self) -> bool:
        return dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")


class BodyPart(NamedTuple):
    """A part of a response; a stream has ``begun`` if it holds more than its opening."""

    data: bytes
    begun: bool


class Unanswered(NamedTuple):
    """In place of the rest, if another engine may answer; it ends a response.

    ``is_lost`` says that the engine's caches are gone. Otherwise it is full, or lacks a context.
    """

    replica: str
    is_lost: bool
    reason: str


Part = Head | BodyPart | Unanswered


class Engine:
    """A replica of Ray Serve's: the whole server without its sockets.

    Serve starts it in the first bundle of a placement group that has a bundle for each rank, asks
    for its health, and replaces it if the ranks cannot be started again.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServerConfig, bundle: Mapping[str, float]
    ) -> None:
        set_up_logging(config.log_level, config.log_format, discreet=True)
        self._replica = serve.get_replica_context().replica_tag
        group = util.get_current_placement_group()
        assert group is not None
        start = partial(ActorRanks.start, Reservation(group, bundle, most_engines()))
        config, self._store_lock = with_own_store(config, self._number)
        self._engine = ManagedEngine(config, max_queue=config.max_queue, start_ranks=start)
        self._service = Service(config, self._engine.client, tag=engine_tag(self._replica))
        self._app = build_app(self._service, load_keys(config))
        try:
            await load(self._service, self._engine.start)
        except BaseException:
            await self.close()
            raise

    @property
    def _number(self) -> int:
        """The engine's number, from 0 on; Serve may change it to fill a gap."""
        number: int = serve.get_replica_context().rank.rank
        return number

    async def close(self) -> None:
        await close(self._service)
        await self._engine.close()

    async def __del__(self) -> None:
        # Serve's hook, once a replica that ends has no request left.
        if hasattr(self, "_service"):
            await self.close()

    def check_health(self) -> None:
        status = self._service.client.status
        if status.state == "failed":
            raise EngineError(status.reason)

    def processes(self) -> tuple[int, list[int]]:
        """Return the engine's number, and the process ids of its frontend and of its ranks."""
        return self._number, [os.getpid(), *self._engine.pids]

    async def answer_whole(self, request: Forwarded) -> tuple[Head, bytes]:
        """Answer a request that every engine gets."""
        head, parts = None, []
        async for batch in self.answer(request):
            for part in batch:
                if isinstance(part, Head):
                    head = part
                elif isinstance(part, BodyPart):
                    parts.append(part.data)
        assert head is not None
        return head, b"".join(parts)

    async def answer(self, request: Forwarded) -> AsyncGenerator[list[Part]]:
        """Stream a response, in batches of the parts that are ready."""
        parts: asyncio.Queue[Part | None] = asyncio.Queue(_WAITING)
        gone, body, ended = asyncio.Event(), iter([request.body]), False
        head: Message | None = None

        async def receive() -> Message:
            data = next(body, None)
            if data is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal ended, head
            if message["type"] == "http.response.start":
                head = message  # goes with the first of the body, which says why it is a refusal
            elif not ended:  # else another engine is asked
                for part in self._parts(head, message, current_record().begun, request):
                    ended = isinstance(part, Unanswered)
                    await parts.put(part)
                head = None

        async def run() -> None:
            try:
                await self._app(_scope(request.scope), receive, send)
            finally:
                if not gone.is_set():
                    await parts.put(None)

        task = asyncio.create_task(run())
        try:
            batch: list[Part | None] = []
            while None not in batch:
                batch = [await parts.get()]
                while not parts.empty():
                    batch.append(parts.get_nowait())
                yield [part for part in batch if part is not None]
            await task  # raises what broke the response
        finally:
            gone.set()
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_GOODBYE_SECONDS)

    def _parts(
        self, head: Message | None, message: Message, begun: bool, request: Forwarded
    ) -> list[Part]:
        """Return a body message's parts for the ingress; ``head`` comes with the first message."""
        state, data = self._service.status, message.get("body", b"")
        status = head["status"] if head else 0
        if not (begun or request.is_last):
            if state.state != "ready":
                reason = state.reason or f"it is {state.state}"
                return [Unanswered(self._replica, True, reason)]
            full = b'"queue_full"' in data or b'"pinned_prefixes_hold_cache"' in data
            if status == 429 and full:  # and not a limit of the key's
                return [Unanswered(self._replica, False, "it is full")]
            if status == 404 and request.route.holder not in ("", engine_tag(self._replica)):
                return [Unanswered(self._replica, False, "it has no such context")]
        body = BodyPart(data, begun)
        return [Head(self._number, status, list(head.get("headers", []))), body] if head else [body]


def most_engines() -> int:
    """Return how many engines this replica's deployment may have."""
    context = serve.get_replica_context()
    scaling = context._deployment_config.autoscaling_config  # public nowhere else
    return scaling.max_replicas if scaling else context.world_size


def with_own_store(
    config: ServerConfig, number: int
) -> tuple[ServerConfig, filelock.FileLock | None]:
    """Return settings whose ``{engine}`` names a store that no other engine uses, and its lock.

    The engine's own number is tried first. Serve renumbers engines when one goes, so an older
    engine may still hold that store; then the first free number is taken. The lock is held until
    the process ends.
    """
    if "{engine}" not in (config.prefix_store or ""):
        return config, None
    for one in itertools.chain([number], itertools.count()):
        found = numbered(config, one)
        folder = Path(found.prefix_store or "")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = filelock.FileLock(folder / "engine.lock", mode=0o600)
            lock.acquire(timeout=0)
        except filelock.Timeout:
            continue
        except OSError:  # a file system without locks, or a folder that the ranks will complain of
            break
        return found, lock
    return numbered(config, number), None


def _scope(scope: Mapping[str, Any]) -> Scope:
    # By 2.3 a response listens for the client's end.
    return {**scope, "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
