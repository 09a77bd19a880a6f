"""Answers of engines that are lost, by an engine in whose place there is a script."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast
from unittest import mock

import pytest

pytest.importorskip("ray.serve")
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.testclient import TestClient

from razor_dist.config.schema import ServerConfig
from razor_dist.ray_serve.engine import BodyPart, Forwarded, Head, Part, Unanswered
from razor_dist.ray_serve.ingress import Ingress, _Answer
from razor_dist.ray_serve.merged import merged
from razor_dist.ray_serve.routing import Route, engine_tag
from razor_dist.server.bodies import Body, BodyReader

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
HEARTBEAT = b"\n\n"
CHAT = "/v1/chat/completions"
OPENING, TOKEN = b'data: {"role"}\n\n', b'data: {"token"}\n\n'

Script = list[Part | Exception]


class Answer:
    """An engine's answer as a handle returns it: batches of parts, which can be cancelled."""

    def __init__(self, script: Script) -> None:
        self._parts, self.cancelled = iter(script), False

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[Part]:
        part = next(self._parts, None)
        if part is None:
            raise StopAsyncIteration
        if isinstance(part, Exception):
            raise part
        return [part]

    def cancel(self) -> None:
        self.cancelled = True


class Engines:
    """Each call of `remote` gets the next script's answer."""

    def __init__(self, *scripts: Script) -> None:
        self.answers = [Answer(script) for script in scripts]
        self.asked: list[Forwarded] = []

    def options(self, **how: object) -> Engines:
        return self

    def remote(self, request: Forwarded) -> Answer:
        self.asked.append(request)
        return self.answers[len(self.asked) - 1]


class Asked:
    """Answers to a broadcast. In Ray 2.60 `results_async` raises if one engine is late."""

    def __init__(self, *results: Any) -> None:
        self._results = results

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        for result in self._results:
            if isinstance(result, TimeoutError | RayServeException):
                raise result
        return list(self._results)

    def results(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        return list(self._results)


def ask(engines: Engines, path: str = CHAT, route: Route | None = None) -> tuple[int, list[bytes]]:
    """Return the status and the pieces of the answer; raises what breaks it."""

    async def run() -> tuple[int, list[bytes]]:
        body = Body(BodyReader(ServerConfig()))
        body.grow(b"{}")
        answer = _Answer(cast(Any, engines), {"path": path}, body)
        response = cast(Any, await answer.response(route or Route()))
        return response.status_code, [data async for data in response.body_iterator if data]

    return asyncio.run(run())


def endpoint(engines: Engines, **settings: Any) -> TestClient:
    """The ingress as Serve's proxy calls it, before such engines."""
    ingress = object.__new__(Ingress)
    with mock.patch("razor_dist.ray_serve.ingress.set_up_logging"):
        asyncio.run(Ingress.__init__(ingress, ServerConfig(**settings), cast(Any, engines)))
    return TestClient(ingress.__serve_build_asgi_app__(), base_url="http://localhost")


def whole(text: bytes, engine: int = 0) -> Script:
    return [Head(engine, 200, JSON), BodyPart(text, False), BodyPart(b"", False)]


def test_only_who_has_a_key_reaches_an_engine_and_keys_share_no_prefix() -> None:
    engines = Engines(whole(b"{1}"), whole(b"{2}"), whole(b"{3}"))
    keys = ["a" * 32, "b" * 32]
    client = endpoint(engines, api_key=keys, max_body_mb=0.01)
    body = {"prompt": "word " * 1000}
    assert client.post("/v1/completions", json=body).status_code == 401
    assert client.get("/metrics").status_code == 401
    for key in (*keys, keys[0]):
        headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200 and "x-request-id" not in answer.headers
    large = client.post("/v1/completions", json={"prompt": "word " * 9000}, headers=headers)
    assert large.status_code == 413 and "--max-body-mb" in large.json()["error"]["message"]
    one, two, three = (set(request.route.blocks) for request in engines.asked)
    assert one == three and len(one) == 9 and not one & two
    assert all((b"x-request-id", b"mine") in asked.scope["headers"] for asked in engines.asked)


@pytest.mark.parametrize(("settings", "warned"), [({}, True), ({"api_key": ["a" * 32]}, False)])
def test_an_endpoint_without_keys_is_told(
    settings: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint(Engines(), **settings)
    assert any("anybody who reaches" in message for message in caplog.messages) == warned


def test_an_answer_is_passed_on_as_it_is() -> None:
    engines = Engines([Head(0, 404, JSON), BodyPart(b"no", False)])
    assert ask(engines) == (404, [b"no"])
    [request] = engines.asked
    assert request.body == b"{}" and not request.is_last and request.route.is_read


@pytest.mark.parametrize("before", [[], [Head(0, 200, JSON)]])
def test_a_lost_engines_request_is_answered_by_another(before: Script) -> None:
    engines = Engines([*before, RayActorError()], whole(b"{1}", 1))
    assert ask(engines) == (200, [b"{1}"])
    assert [request.body for request in engines.asked] == [b"{}"] * 2


def test_the_head_of_a_whole_answer_is_that_of_the_engine_that_gave_it() -> None:
    first: Script = [Head(0, 200, [*JSON, (b"content-length", b"9")]), RayActorError()]
    last: Script = [Head(1, 400, JSON), BodyPart(b"{}", False)]
    assert ask(Engines(first, last)) == (400, [b"{}"])


def test_an_engine_that_cannot_answer_is_avoided_and_the_last_is_not_asked_for_another() -> None:
    lost, full = Unanswered("a", True, "why"), Unanswered("b", False, "why")
    engines = Engines([lost], [full], whole(b"3"))
    assert ask(engines) == (200, [b"3"])
    last = engines.asked[-1]
    assert last.route.avoid == {"a": True, "b": False} and last.is_last


def test_a_contexts_engine_that_is_full_or_restarting_has_the_last_word() -> None:
    for is_lost in (True, False):
        refused = Unanswered("holder", is_lost, "why")
        engines = Engines([refused], [Unanswered("b", False, "it has no such context")], whole(b""))
        ask(engines, route=Route(holder=engine_tag("holder")))
        last = engines.asked[-1]
        assert last.is_last and last.route.avoid == {"b": False}


@pytest.mark.parametrize("lost", [RayActorError(), RayServeException("none")])
def test_without_any_engine_the_client_is_to_come_again(lost: Exception) -> None:
    answer = endpoint(Engines(*[[lost]] * 3)).post(CHAT, json={})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "engine_restarting"


def test_an_engine_that_hangs_is_left_out_of_what_all_say() -> None:
    engines: Any = Engines()
    client = endpoint(engines)
    ready = Head(1, 200, JSON), b'{"status": "ready", "reason": ""}'
    engines.broadcast = lambda *_: Asked(TimeoutError(), RayActorError(), ready)
    health = client.get("/health")
    assert health.status_code == 200 and health.json()["engines"] == {"1": "ready"}
    for nobody in (Asked(TimeoutError()), Asked(RayServeException("none"))):
        engines.broadcast = lambda *_, nobody=nobody: nobody
        health, stats = client.get("/health"), client.get("/stats")
        assert health.status_code == stats.status_code == 503
        assert health.json()["status"] == "restarting" and stats.headers["retry-after"] == "1"


def test_a_route_prefix_is_no_part_of_the_path() -> None:
    engines: Any = Engines(whole(b"{}"))
    engines.broadcast = lambda *_: Asked((Head(0, 200, JSON), b"{}"))
    client = endpoint(engines, api_key=["a" * 32])
    served: Any = client.app
    client = TestClient(served, base_url="http://localhost", root_path="/v1")
    assert client.get("/v1/stats").status_code == 401
    client.headers["authorization"] = "Bearer " + "a" * 32
    assert client.get("/v1/stats").json() == {"engines": {"0": {}}}
    assert client.post("/v1" + CHAT, json={}).status_code == 200
    [asked] = engines.asked
    assert asked.scope["path"] == CHAT and "root_path" not in asked.scope
    base = Request({**asked.scope, "type": "http"}).base_url
    assert str(base) == "http://localhost/v1/"


def test_a_stream_that_has_not_begun_is_begun_anew() -> None:
    opened: Script = [Head(0, 200, EVENTS), BodyPart(OPENING, False), BodyPart(HEARTBEAT, False)]
    second: Script = [replace_engine(opened[0]), *opened[1:], BodyPart(TOKEN, True)]
    for end in (RayActorError(), Unanswered("a", True, "why")):
        status, pieces = ask(Engines([*opened, end], second))
        assert status == 200
        # Heartbeats are seen while nothing is sent, and only once.
        assert [piece for piece in pieces if piece] == [*[HEARTBEAT] * 4, OPENING + TOKEN]


def replace_engine(part: Any) -> Head:
    assert isinstance(part, Head)
    return part._replace(engine=1)


def test_a_stream_without_events_keeps_its_opening() -> None:
    script: Script = [Head(0, 200, EVENTS), BodyPart(OPENING, False), BodyPart(b"", False)]
    assert [p for p in ask(Engines(script))[1] if p not in (b"", HEARTBEAT)] == [OPENING]


@pytest.mark.parametrize(
    ("path", "first"),
    [
        (CHAT, TOKEN),
        ("/v1/messages", b'event: message_start\ndata: {"a":1}\n\n'),
        ("/v1/responses", b"event: a\ndata: {}\n\nevent: b\ndata: {}\n\n"),
    ],
)
def test_a_stream_that_has_begun_ends_with_its_apis_error(path: str, first: bytes) -> None:
    engines = Engines([Head(0, 200, EVENTS), BodyPart(first, True), RayActorError()])
    _, pieces = ask(engines, path)
    assert pieces[0] == first and len(pieces) == 2
    lines = pieces[1].decode().strip().split("\n")
    assert (lines[0] == "event: error") == (path != CHAT)
    error = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    if path == CHAT:
        assert "lost" in error["error"]["message"] and lines[-1] == "data: [DONE]"
    elif path == "/v1/messages":
        assert error["type"] == "error" and error["error"]["type"] == "api_error"
    else:
        assert error["type"] == "error" and error["sequence_number"] == 2
        assert error["code"] == "engine_error"


def test_a_refusal_in_the_midst_of_a_stream_is_its_error() -> None:
    refusal: Script = [Head(1, 503, JSON), BodyPart(b"{}", False)]
    begun: Script = [Head(0, 200, EVENTS), BodyPart(OPENING, False), RayActorError()]
    engines = Engines(begun, refusal)
    _, pieces = ask(engines)
    assert engines.answers[1].cancelled
    assert b"no other has answered" in pieces[-1] and pieces[-1].endswith(b"data: [DONE]\n\n")


def test_what_engines_say_is_merged() -> None:
    def answers(*bodies: object, status: int = 200) -> list[tuple[Head, bytes]]:
        return [(Head(i, status, JSON), json.dumps(b).encode()) for i, b in enumerate(bodies)]

    ready, restarting = ({"status": s, "reason": ""} for s in ("ready", "restarting"))
    both = [(Head(0, 503, JSON), json.dumps(restarting).encode()), answers({}, ready)[1]]
    found = merged("/health", both)
    assert found.status_code == 200
    assert json.loads(bytes(found.body)) == {
        "status": "ready",
        "reason": "",
        "engines": {"0": "restarting", "1": "ready"},
    }
    assert merged("/health", both[:1]).status_code == 503
    here, there = ({"id": "ctx_1", "bytes": {"device": size}} for size in (0, 7))
    [context] = json.loads(
        bytes(
            merged(
                "/v1/contexts",
                both[:1]
                + answers({"data": [here], "limit_bytes": 5}, {"data": [there], "limit_bytes": 5}),
            ).body
        )
    )["data"]
    assert context["bytes"]["device"] == 7
    text = '# HELP razor:a_total A.\n# TYPE razor:a_total counter\nrazor:a_total{{m="x"}} {}\n'
    scraped = [(Head(i, 200, JSON), text.format(i + 1).encode()) for i in range(2)]
    lines = bytes(merged("/metrics", scraped).body).decode().splitlines()
    assert [line for line in lines if line[0] != "#"] == [
        'razor:a_total{engine="0",m="x"} 1.0',
        'razor:a_total{engine="1",m="x"} 2.0',
    ]
    assert sum(line.startswith("# TYPE") for line in lines) == 1
    with pytest.raises(Exception, match="no engine answers"):
        merged("/stats", [])
