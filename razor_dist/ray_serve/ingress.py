"""The endpoint of the application: it sends each request to an engine, and the answer back."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, cast

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Counter
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import (
    DeploymentBroadcastResponse,
    DeploymentHandle,
    DeploymentResponseGenerator,
)
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from razor_dist.api.errors import MESSAGES, Failure, NotReadyError
from razor_dist.api.formats import HEARTBEAT
from razor_dist.config.errors import EngineError
from razor_dist.config.logs import set_up_logging
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.client import Status
from razor_dist.ray_serve.engine import BodyPart, Forwarded, Head, Part, Unanswered
from razor_dist.ray_serve.merged import HEALTH, MERGED, merged
from razor_dist.ray_serve.routing import Route, engine_tag, route_of, tag_of
from razor_dist.server.access import load_keys
from razor_dist.server.app import new_app
from razor_dist.server.bodies import Body, BodyReader
from razor_dist.server.request_log import current_record

log = logging.getLogger(__name__)

# Most engines to which a request is sent.
_ATTEMPTS = 3
# Time for all engines to answer a scrape or the like.
_MERGED_SECONDS = 10.0
# Time for all engines to report their health: probes wait a few seconds at most.
_HEALTH_SECONDS = 2.0
# Time to collect the answers received so far, once an engine is late.
_COLLECTING_SECONDS = 0.5
# Entries of a scope that an engine's application reads; the others belong to this process.
_FORWARDED = (
    *("method", "path", "raw_path", "query_string", "headers", "client", "server", "scheme"),
    "app_root_path",
)
_CONTEXTS = "/v1/contexts/"
_HEARTBEAT = HEARTBEAT.encode()


@serve.ingress()
class Ingress:
    """Serve's first deployment. It looks at access and size before anything goes further."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServerConfig, engines: DeploymentHandle
    ) -> None:
        set_up_logging(config.log_level, config.log_format, discreet=True)
        self._config = config
        self._engines = engines.options(stream=True, method_name="answer")
        self._bodies = BodyReader(config)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        holders = load_keys(self._config)
        if not holders:
            log.warning("anybody who reaches Serve's proxies may use this server: api_key_file")
        count = Counter("requests", "", ("route", "method", "status"), registry=CollectorRegistry())
        app = new_app(self._config, holders, lambda error: 1, count)
        for path in MERGED:
            app.add_api_route(path, self._merged, methods=["GET", "HEAD"], response_model=None)
        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        app.add_api_route("/{path:path}", self._answer, methods=methods, response_model=None)

        async def served(scope: Scope, receive: Receive, send: Send) -> None:
            async def without_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    del MutableHeaders(scope=message)["x-request-id"]  # the proxy adds it
                await send(message)

            # Serve begins and ends with a lifespan, which is unknown to the middleware.
            if scope["type"] == "http":
                # Routes, logs and the check of access know paths without Serve's route_prefix.
                # Starlette puts the prefix into URLs by this name.
                root = scope.get("root_path", "")
                path = scope["path"].removeprefix(root)
                scope = {**scope, "path": path, "root_path": "", "app_root_path": root}
                await app(scope, receive, without_id)
            else:
                await app.router(scope, receive, send)

        return served

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        body, route = await self._bodies.read(request), Route()
        owner = "" if self._config.share_prefixes else current_record().key or ""
        if request.method == "POST":
            route = await asyncio.to_thread(route_of, body, owner)
        elif path.startswith(_CONTEXTS):
            route = Route(holder=tag_of(path.removeprefix(_CONTEXTS)))
        return await _Answer(self._engines, _forwarded(request.scope), body).response(route)

    async def _merged(self, request: Request) -> Response:
        """Ask all engines and merge the answers that come in time."""
        path, got = request.url.path, []
        forwarded = Forwarded(_forwarded(request.scope), b"", Route(), is_last=True)
        asked = self._engines.broadcast("answer_whole", forwarded)
        seconds = _HEALTH_SECONDS if path in HEALTH else _MERGED_SECONDS
        try:
            got = await asked.results_async(timeout_s=seconds, return_exceptions=True)
        except TimeoutError:  # raised if any engine is late
            got = await asyncio.to_thread(_come, asked)
        except RayServeException as error:
            log.warning("no engine can be asked: %s", error)
        return merged(path, [answer for answer in got if not isinstance(answer, BaseException)])


def _come(asked: DeploymentBroadcastResponse) -> list[Any]:
    """Return the answers received so far, and an exception for each one still missing.

    ``results`` waits for each engine by itself, which ``results_async`` does not; it blocks.
    """
    try:
        return asked.results(timeout_s=_COLLECTING_SECONDS, return_exceptions=True)
    except (RayServeException, TimeoutError, CancelledError):  # no engine has been asked yet
        return []


class _Answer:
    """An answer, from the first engine that does not decline the request.

    If an engine is lost before its answer has begun, another engine is asked; a stream that has
    begun ends with the API's error event.
    """

    def __init__(self, engines: DeploymentHandle, scope: Mapping[str, Any], body: Body) -> None:
        self._engines, self._scope, self._body = engines, scope, body
        self._head: Head | None = None
        self._is_sent = False  # the head
        self._begun, self._held = False, b""
        self._events = 0  # those with a name

    async def response(self, route: Route) -> Response:
        parts = self._parts(route)
        first = await anext(parts)
        assert self._head is not None
        self._is_sent = True
        response = StreamingResponse(self._until_lost(first, parts), self._head.status)
        response.raw_headers = self._head.headers
        return response

    async def _until_lost(self, first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        assert self._head is not None
        try:
            yield first
            async for data in parts:
                yield data
        except EngineError as error:
            if not self._head.is_stream:
                raise
            log.warning("a stream ends: %s", error)
            yield _last_event(self._scope["path"], Failure.of(error), self._events)

    async def _parts(self, route: Route) -> AsyncIterator[bytes]:
        """Stream the body of an answer, that of a stream after an empty part for its head.

        `EngineError` if the engine is lost after it has begun, `NotReadyError` if none can answer.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            is_last, lost = attempt == _ATTEMPTS, ""
            if is_last:
                # A context's own engine has the last word. If it was full or restarting, another
                # engine's 404 would tell the client that the context has ended.
                avoid = [one for one in route.avoid.items() if engine_tag(one[0]) != route.holder]
                route = replace(route, avoid=dict(avoid))
            request = Forwarded(self._scope, bytes(self._body), route, is_last)
            answer = cast("DeploymentResponseGenerator[list[Part]]", self._engines.remote(request))
            del request
            try:
                async for batch in answer:
                    for part in batch:
                        if isinstance(part, Unanswered):
                            lost = part.reason
                            route = replace(
                                route, avoid={**route.avoid, part.replica: part.is_lost}
                            )
                        elif (data := self._news(part)) is not None:
                            route.is_read = self._begun
                            yield data
            except (RayActorError, RayServeException) as error:
                lost = "its process has ended"
                if self._begun:
                    raise EngineError("the engine that answered was lost") from error
                if is_last or isinstance(error, RayServeException):
                    raise NotReadyError(Status("restarting", "no engine answers")) from error
            except BaseException:  # the client has gone
                answer.cancel()
                raise
            if not lost:
                yield self._held
                return
            log.warning("another engine is asked, since one does not answer: %s", lost)

    def _news(self, part: Head | BodyPart) -> bytes | None:
        """Return the bytes of a part for the client; None if they must wait."""
        if isinstance(part, Head):
            if self._is_sent and not part.is_stream:
                raise EngineError("the engine that answered was lost, and no other has answered")
            if not self._is_sent:
                self._head = part
            self._held = b""
            return b"" if part.is_stream else None  # a whole answer's head comes with it
        assert self._head is not None
        self._begun = self._begun or part.begun or not self._head.is_stream
        if not self._begun:
            # What opens a stream is held back; clients and proxies see that it lives. Heartbeats
            # are not sent twice: clients bear a number of empty lines.
            self._held += b"" if part.data == _HEARTBEAT else part.data
            return _HEARTBEAT
        self._body.drop()
        data, self._held = self._held + part.data, b""
        self._events += data.startswith(b"event: ") + data.count(b"\n\nevent: ")
        return data


def _forwarded(scope: Scope) -> dict[str, Any]:
    """Return a scope's entries for an engine, with the id by which both log the request."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    headers.append((b"x-request-id", current_record().request_id.encode()))
    return {**{name: scope[name] for name in _FORWARDED if name in scope}, "headers": headers}


def _last_event(path: str, failure: Failure, events: int) -> bytes:
    """Return the end of a stream that cannot go on, in which ``events`` named events were sent."""
    body = failure.body(path)
    if path.startswith(MESSAGES):
        return f"event: error\ndata: {json.dumps(body)}\n\n".encode()
    if path == "/v1/responses":
        error = {name: body["error"][name] for name in ("code", "message", "param")}
        body = {"type": "error", "sequence_number": events, **error}
        return f"event: error\ndata: {json.dumps(body)}\n\n".encode()
    return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode()
