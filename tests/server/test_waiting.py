"""Requests that wait, are late, or are given up, and an engine that is busy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import openai
import pytest
from openai._streaming import SSEDecoder

from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Limits, ParsedRequest
from razor_dist.api.responses_format import FORMATS
from razor_dist.config.errors import RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.answers import Choice, ChoiceEvent
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from razor_dist.protocol.messages import EngineInfo, Progress, Ready, encode
from razor_dist.server import sse
from razor_dist.server.app import build_app
from razor_dist.server.parsing_process import ParsingProcess
from razor_dist.server.service import Service
from tests import fake_engine
from tests.server.process import wait_until
from tests.server.test_api import HELLO, TOKENIZER, answer_to, events


def counts(url: str) -> tuple[int, int]:
    """Requests that run, and those that were aborted."""
    stats = httpx.get(f"{url}/stats").json()
    return stats["running"], stats["bytes_sent"]["aborted"]


def test_progress_of_a_long_prompt_is_told_on_request(url: str) -> None:
    prompt = [fake_engine.SLOW_PREFILL, *range(20, 27)]
    lines = events(url, "/v1/completions", {"prompt": prompt, "return_progress": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    # As llama.cpp's server tells it, whose first one says that nothing is read yet.
    assert [p["processed"] for p in progress] == [0, 2, 4, 6, 8]
    assert all(p["total"] == 8 and p["cache"] == 0 for p in progress)
    assert progress[-1]["time_ms"] == 1200
    silent = events(url, "/v1/completions", {"prompt": prompt})
    assert not any("prompt_progress" in line for line in silent)


def test_the_official_client_survives_progress(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": HELLO}
    more = {"return_progress": True}
    text, _ = answer_to(PromptEncoder(TOKENIZER).chat(HELLO))
    chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=more))
    progress = [chunk.model_extra["prompt_progress"] for chunk in chunks if chunk.model_extra]
    total = len(PromptEncoder(TOKENIZER).chat(HELLO))
    assert [(p["processed"], p["total"]) for p in progress] == [(0, total), (total, total)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    with client.chat.completions.stream(**asked, extra_body=more) as stream:
        assert stream.get_final_completion().choices[0].message.content == text
    prompt = TOKENIZER.encode(" one two three")
    pieces = client.completions.create(model="smollm2", prompt=prompt, stream=True, extra_body=more)
    assert "".join(piece.choices[0].text for piece in pieces) == answer_to(prompt)[0]


def lines_as_json(frames: list[str]) -> list[str]:
    """As sglang.bench_serving reads: each line that is not blank is an event."""
    lines = [line.strip() for line in "".join(frames).split("\n")]
    return [line.removeprefix("data: ") for line in lines if line]


def stripped_reads(frames: list[str]) -> list[str]:
    """As ``vllm bench serve``: reads are stripped, and then cut at empty lines or at whole JSON."""
    found, rest = list[str](), ""
    for frame in frames:
        rest += frame.strip()
        *events, rest = rest.split("\n\n")
        if rest.startswith("data: "):  # of these frames, none is a part of an event
            events, rest = [*events, rest], ""
        found += [e.strip().removeprefix("data: ") for e in events if e and not e.startswith(":")]
    return found


def cut_at_empty_lines(frames: list[str]) -> list[str]:
    """As simple clients: what begins otherwise between two empty lines is left out."""
    events = "".join(frames).split("\n\n")
    return [event.removeprefix("data: ") for event in events if event.startswith("data: ")]


def by_openais_client(frames: list[str]) -> list[str]:
    return [sse.data for sse in SSEDecoder().iter_bytes(frame.encode() for frame in frames)]


@pytest.mark.parametrize("joined", [1, 2, 3, 30])  # frames in one read
@pytest.mark.parametrize(
    "reader", [lines_as_json, stripped_reads, cut_at_empty_lines, by_openais_client]
)
def test_clients_of_all_kinds_read_through_heartbeats(reader: Any, joined: int) -> None:
    pieces = [TextPiece(5, word) for word in "abcd"] + [TextPiece(5, "", None, "stop")]
    choice = Choice(np.array([1]), 0, pieces)
    form = FORMATS["chat"](ParsedRequest([]), "m", [choice], None)

    async def streamed() -> list[str]:
        async def events() -> AsyncIterator[ChoiceEvent | None]:
            for silence, piece in zip((3, 0, 1, 2, 1), pieces, strict=True):
                for _ in range(silence):
                    yield None
                yield ChoiceEvent(0, piece)

        return [line async for line in sse.stream(events(), form, include_usage=True)]

    frames = asyncio.run(streamed())
    reads = ["".join(frames[at : at + joined]) for at in range(0, len(frames), joined)]
    *chunks, usage, done = reader(reads)
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "abcd"
    assert json.loads(usage)["usage"]["completion_tokens"] == 5 and done == "[DONE]"


@pytest.mark.parametrize("shows_nothing", [False, True])
@pytest.mark.anyio
async def test_heartbeats_of_a_long_silence_are_rare(shows_nothing: bool) -> None:
    """go-openai ends a stream after 300 lines without data: not in 45 minutes."""
    choice = Choice(np.array([1]), 0, [TextPiece(5, "Hi"), TextPiece(5, "", None, "stop")])
    form = FORMATS["completions"](ParsedRequest([]), "m", [choice], TOKENIZER)
    now, times = 0.0, list[float]()

    async def events() -> AsyncIterator[ChoiceEvent | None]:
        nonlocal now
        for _ in range(900):
            now += 3
            yield ChoiceEvent(0, TextPiece(5, "")) if shows_nothing else None
        yield ChoiceEvent(0, choice.pieces[0])
        now += 3
        yield None
        yield ChoiceEvent(0, choice.pieces[1])

    with mock.patch.object(asyncio.get_running_loop(), "time", lambda: now):
        async for line in sse.stream(events(), form, include_usage=False, heartbeat=3):
            if line == form.heartbeat:
                times.append(now)
    assert times == [*range(3, 63, 3), *range(84, 2701, 24), 2703]
    assert len(times) * form.heartbeat.count("\n") < 300


@pytest.mark.parametrize("endpoint", ["chat", "responses", "messages"])
@pytest.mark.parametrize("has_progress", [False, True])
def test_a_chats_stream_opens_with_its_first_event(endpoint: Any, has_progress: bool) -> None:
    """Others open at once, as OpenAI's and Anthropic's do."""
    choice = Choice(np.array([1, 2]), 0, [TextPiece(5, "Hi"), TextPiece(5, "", None, "stop")])
    form = FORMATS[endpoint](ParsedRequest([], described={}), "m", [choice], None)

    async def events() -> AsyncIterator[ChoiceEvent | None]:
        yield None
        yield None
        if has_progress:
            yield ChoiceEvent(0, Progress("a", 0, 2, 0, 0, 0.0))
        for piece in choice.pieces:
            yield ChoiceEvent(0, piece)

    async def streamed() -> list[str]:
        return [line async for line in sse.stream(events(), form, include_usage=False)]

    lines = asyncio.run(streamed())
    assert lines.count(form.heartbeat) == 2
    assert (lines[:2] == [form.heartbeat] * 2) is (endpoint == "chat")
    if endpoint == "chat":
        role = {"role": "assistant", "content": ""}
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[2:-1]]
        assert deltas == [role, *[{}] * has_progress, {"content": "Hi"}, {}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_in_mid_prefill_is_forgotten(url: str, stream: bool) -> None:
    assert wait_until(lambda: counts(url)[0] == 0, 20)
    _, aborted = counts(url)
    body = {"model": "smollm2", "prompt": [fake_engine.HANG], "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.5)
    assert wait_until(lambda: counts(url) == (0, aborted + 1), 20), counts(url)


def test_a_full_queue_refuses_with_429(url: str) -> None:
    body = {"model": "smollm2", "prompt": [[fake_engine.HANG]] * 4, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10):

        def refused() -> httpx.Response:
            full = httpx.post(f"{url}/v1/completions", json={**body, "prompt": "Hello"})
            assert full.status_code == 429
            return full

        # The engine's estimate, for one of the four: it comes with the next heartbeat.
        assert wait_until(lambda: refused().headers["retry-after"] == "8", 20)
        full = refused()
        assert full.json()["error"]["code"] == "queue_full"
        assert "at most 4 may be" in full.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 200
    free = {"model": "smollm2", "prompt": "Hello"}
    assert wait_until(lambda: httpx.post(f"{url}/v1/completions", json=free).status_code == 200, 20)


def test_prompts_for_which_the_queue_has_no_room_are_not_tokenised() -> None:
    class Untouched(PromptEncoder):
        def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
            raise AssertionError("tokenised")

    limits = Limits("smollm2", 4, PromptLimits(100, 100), {}, room=1)
    body = {"model": "smollm2", "prompt": ["a", "b"]}
    with pytest.raises(RequestError, match="the queue has room for 1 prompts now") as refused:
        parse_request("completions", body, Untouched(None), limits)
    assert refused.value.code == "queue_full"


def test_a_request_that_is_late_ends_and_frees_the_engine(url: str) -> None:
    assert wait_until(lambda: counts(url)[0] == 0, 20)
    _, aborted = counts(url)
    body = {"model": "smollm2", "prompt": [fake_engine.HANG], "timeout": 0.7}
    for stream in (False, True):  # before a stream has begun, it is an HTTP error as well
        late = httpx.post(f"{url}/v1/completions", json=body | {"stream": stream}, timeout=30)
        assert (late.status_code, late.headers["x-should-retry"]) == (408, "false")
        assert late.json()["error"] == {
            "message": "the request was not answered within 0.7 s",
            "type": "timeout_error",
            "param": None,
            "code": "timeout",
        }
    eager = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
    with pytest.raises(openai.APIStatusError, match="not answered within") as error:
        eager.completions.create(**body | {"timeout": None}, extra_body={"timeout": 0.7})
    assert error.value.status_code == 408
    assert wait_until(lambda: counts(url) == (0, aborted + 3), 20), counts(url)  # asked once each
    endless = {"prompt": [fake_engine.ENDLESS, 20], "max_tokens": 400, "timeout": 3}
    *texts, failure, done = events(url, "/v1/completions", endless)
    assert len(texts) > 1 and all("choices" in text for text in texts)
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "timeout"
    assert done == "data: [DONE]"
    assert wait_until(lambda: counts(url) == (0, aborted + 4), 20), counts(url)


def test_counters_that_take_too_long_get_503(tmp_path: Path) -> None:
    """Rank 0 is in the midst of a chunk: it lives, and answers nothing."""
    service = Service(ServerConfig(), EngineClient(tmp_path / "engine"))
    process = ParsingProcess(tmp_path, trust_remote_code=False)
    service.load(PromptEncoder(None), process, {})

    async def main() -> httpx.Response:
        await service.client.rank0.listen()
        _, writer = await asyncio.open_unix_connection(service.client.rank0.path)
        writer.write(encode(Ready(EngineInfo(8, 9))))
        await service.client.ready()
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.get("/stats")
            assert (await http.get("/health")).json()["status"] == "ready"
        writer.close()
        await service.client.close()
        return answer

    service.stats_patience = 0.1
    answer = asyncio.run(main())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("engine_busy", "service_unavailable_error")
    assert "did not answer within" in error["message"]
