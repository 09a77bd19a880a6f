"""Prompts of megabytes: the frontend's event loop is free while they are read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest

from razor_dist.api.formats import CompletionFormat
from razor_dist.api.logprobs import Json
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, ParsedRequest
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.managed_engine import ManagedEngine
from razor_dist.frontend.ranks import RankGroup
from razor_dist.models.registry import resolve_model
from razor_dist.server import reading as server_reading
from razor_dist.server.app import build_app
from razor_dist.server.main import bind, load
from razor_dist.server.parsing_process import ParsingProcess
from razor_dist.server.service import Service
from tests import fake_engine
from tests.server.long_bodies import ENCODER, MILLION, body, ids, words
from tests.server.process import fake_server

pytestmark = pytest.mark.anyio
fake_ranks = partial(RankGroup.start, module="tests.fake_engine")
JSON = {"Content-Type": "application/json"}


@contextlib.asynccontextmanager
async def frontend(
    heartbeat: float = 3.0, max_queue: int = 64, request_timeout: float | None = None
) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """The server in this process, on ranks that compute nothing."""
    config = ServerConfig(
        max_model_len=2 * MILLION, max_queue=max_queue, request_timeout=request_timeout
    )
    engine = ManagedEngine(config, max_queue=max_queue, start_ranks=fake_ranks)
    await engine.start()
    service = Service(config, engine.client, heartbeat=heartbeat)
    process = ParsingProcess(resolve_model("smollm2"), trust_remote_code=False)
    service.load(ENCODER, process, {})
    try:
        await engine.client.ready()
        transport = httpx.ASGITransport(build_app(service))
        given: Any = {"base_url": "http://localhost", "headers": JSON, "timeout": None}
        async with httpx.AsyncClient(transport=transport, **given) as http:
            yield service, http
    finally:
        await process.aclose()
        await engine.close()


async def test_long_prompts_are_never_parsed_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_here: list[int] = []

    def parse(endpoint: Endpoint, raw: bytes, *rest: Any) -> ParsedRequest:
        read_here.append(len(raw))
        return parse_request(endpoint, raw, *rest)

    monkeypatch.setattr(server_reading, "parse_request", parse)

    async with frontend() as (_, http):
        long: Any = words(60_000)
        for prompt, tokens in ((long, ENCODER.text(long)), (ids(20_000),) * 2, ([5, 6],) * 2):
            answer = await http.post("/v1/completions", content=body(prompt=prompt))
            assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
        bad = await http.post("/v1/completions", content=body(promt=ids(20_000)))
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "promt"
        assert "did you mean 'prompt'" in bad.json()["error"]["message"]
    assert read_here == [len(body(prompt=[5, 6]))]


async def test_a_whole_answer_is_shaped_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    shaped_by: list[threading.Thread] = []
    whole = CompletionFormat.whole

    def noted(form: CompletionFormat) -> Json:
        shaped_by.append(threading.current_thread())
        return whole(form)

    monkeypatch.setattr(CompletionFormat, "whole", noted)

    async with frontend() as (_, http):
        assert (await http.post("/v1/completions", content=body(prompt=[5]))).is_success
    assert shaped_by and threading.main_thread() not in shaped_by


async def test_bodies_that_wait_to_be_read_count_for_the_queue() -> None:
    """A body that is read and one that waits take a place each; a hang-up frees one."""

    async with frontend(max_queue=2) as (service, http):

        def post(raw: bytes) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post("/v1/completions", content=raw))

        long = body(prompt=words(60_000))
        assert len(long) > 2**18
        read, waiting = post(long), post(long)
        while service.client.unfinished < 2:
            await asyncio.sleep(0.001)
        for raw in (long, body(prompt="Hello")):
            refused = await post(raw)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert "2 requests are unfinished" in refused.json()["error"]["message"]
        waiting.cancel()
        while service.client.unfinished > 1:
            await asyncio.sleep(0.001)
        assert (await post(body(prompt="Hello"))).status_code == 200
        assert (await read).status_code == 200
        assert service.client.unfinished == 0


async def test_the_servers_time_out_counts_while_a_body_is_read_too() -> None:
    async with frontend(request_timeout=0.5) as (service, http):
        assert service.reader is not None
        end = asyncio.Event()
        other = asyncio.create_task(service.reader.process.in_turn(end.wait))
        await asyncio.sleep(0)  # until it is that one's turn
        for prompt in (words(60_000), [fake_engine.HANG]):
            late = await http.post("/v1/completions", content=body(prompt=prompt, timeout=60))
            assert late.status_code == 408
            assert "not answered within 0.5 s" in late.json()["error"]["message"]
            assert service.client.unfinished == 0
        end.set()
        await other
        service.config = service.config.model_copy(update={"request_timeout": None})
        quick = await http.post("/v1/completions", content=body(prompt="Hello"))
        assert quick.status_code == 200


@pytest.mark.long
def test_a_full_collection_of_garbage_does_not_hold_up_the_loop() -> None:
    """It would look at all objects of the frontend's libraries, some 360,000."""

    async def main() -> tuple[int, int]:
        config = ServerConfig(port=0)
        engine = ManagedEngine(config, start_ranks=fake_ranks)
        try:
            await load(Service(config, engine.client), engine.start)
            return len(gc.get_objects()), gc.get_freeze_count()
        finally:
            gc.unfreeze()
            await engine.close()

    looked_at, left_alone = asyncio.run(main())
    assert looked_at < 20_000 < 100_000 < left_alone


def test_progress_that_nobody_asked_for_does_not_stop_the_heartbeat() -> None:
    async def main() -> str:
        async with frontend(heartbeat=0.5) as (_, http):
            prompt = [fake_engine.SLOW_PREFILL, 5]  # read in four chunks of 0.3 s
            answer = await http.post("/v1/completions", content=body(prompt=prompt, stream=True))
            return answer.text

    text = asyncio.run(main())
    first, _, _ = text.partition("data:")
    assert first.count("\n\n") >= 1
    assert "prompt_progress" not in text


@pytest.mark.long
def test_health_is_answered_while_a_million_tokens_are_read() -> None:
    with fake_server("--max-model-len", str(2 * MILLION)) as server:
        url, times, done = server.url(timeout=180), [], threading.Event()
        began = time.perf_counter()

        def poll() -> None:
            with httpx.Client() as http:
                while not done.is_set():
                    asked = time.perf_counter()
                    assert http.get(f"{url}/health", timeout=60).status_code == 200
                    times.append(time.perf_counter() - asked)
                    time.sleep(0.01)

        poller = threading.Thread(target=poll)
        poller.start()
        for raw in (body(prompt=words(60_000)), body(prompt=ids(MILLION))):
            answer = httpx.post(f"{url}/v1/completions", content=raw, headers=JSON, timeout=300)
            assert answer.status_code == 200, answer.text
        done.set()
        poller.join()
        # Whatever the machine: often, and never after most of the time that reading takes.
        assert len(times) > 20
        assert max(times) < (time.perf_counter() - began) / 2


def test_what_is_written_is_sent_at_once() -> None:
    """Without TCP_NODELAY a client waits 40 ms for a body that was written after its head."""

    async def main() -> int:
        connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        with bind(ServerConfig(port=0)) as listener:
            server = await asyncio.start_server(lambda _, w: connected.put(w), sock=listener)
            async with server:
                _, client = await asyncio.open_connection(*listener.getsockname()[:2])
                writer = await connected.get()
                found = writer.get_extra_info("socket").getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NODELAY
                )
                client.close()
                writer.close()
        return int(found)

    assert asyncio.run(main())
