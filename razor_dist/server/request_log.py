"""One log line for each request, with nothing in it that a client has written but its id."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from razor_dist.api.errors import Failure

log = logging.getLogger(__name__)

# Asked every few seconds by machines.
_QUIET = frozenset({"/health", "/ping", "/metrics"})
_ID = re.compile(r"[A-Za-z0-9._:=/+-]{1,128}")
_OF_TRACES = ("traceparent", "tracestate")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass
class RequestRecord:
    """The fields of one request's log line, filled until it ends."""

    request_id: str
    key: str | None = None  # `KeyHolder.id`
    address: str | None = None  # the client's; it is not logged
    prompt_tokens: int = 0
    completion_tokens: int = 0
    operation: str = ""  # what is asked for, as OpenTelemetry names it
    trace: Mapping[str, str] = field(default_factory=dict)  # headers of the caller's span
    begun: bool = False  # a part of the answer was sent, not only a stream's opening or heartbeats

    @property
    def turn(self) -> str | None:
        """With whom requests take turns: the key, or the client's address without keys."""
        return self.key or self.address


_record: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


def current_record() -> RequestRecord:
    """Return the record of the current request; outside of one, a record that is dropped."""
    return _record.get() or RequestRecord("")


class RequestLog:
    """ASGI middleware that logs and counts requests, each when its response has ended.

    Every response has an ``X-Request-Id`` (and ``request-id``): the request's own, if it is made of
    at most 128 letters, digits and ``._:=/+-``, or a new one.
    While ``is_draining()`` responses close their connections: the client's next one shall find
    another server.
    """

    def __init__(self, app: ASGIApp, count: Counter, is_draining: Callable[[], bool]) -> None:
        self.app = app
        self._count = count
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope)
        id_ = given.get("x-request-id", "")
        record = RequestRecord(id_ if _ID.fullmatch(id_) else uuid.uuid4().hex)
        record.trace = {name: given[name] for name in _OF_TRACES if name in given}
        record.address = (scope.get("client") or [None])[0]
        begun, status, complete = time.perf_counter(), 0, False

        async def noting(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = record.request_id
                headers["request-id"] = record.request_id  # Anthropic's name
                if self._is_draining():
                    headers["Connection"] = "close"
            await send(message)
            if message["type"] == "http.response.body":
                complete = not message.get("more_body", False)

        token = _record.set(record)
        try:
            await self.app(scope, receive, noting)
        except Exception as error:
            log.exception("the request %s failed", record.request_id)
            if status:
                raise  # in mid-answer: the connection must break
            response = Failure.of(error).response(path=scope["path"])
            await response(scope, receive, noting)
        finally:
            _record.reset(token)
            # The route's pattern, not the path: that is the client's writing.
            route = getattr(scope.get("route") or _route(scope), "path", "unknown")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._count.labels(route, method, status).inc()
            fields = {
                "request_id": record.request_id,
                "key": record.key,
                "method": method,
                "route": route,
                "status": status,
                "complete": complete,
                "seconds": round(time.perf_counter() - begun, 4),
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
            }
            level = logging.DEBUG if route in _QUIET else logging.INFO
            known = [(name, value) for name, value in fields.items() if value not in (None, 0)]
            text = " ".join(f"{name}={value}" for name, value in known)
            log.log(level, "%s", text, extra={"fields": fields})


def _route(scope: Scope) -> BaseRoute | None:
    """Return the route of a request that was refused before it was routed."""
    routes = scope["app"].routes
    return next((route for route in routes if route.matches(scope)[0] != Match.NONE), None)
