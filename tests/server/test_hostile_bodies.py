"""Bodies that come slowly, are too large or too many, and what is made of them, are bounded."""

from __future__ import annotations

import asyncio
import json
import select
import time
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from razor_dist.api import tokenize
from razor_dist.api.errors import Failure
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, Limits
from razor_dist.config.errors import RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend import prompts
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from razor_dist.server import bodies
from razor_dist.server.bodies import BodyReader
from tests import fake_engine
from tests.documents import files
from tests.server.process import ServerProcess, health
from tests.server.raw_connections import HEAD, TEXT, connections
from tests.tokenizer import smollm2_tokenizer

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": " a" * 100_000}]
JSON = {"Content-Type": "application/json"}


def test_a_body_that_drips_gets_408(tight: ServerProcess) -> None:
    with connections(tight, 1, HEAD + b"Content-Length: 1000\r\n\r\n{") as [client]:
        begun, answer = time.monotonic(), b""
        while b"body_timeout" not in answer:
            client.sendall(b" ")
            if select.select([client], [], [], 0.2)[0]:
                answer += client.recv(1 << 16)
            assert time.monotonic() - begun < 15
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"x-should-retry: false" in answer
        # Whoever goes on after his answer is not listened to for long.
        with pytest.raises(OSError):
            while time.monotonic() - begun < 30:
                client.sendall(b" ")
                time.sleep(0.1)


def test_a_body_may_look_like_an_ambiguous_head(tight: ServerProcess) -> None:
    body = b'{"model": "smollm2",\n "prompt":\n "a",\ncontent-length: 1\ntransfer-encoding: x'
    sent = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connections(tight, 1, sent) as [client]:
        answer = b""
        while b"not valid JSON" not in answer:
            answer += (piece := client.recv(1 << 16))
            assert piece, f"the server ended the connection after {answer!r}"


def test_a_client_that_vanishes_while_it_uploads_is_no_error(tight: ServerProcess) -> None:
    with connections(tight, 1, HEAD + b"Content-Length: 1000\r\n\r\n{"):
        time.sleep(0.3)
    time.sleep(0.5)
    assert health(tight.url())[0] == 200
    assert "Traceback" not in tight.log


def test_all_bodies_together_are_bounded(tight: ServerProcess) -> None:
    url = tight.url()
    large = HEAD + b"Content-Length: 2000000\r\n\r\n" + b" " * 1_500_000
    with connections(tight, 2, large) as clients:
        # To the last byte of 3 MiB, and no more than is there.
        clients[0].sendall(b" " * 145_728)
        assert health(url) == (200, "ready")
        # A small one still fits.
        assert httpx.post(f"{url}/v1/completions", json=TEXT).status_code == 200
        data = b" " * 500_000
        full = httpx.post(f"{url}/v1/completions", content=data, headers=JSON, timeout=20)
        assert full.json()["error"]["code"] == "bodies_full"
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
    free = {**TEXT, "prompt": "a" * 500_000}  # which the context does not hold
    read = httpx.post(f"{url}/v1/completions", json=free, timeout=60)
    assert read.json()["error"]["code"] == "context_length_exceeded"


async def upload(reader: BodyReader, chunks: list[int], *, ends: bool = False) -> Any:
    """Return the answer to a body of which such chunks come at once, then an end or nothing."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        if left or ends:
            chunk = b" " * left.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(left) or not ends}
        return await asyncio.Event().wait() or {}

    headers = [(b"content-type", b"application/json")]
    try:
        request = Request({"type": "http", "headers": headers}, receive)
        return len(await reader.read_json(request))
    except RequestError as error:
        return error.code


async def test_uploads_that_stop_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PATIENCE_SECONDS", 60.0)
    mb = 2**20
    reader = BodyReader(ServerConfig(max_body_mb=2, max_total_body_mb=3))
    stopped = [
        asyncio.create_task(upload(reader, [mb, mb - 1])),
        asyncio.create_task(upload(reader, [mb, 1])),
    ]
    while reader.used < 3 * mb:
        await asyncio.sleep(0)
    small = [mb // 8, mb // 8]  # has room of its own
    assert await upload(reader, small, ends=True) == mb // 4
    assert await upload(reader, [mb // 4, 1], ends=True) == "bodies_full"
    monkeypatch.setattr(bodies, "PATIENCE_SECONDS", 0.0)
    assert await upload(reader, [mb, mb - 1], ends=True) == 2 * mb - 1
    assert await stopped[0] == "body_timeout"  # and the other may go on
    assert not stopped[1].done() and reader.used == mb + 1
    stopped[1].cancel()


async def test_an_upload_that_stops_is_given_up_however_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "STALL_SECONDS", 0.1)
    reader = BodyReader(ServerConfig())
    async with asyncio.timeout(10):  # it would have 16 minutes more for its size
        assert await upload(reader, [2**26 - 1]) == "body_timeout"
    assert reader.used == 0


def test_tokens_to_count_or_to_read_are_bounded(tight: ServerProcess) -> None:
    most = 4 * fake_engine.MAX_MODEL_LEN
    long = " a" * most
    for path, fields, param in (
        ("/tokenize", {"prompt": long + " b c d"}, "prompt"),
        ("/tokenize", {"prompt": "1 2 " * 200_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/detokenize", {"tokens": [28] * (most + 1)}, "tokens"),
    ):
        refused = httpx.post(f"{tight.url()}{path}", json=fields, timeout=60)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (413, "too_many_tokens")
        assert error["param"] == param and f"at most {most} can be asked for" in error["message"]
    told = httpx.post(f"{tight.url()}/tokenize", json={"prompt": long}, timeout=60).json()
    assert told["count"] == most
    back = httpx.post(f"{tight.url()}/detokenize", json={"tokens": told["tokens"]}, timeout=60)
    assert back.json() == {"prompt": long}
    assert int(back.headers["content-length"]) == len(back.content)


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("completions", {"prompt": " a" * 100_000}, "prompt"),
        ("completions", {"prompt": " a" * 100_000, "return_sources": 1}, "prompt"),
        ("completions", {"prompt": " a" * 100_000, "truncate_prompt_tokens": 9}, "prompt"),
        ("chat", {"messages": MESSAGES}, "messages"),
        ("chat", {"messages": MESSAGES, "return_sources": 1}, "messages"),
        ("responses", {"input": MESSAGES}, "input"),
        ("messages", {"messages": MESSAGES, "max_tokens": 1}, "messages"),
        ("count_tokens", {"messages": MESSAGES}, "messages"),
    ],
)
def test_a_far_too_long_prompt_is_not_tokenised_at_once(
    endpoint: Endpoint, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_ALWAYS_TOKENS", 2000)
    longest = 0

    class Longest(PromptEncoder):
        def _need(self, what: str, param: str) -> Any:
            tokenizer = super()._need(what, param)
            if what != "text prompts":
                return tokenizer

            def tokenised(text: str, **options: Any) -> Any:
                nonlocal longest
                longest = max(longest, len(text))
                return tokenizer(text, **options)

            return tokenised

    body = json.dumps({"model": "smollm2", **fields}).encode()
    limits = Limits("smollm2", 1, PromptLimits(512, 49_152), {})
    with pytest.raises(RequestError, match="maximum context length is 512 tokens") as refused:
        parse_request(endpoint, body, Longest(smollm2_tokenizer()), limits)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
    assert str(refused.value).endswith("; at most 2048 are tokenised at once")
    assert longest == 1 << 16


def test_a_documents_text_counts_as_a_body(tight: ServerProcess) -> None:
    # A million characters: of one byte, or of three, which are more than all bodies may have.
    for word, status in (("word ", 200), ("\u4e16\u754c\u4e16\u754c ", 413)):
        file = files.epub(page=f"<p>{word * 280_000}</p>")
        octets = {"Content-Type": "application/octet-stream"}
        answer = httpx.post(f"{tight.url()}/documents/text", content=file, headers=octets)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "answer_too_large"


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_text_is_rendered_and_tokenised_once(field: str) -> None:
    class Counting(PromptEncoder):
        rendered = tokenised = 0

        def chat_text(self, *given: Any, **template: Any) -> str:
            self.rendered += 1
            return super().chat_text(*given, **template)

        def chat(self, *given: Any, **template: Any) -> list[int]:
            self.rendered += 1
            return super().chat(*given, **template)

        def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
            self.tokenised += len(text)
            return super().text(text, special_tokens=special_tokens)

    encoder = Counting(smollm2_tokenizer())
    content = "wonderful " * 1000
    messages = [{"role": "user", "content": content}]
    given = {"prompt": content, "messages": messages}[field]
    body = tokenize.TokenizeBody.model_validate({field: given})
    plain = PromptEncoder(smollm2_tokenizer())
    chat = field == "messages"
    text = plain.chat_text(messages) if chat else content
    limits = Limits("smollm2", 1, PromptLimits(10_000, 49_152), {})
    assert body.answer(encoder, limits)["tokens"] == (
        plain.chat(messages) if chat else plain.text(content)
    )
    assert (encoder.rendered, encoder.tokenised) == (int(chat), len(text))
    # Of a text that may have too many tokens, no more is counted than is needed to know.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "_PIECE_CHARACTERS", 100)
        encoder.tokenised = 0
        short = PromptLimits(len(text) // 5, 49_152)
        body.answer(encoder, limits._replace(prompt=short))
    assert len(text) < encoder.tokenised < 1.5 * len(text)


async def test_an_answer_takes_the_room_of_a_body_until_it_is_sent() -> None:
    reader = BodyReader(ServerConfig(max_body_mb=1, max_total_body_mb=2))
    size = 9 * 2**20  # with the reserve of small bodies it would fit
    with pytest.raises(RequestError) as full:
        reader.response(b"x" * size)
    # Larger than all of the room: to try again would be in vain.
    assert full.value.code == "answer_too_large" and Failure.of(full.value).status == 413
    assert f"{size} bytes" in str(full.value) and "--max-total-body-mb" in str(full.value)
    first = reader.response(b"x" * 2**20)
    second = reader.response(b"y" * 2**20)
    assert reader.used == 2**21
    with pytest.raises(RequestError) as full:
        reader.response(b"z" * 2**19)
    assert full.value.code == "bodies_full" and Failure.of(full.value).status == 429
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    await second({"type": "http"}, receive, send)
    del second
    assert reader.used == 2**20
    pieces = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert b"".join(pieces) == b"y" * 2**20 and max(map(len, pieces)) == 2**16
    del first
    assert reader.used == 0
