"""Bodies of megabytes: read by another process, while the frontend's event loop is free."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from functools import cache, partial
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from razor_dist.api.errors import Failure
from razor_dist.api.formats import CompletionFormat
from razor_dist.api.logprobs import Json
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, Limits, ParsedRequest
from razor_dist.config.errors import EngineError, ProcessKilledError, RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.child_process import CLOSED
from razor_dist.frontend.managed_engine import ManagedEngine
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.frontend.ranks import RankGroup
from razor_dist.models.registry import resolve_model
from razor_dist.protocol.messages import HEADER_SIZE, decode_fields
from razor_dist.server import parsing_process as parsing
from razor_dist.server import reading as server_reading
from razor_dist.server.app import build_app
from razor_dist.server.main import bind, load
from razor_dist.server.parsing_process import ParsingProcess
from razor_dist.server.service import Service
from tests import fake_engine
from tests.server.process import fake_server
from tests.tokenizer import smollm2_tokenizer

fake_ranks = partial(RankGroup.start, module="tests.fake_engine")

JSON = {"Content-Type": "application/json"}
MILLION = 2**20
LIMITS = Limits("smollm2", 4, 2 * MILLION, fake_engine.VOCAB_SIZE, {})
ENCODER = PromptEncoder(smollm2_tokenizer())


def words(count: int) -> str:
    return " ".join(
        random.Random(0).choices(["the", "quick", "brown", "fox", "17", "jumps,", "over;"], k=count)
    )


@cache
def ids(count: int) -> list[int]:
    return random.Random(0).choices(range(100, 49000), k=count)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "smollm2", "max_tokens": 1, **fields}).encode()


# ------------------------------------------------------------ the other process


GOOD: list[tuple[Endpoint, dict[str, Any]]] = [
    ("completions", {"prompt": "Hello, world", "stop": ["x", "y"], "temperature": 0.5, "seed": 3}),
    ("completions", {"prompt": [[5, 6], [7]], "logprobs": 2, "ignore_eos": True}),
    (
        "chat",
        {
            "messages": [{"role": "user", "content": "Say héllo 😀 to 世界"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        },
    ),
]
BAD: list[tuple[Endpoint, bytes]] = [
    ("completions", b"{"),
    ("completions", body(prompt=[1, 10**30])),
    ("completions", body(prompt=["a"] * 5)),
    ("chat", body(messages=[], temprature=1)),
    ("chat", body(messages=[{"role": "user", "content": "Hi"}], max_tokens=3 * MILLION)),
    ("chat", body(messages=[{"role": "user", "content": "Hi"}], model="gpt-4o")),
]


def told(parsed: ParsedRequest) -> Any:
    """An parsed as plain values, to compare."""
    prompts = [(prompt.tokens.tolist(), prompt.params) for prompt in parsed.prompts]
    return prompts, parsed.stream, parsed.include_usage, parsed.return_progress


def refusal(error: RequestError) -> tuple[str, str | None, str | None]:
    return str(error), error.param, error.code


@contextlib.asynccontextmanager
async def reading() -> AsyncIterator[ParsingProcess]:
    process = ParsingProcess(resolve_model("smollm2"), trust_remote_code=False)
    try:
        yield process
    finally:
        await process.aclose()


def ask(process: ParsingProcess, prompt: Any) -> asyncio.Task[ParsedRequest]:
    return asyncio.create_task(process.parse_request("completions", body(prompt=prompt), LIMITS))


def tokens(parsed: ParsedRequest) -> list[int]:
    return parsed.prompts[0].tokens.tolist()


def test_another_process_reads_bodies_as_this_one_does() -> None:
    async def main() -> None:
        async with reading() as process:
            for endpoint, fields in GOOD:
                raw = body(**fields)
                parsed = await process.parse_request(endpoint, raw, LIMITS)
                assert told(parsed) == told(parse_request(endpoint, raw, ENCODER, LIMITS))
                assert all(prompt.tokens.dtype == np.int32 for prompt in parsed.prompts)
            for endpoint, raw in BAD:
                with pytest.raises(RequestError) as here:
                    parse_request(endpoint, raw, ENCODER, LIMITS)
                with pytest.raises(RequestError) as there:
                    await process.parse_request(endpoint, raw, LIMITS)
                assert refusal(there.value) == refusal(here.value)

    asyncio.run(main())


def test_clients_that_hang_up_leave_the_others_their_answers() -> None:
    """One while its body is read, and one that waits; the process lives."""

    async def main() -> None:
        async with reading() as process:
            await ask(process, [1])
            child = process.pid
            prompts: list[Any] = [words(20_000), [8, 9], [7], [6, 5]]
            tasks = [ask(process, prompt) for prompt in prompts]
            while not process.is_busy:
                await asyncio.sleep(0)
            ended: list[int] = []
            for index, task in enumerate(tasks):
                task.add_done_callback(lambda _, index=index: ended.append(index))
            for gone in (0, 2):
                tasks[gone].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            for index, answer in enumerate(answers):
                if index in (0, 2):
                    assert isinstance(answer, asyncio.CancelledError)
                else:
                    assert isinstance(answer, ParsedRequest) and tokens(answer) == prompts[index]
            assert sorted(ended[:2]) == [0, 2] and ended[2:] == [1, 3]
            assert child is not None and process.pid == child

    asyncio.run(main())


def test_a_process_that_is_killed_or_stuck_is_replaced() -> None:
    async def main() -> None:
        async with reading() as process:
            await ask(process, [1])
            killed = ask(process, ids(3))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(ProcessKilledError, match="has died; send the request again"):
                await killed
            assert tokens(await ask(process, [8, 9])) == [8, 9]
            # One that is stuck is given up, and does not hold up those that wait for it.
            stuck = psutil.Process(process.pid)
            stuck.suspend()
            process.patience = 1.0
            given_up, waiting = ask(process, [5]), ask(process, [4])
            await asyncio.sleep(0.1)
            process.patience = 120.0  # the first has begun; the second waits for a new process
            with pytest.raises(EngineError, match="was not read within 1 s and is given up"):
                await given_up
            while stuck.is_running() and stuck.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
            assert tokens(await waiting) == [4]

    asyncio.run(main())


def test_what_waits_when_the_server_ends_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It starts no other process, and nothing is heard of a client that has gone."""

    async def main() -> None:
        async with reading() as process:
            await ask(process, [1])
            tasks = [ask(process, prompt) for prompt in (words(20_000), [5], [4])]
            while not process.is_busy:
                await asyncio.sleep(0)
            tasks[0].cancel()
            await process.aclose()
            gone, *refused = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(gone, asyncio.CancelledError)
            assert [str(error) for error in refused] == [CLOSED] * 2
            assert all(Failure.of(e).status == 503 for e in refused if isinstance(e, Exception))
            assert process.pid is None
            gc.collect()
            assert not caplog.records

    asyncio.run(main())


def test_a_request_that_no_message_holds_leaves_the_process_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parsing, "parse_request", lambda *_: ParsedRequest([], timeout=2**64))
    frame = parsing.answer({"endpoint": "chat", "limits": LIMITS}, b"{}", ENCODER)
    error = decode_fields(frame[HEADER_SIZE:])["error"]
    assert (error["code"], error["message"]) == (
        "engine_error",
        "the request could not be read; see the server's log",
    )


# --------------------------------------------------------------- the frontend's loop


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


def test_a_million_tokens_are_never_parsed_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_here: list[int] = []

    def parse(endpoint: Endpoint, raw: bytes, *rest: Any) -> ParsedRequest:
        read_here.append(len(raw))
        return parse_request(endpoint, raw, *rest)

    monkeypatch.setattr(server_reading, "parse_request", parse)

    async def main() -> None:
        async with frontend() as (_, http):
            prompts: list[tuple[Any, int | None]] = [(ids(MILLION), MILLION), (words(60_000), None)]
            for prompt, count in (*prompts, (ids(20_000), 20_000), ([5, 6], 2)):
                answer = await http.post("/v1/completions", content=body(prompt=prompt))
                found = answer.json()["usage"]["prompt_tokens"]
                assert found == (count or len(ENCODER.text(words(60_000))))
            bad = await http.post("/v1/completions", content=body(promt=ids(100_000)))
            assert bad.status_code == 400
            assert bad.json()["error"]["param"] == "promt"
            assert "did you mean 'prompt'" in bad.json()["error"]["message"]

    asyncio.run(main())
    assert read_here == [len(body(prompt=[5, 6]))]


def test_a_whole_answer_is_shaped_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    shaped_by: list[threading.Thread] = []
    whole = CompletionFormat.whole

    def noted(form: CompletionFormat) -> Json:
        shaped_by.append(threading.current_thread())
        return whole(form)

    monkeypatch.setattr(CompletionFormat, "whole", noted)

    async def main() -> None:
        async with frontend() as (_, http):
            assert (await http.post("/v1/completions", content=body(prompt=[5]))).is_success

    asyncio.run(main())
    assert shaped_by and threading.main_thread() not in shaped_by


def test_bodies_that_wait_to_be_read_count_for_the_queue() -> None:
    """A body that is read and one that waits take a place each; a hang-up frees one."""

    async def main() -> None:
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

    asyncio.run(main())


def test_the_servers_time_out_counts_while_a_body_is_read_too() -> None:
    async def main() -> None:
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
            quick = await http.post("/v1/completions", content=body(prompt="Hello"))
            assert quick.status_code == 200

    asyncio.run(main())


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
    assert first.count(": heartbeat\n\n") >= 1
    assert "prompt_progress" not in text


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
