"""The HTTP routes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, Counter
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from razor_dist import __version__
from razor_dist.api.answer_json import dumped
from razor_dist.api.errors import MESSAGES, Failure
from razor_dist.api.request import Endpoint, no_such_model
from razor_dist.config.errors import RazorError
from razor_dist.config.schema import ServerConfig
from razor_dist.documents.read import Document
from razor_dist.server.access import Access, KeyHolder
from razor_dist.server.bodies import Body, BodyReader
from razor_dist.server.docs_page import POLICY, docs_page
from razor_dist.server.page_files import FOLDER, HEADERS
from razor_dist.server.request_log import RequestLog, current_record
from razor_dist.server.service import Service

# nginx's code for a client that hung up, for the access log.
_CLIENT_CLOSED_REQUEST = 499

_ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    MESSAGES: "messages",
    f"{MESSAGES}/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


def build_app(
    service: Service, keys: Mapping[bytes, KeyHolder] | None = None, bound: str | None = None
) -> FastAPI:
    """Return the application; ``keys`` are the known ones (`load_keys`), none to ask for none.

    ``bound`` is as in `Access`.
    """
    app = new_app(
        service.config,
        keys or {},
        service.retry_after,
        service.metrics.http_requests,
        lambda: service.draining,
        bound,
    )
    bodies = BodyReader(service.config)
    service.metrics.gauge("request_body_bytes", "Bodies in memory.", lambda: bodies.used)
    _add_answers(app, service, bodies)
    _add_descriptions(app, service)
    _add_contexts(app, service)
    return app


def new_app(
    config: ServerConfig,
    keys: Mapping[bytes, KeyHolder],
    retry_after: Callable[[Exception], int],
    count: Counter,
    is_draining: Callable[[], bool] = lambda: False,
    bound: str | None = None,
) -> FastAPI:
    """Return an application without routes, which checks access, logs, and shapes errors."""
    app = FastAPI(title="razor_dist", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # a path with one more slash is an unknown path

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return Failure.of(error).response(retry_after(error), request.url.path)

    app.add_exception_handler(RazorError, on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    # The last that is added hears first.
    app.add_middleware(Access, config, dict(keys), retry_after, bound)
    app.add_middleware(RequestLog, count=count, is_draining=is_draining)
    if config.allowed_origins:  # the outermost, so that errors can be read as well
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "X-Request-Id", "request-id"),
            allow_private_network=True,  # Chromium asks before a public page calls a local server
        )
    return app


def _add_answers(app: FastAPI, service: Service, bodies: BodyReader) -> None:
    """Add the routes whose bodies and answers may be long."""

    def answering(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            arrived = asyncio.get_running_loop().time()
            respond = service.respond(endpoint, await bodies.read_json(request), arrived)
            return await _unless_gone(request, asyncio.create_task(respond))

        return answer

    for path, endpoint in _ENDPOINTS.items():
        app.add_api_route(path, answering(endpoint), methods=["POST"], response_model=None)

    @app.get("/v1/contexts/{name}/messages")
    async def context_messages(name: str) -> Response:
        kept = (await service.contexts.find(name, current_record().key)).kept
        answer = {"id": name, "object": "context.messages", **kept.content()}
        return bodies.response(await asyncio.to_thread(dumped, answer))

    @app.post("/documents/text")
    async def document_text(request: Request, name: str = "") -> Response:
        arrived = asyncio.get_running_loop().time()
        service.require_open()
        body = await bodies.read(request, "application/octet-stream", "a file")
        read = service.read_file(body, name, arrived)
        return await _unless_gone(request, asyncio.create_task(_as_text(read, body)))


def _add_descriptions(app: FastAPI, service: Service) -> None:
    """Add the routes that tell of the server, and the page."""
    page = StaticFiles(directory=FOLDER)

    @app.get("/openapi.json")
    async def openapi_json() -> dict[str, Any]:
        return await asyncio.to_thread(service.openapi)

    @app.get("/docs")
    async def docs(request: Request) -> HTMLResponse:
        text = docs_page(await asyncio.to_thread(service.openapi), str(request.base_url))
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.config.name:
            raise no_such_model(name, service.config.name)
        return service.model_card()

    @app.api_route("/ping", methods=["GET", "POST"])
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        status = service.status
        code = 200 if status.state == "ready" else 503
        return JSONResponse({"status": status.state, "reason": status.reason}, code)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return await service.stats()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.scrape(), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/", methods=["GET", "HEAD"])
    @app.api_route("/page/{name:path}", methods=["GET", "HEAD"])
    async def page_file(request: Request, name: str = "index.html") -> Response:
        response = await page.get_response(name, request.scope)
        response.headers.update(HEADERS)
        return response


def _add_contexts(app: FastAPI, service: Service) -> None:
    """Add the routes that list, show and end stored contexts."""

    @app.get("/v1/contexts")
    async def contexts() -> dict[str, Any]:
        found = await service.described_contexts()
        return {"object": "list", "data": found, "limit_bytes": service.contexts.most}

    @app.get("/v1/contexts/{name}")
    async def context(name: str) -> dict[str, Any]:
        return (await service.described_contexts(name))[0]

    @app.delete("/v1/contexts/{name}")
    async def end_context(name: str) -> dict[str, Any]:
        await service.contexts.end(name, current_record().key)
        return {"id": name, "object": "context", "deleted": True}


async def _as_text(file: Awaitable[Document], body: Body) -> Response:
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return body.answered((await file).text.encode(), "text/plain", headers)


async def _unless_gone(request: Request, work: asyncio.Task[Response]) -> Response:
    """Return the result of ``work``, which is cancelled if the client hangs up first."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(disconnected())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        work.cancel()
        gone.cancel()


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = Failure(error.status_code, message).response(path=request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that hung up while it sent its body, which would be logged otherwise."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
