"""An engine's refusals, of which another engine may know better, and its store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray.serve")
from fastapi import FastAPI, Response

from razor_dist.api.errors import Failure
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.client import Status
from razor_dist.ray_serve.engine import (
    BodyPart,
    Engine,
    Forwarded,
    Head,
    Unanswered,
    most_engines,
    with_own_store,
)
from razor_dist.ray_serve.routing import Route
from razor_dist.server.bodies import in_pieces
from razor_dist.server.request_log import RequestLog


def answer(said: Failure | Response, state: str = "ready", **request: Any) -> list[Any]:
    """Return the parts of the answer of an engine that refuses, and is not full, or answers."""
    app = FastAPI()
    app.add_middleware(RequestLog, count=Mock(), is_draining=lambda: False)

    @app.post("/")
    def respond() -> Response:
        return said if isinstance(said, Response) else said.response()

    outside_ray = {"_number": 3, "__del__": lambda self: None}
    engine: Any = object.__new__(type("Bare", (Engine,), outside_ray))
    engine._app, engine._replica = app, "me"
    engine._service = SimpleNamespace(status=Status(state))
    scope = {"method": "POST", "path": "/", "headers": [], "query_string": b""}

    async def run() -> list[Any]:
        batches = engine.answer(Forwarded(scope, b"", **{"route": Route(), **request}))
        return [part async for batch in batches for part in batch]

    return asyncio.run(run())


def test_what_another_engine_may_answer_is_not_refused() -> None:
    # With n > 1 an engine is full before as many requests are unfinished as there may be.
    full = Failure(429, "the queue is full", code="queue_full")
    assert answer(full) == [Unanswered("me", False, "it is full")]
    head, *body = answer(full, is_last=True)
    assert isinstance(head, Head) and (head.engine, head.status) == (3, 429)
    assert b"".join(part.data for part in body).startswith(b"{")
    limited = Failure(429, 'no "queue_full"', code="rate_limit_exceeded")
    assert answer(limited)[0].status == 429
    gone = Failure(404, "no such context", code="context_not_found")
    [lacks] = answer(gone, route=Route(holder="another"))
    assert isinstance(lacks, Unanswered) and not lacks.is_lost
    head, first, *_ = answer(gone)
    assert head.status == 404 and isinstance(first, BodyPart)
    [lost] = answer(Failure(503, "later"), state="restarting")
    assert lost == Unanswered("me", True, "it is restarting")


def test_the_rest_of_a_whole_answer_comes_from_an_engine_that_restarts() -> None:
    head, *body = answer(in_pieces(b"x" * 2**18), state="restarting")
    assert isinstance(head, Head) and all(part.begun for part in body if part.data)
    assert b"".join(part.data for part in body) == b"x" * 2**18


def test_an_engine_takes_no_store_that_another_has(tmp_path: Path) -> None:
    config = ServerConfig(prefix_store=str(tmp_path / "{engine}"))

    def store(number: int) -> tuple[str, Any]:
        found, lock = with_own_store(config, number)
        assert found.prefix_store is not None
        return Path(found.prefix_store).name, lock

    held = dict(store(number) for number in (0, 1, 2))
    assert list(held) == ["0", "1", "2"]
    held.pop("0").release()  # 1 and 2 are numbered 0 and 1 now, and a new engine is 2
    name, lock = store(2)
    assert name == "0"
    assert store(2)[0] == "3"
    lock.release()
    shared = ServerConfig(prefix_store=str(tmp_path / "one"))
    assert with_own_store(shared, 2) == (shared, None)
    (tmp_path / "file").touch()
    unusable = ServerConfig(prefix_store=str(tmp_path / "file" / "{engine}"))
    found, _ = with_own_store(unusable, 1)
    assert found.prefix_store == str(tmp_path / "file" / "1")  # which its ranks will refuse


@pytest.mark.parametrize(("scaling", "most"), [(None, 2), (SimpleNamespace(max_replicas=4), 4)])
def test_an_engine_knows_how_many_there_may_be(
    monkeypatch: pytest.MonkeyPatch, scaling: Any, most: int
) -> None:
    config = SimpleNamespace(autoscaling_config=scaling)
    context = SimpleNamespace(_deployment_config=config, world_size=2)
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    assert most_engines() == most
