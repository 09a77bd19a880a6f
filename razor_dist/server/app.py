"""The HTTP routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from razor_dist.config.errors import RazorError
from razor_dist.server.answers import Answers, Event
from razor_dist.server.body import read_body
from razor_dist.server.errors import Failure
from razor_dist.server.formats import Format
from razor_dist.server.request_parsing import Endpoint
from razor_dist.server.service import Service
from razor_dist.server.sse import EventStream, stream

log = logging.getLogger(__name__)

# nginx's code for a client that hung up; nobody reads it but the access log.
_CLIENT_CLOSED_REQUEST = 499
# Seconds that a stream waits for the engine to refuse the request, which then is an HTTP error
# and not an event in a stream that has begun with 200.
_REFUSAL_WAIT = 1.0


def build_app(service: Service, *, heartbeat: float = 3.0) -> FastAPI:
    """The ASGI application.

    Parameters
    ----------
    service : Service
        Does the work.
    heartbeat : float
        Seconds of silence after which a stream gets a comment, so that no proxy gives it up.
    """
    app = FastAPI(title="razor_dist", docs_url=None, redoc_url=None, openapi_url=None)
    max_bytes = int(service.config.max_body_mb * 2**20)

    async def answer(request: Request, endpoint: Endpoint) -> Response:
        raw = await read_body(request, max_bytes)
        work = asyncio.create_task(_answer(service, endpoint, raw, heartbeat))
        del raw
        return await _unless_gone(request, work)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, "chat")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, "completions")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @app.get("/health")
    async def health() -> JSONResponse:
        status = service.status
        code = 200 if status.state == "ready" else 503
        return JSONResponse({"status": status.state, "reason": status.reason}, code)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return await service.stats()

    app.add_exception_handler(RazorError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    return app


async def _answer(
    service: Service, endpoint: Endpoint, raw: bytearray, heartbeat: float
) -> Response:
    """Answer a completion request, streaming or not; its end frees what it holds."""
    parsed = await service.parse_request(endpoint, raw)
    del raw  # megabytes, for as long as the answer takes
    answers, form = service.submit(endpoint, parsed)
    if not parsed.stream:
        return await _whole(answers, form)
    events = answers.events(heartbeat)
    first = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.wait({first}, timeout=_REFUSAL_WAIT)
        if first.done():
            first.result()  # a refusal is raised here
    except BaseException:
        first.cancel()
        answers.close()
        raise
    lines = stream(_resumed(first, events), form, include_usage=parsed.include_usage)
    return EventStream(lines, close=answers.close)


async def _whole(answers: Answers, form: Format) -> Response:
    try:
        async for _ in answers.events():
            pass
        return JSONResponse(form.whole())
    finally:
        answers.close()


async def _unless_gone(request: Request, work: asyncio.Task[Response]) -> Response:
    """The result of ``work``, which is cancelled if the client hangs up first."""
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _resumed(
    first: asyncio.Future[Event | None], rest: AsyncIterator[Event | None]
) -> AsyncIterator[Event | None]:
    yield await first
    async for event in rest:
        yield event


def _model(service: Service) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": service.config.name,
        "object": "model",
        "created": service.started,
        "owned_by": "razor_dist",
        "max_model_len": info.max_model_len if info is not None else None,
    }


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return Failure.of(error).response()


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return Failure(error.status_code, message).response()
