"""Clients that send slowly, never end, or come in numbers: others are answered meanwhile."""

from __future__ import annotations

import asyncio
import re
import resource
import select
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock

import h11
import httpx
import pytest
import uvicorn
from starlette.requests import Request
from uvicorn.server import ServerState

from razor_dist.api import tokenize
from razor_dist.api.errors import Failure
from razor_dist.api.request import Limits
from razor_dist.config.errors import ConfigError, RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.server import bodies
from razor_dist.server import connections as connections_module
from razor_dist.server.bodies import BodyReader
from razor_dist.server.connections import bounded_protocol
from tests import fake_engine
from tests.documents import files
from tests.server.process import ServerProcess, fake_server, health, wait_until
from tests.tokenizer import smollm2_tokenizer

JSON = {"Content-Type": "application/json"}
TEXT = {"model": "smollm2", "prompt": "Hello"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def tight() -> Iterator[ServerProcess]:
    """A server that soon loses patience, with room for 12 connections and 3 MiB of bodies."""
    with fake_server(
        *("--header-timeout", "1.5", "--body-timeout", "2", "--max-connections", "12"),
        *("--max-body-mb", "2", "--max-total-body-mb", "3"),
    ) as server:
        server.url()
        yield server


@contextmanager
def connections(server: ServerProcess, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    address = ("127.0.0.1", httpx.URL(server.url()).port or 0)
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection(address)))
            opened[-1].sendall(sent)
        yield opened


def open_ones(sockets: list[socket.socket]) -> int:
    """Count the connections that the server has not closed."""
    return sum(not is_closed(s) for s in sockets)


def is_closed(client: socket.socket) -> bool:
    if not select.select([client], [], [], 0)[0]:
        return False
    try:
        return client.recv(1 << 16, socket.MSG_PEEK) == b""
    except ConnectionResetError:
        return True


def test_half_sent_headers_hold_up_nobody(tight: ServerProcess) -> None:
    url = tight.url()
    with connections(tight, 60, b"GET /health HTTP/1.1\r\nHost: loc") as clients:
        # More than there is room for: the oldest make way.
        assert health(url) == (200, "ready")
        assert wait_until(lambda: open_ones(clients) <= 12, 5)
        assert httpx.post(f"{url}/v1/completions", json=TEXT).status_code == 200
        for client in clients:  # a byte now and then is no request
            if not is_closed(client):
                client.sendall(b"a")
        assert wait_until(lambda: open_ones(clients) == 0, 10)
    assert len(tight.log) < 20_000


def test_an_idle_connection_stays_and_half_a_request_on_it_does_not(tight: ServerProcess) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connections(tight, 1, asked) as [client]:
        for rest in (asked, asked[:20]):
            assert client.recv(12) == b"HTTP/1.1 200"
            time.sleep(5.5)  # longer than --header-timeout, and than uvicorn's own 5 s
            assert client.recv(1 << 16).endswith(b"}") and not is_closed(client)
            client.sendall(rest)
        assert wait_until(lambda: is_closed(client), 4)


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


CHUNKED = b"24\r\n" + b'{"model": "smollm2", "prompt": "Hi"}' + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n",
        b"Transfer-Encoding: chunked\r\nX-Other: a\n\tb\r\n",
    ],
)
def test_heads_that_others_may_read_differently_are_refused(
    tight: ServerProcess, framing: bytes
) -> None:
    plain = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    with connections(tight, 1, plain + HEAD + framing + b"\r\n" + CHUNKED) as [client]:
        client.settimeout(20)
        answer = b""
        while more := client.recv(1 << 16):
            answer += more
    # The plain one is answered, and the connection ends with the other one's refusal.
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1 400") == 1 and answer.count(b"HTTP/1.1") == 2


@pytest.mark.parametrize("size", [1, 5])
def test_a_head_in_small_packets_costs_no_more_than_its_bytes(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    looked_at = 0

    def counting(pattern: re.Pattern[bytes], method: str) -> Any:
        def look(data: bytes) -> Any:
            nonlocal looked_at
            looked_at += len(data)
            return getattr(pattern, method)(data)

        return Mock(**{f"{method}.side_effect": look})

    class Counting(connections_module.StrictConnection):
        @property
        def trailing_data(self) -> tuple[bytes, bool]:
            nonlocal looked_at
            looked_at += len(super().trailing_data[0])
            return super().trailing_data

    for name, method in (("_HEAD_END", "search"), ("_FOLDED", "search"), ("_FRAMING", "findall")):
        pattern = getattr(connections_module, name)
        monkeypatch.setattr(connections_module, name, counting(pattern, method))
    connection = Counting(h11.SERVER, 1 << 16)
    head = HEAD + b"X-Long: " + b"a" * 10_000
    for end in (b"\r\n\r\n", b"\r\n\r\n", b"\r\n folded\r\n\r\n"):
        sent = head + end
        for begin in range(0, len(sent) - 1, size):
            connection.receive_data(sent[begin : min(begin + size, len(sent) - 1)])
            assert connection.next_event() is h11.NEED_DATA
        connection.receive_data(sent[-1:])
        if b"folded" in end:
            with pytest.raises(h11.RemoteProtocolError, match="ambiguous"):
                connection.next_event()
        else:
            assert isinstance(connection.next_event(), h11.Request)
            assert isinstance(connection.next_event(), h11.EndOfMessage)
            connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
        # Each byte with the two before it, and the whole head once by each of four.
        assert looked_at <= 8 * len(sent)
        looked_at = 0


def test_a_body_may_look_like_an_ambiguous_head(tight: ServerProcess) -> None:
    body = b'{"model": "smollm2",\n "prompt":\n "a",\ncontent-length: 1\ntransfer-encoding: x'
    sent = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connections(tight, 1, sent) as [client]:
        assert b"not valid JSON" in client.recv(1 << 16) + client.recv(1 << 16)


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


def test_uploads_that_stop_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PATIENCE", 0.2)
    mb = 2**20

    async def main() -> None:
        reader = BodyReader(ServerConfig(max_body_mb=2, max_total_body_mb=3))
        stopped = [
            asyncio.create_task(upload(reader, [mb, mb - 1])),
            asyncio.create_task(upload(reader, [mb, 1])),
        ]
        await asyncio.sleep(0.05)
        assert reader.used == 3 * mb
        small = [mb // 8, mb // 8]  # has room of its own
        assert await upload(reader, small, ends=True) == mb // 4
        assert await upload(reader, [mb // 4, 1], ends=True) == "bodies_full"
        await asyncio.sleep(0.3)
        assert await upload(reader, [mb, mb - 1], ends=True) == 2 * mb - 1
        assert await stopped[0] == "body_timeout"  # and the other may go on
        assert not stopped[1].done() and reader.used == mb + 1
        stopped[1].cancel()

    asyncio.run(main())


def test_an_upload_that_stops_is_given_up_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "STALL_TIMEOUT", 0.1)

    async def main() -> None:
        reader = BodyReader(ServerConfig())
        async with asyncio.timeout(10):  # it would have 16 minutes more for its size
            assert await upload(reader, [2**26 - 1]) == "body_timeout"
        assert reader.used == 0

    asyncio.run(main())


def test_with_tls_connections_count_before_their_handshake(certificate: tuple[str, str]) -> None:
    files = ("--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1])
    limits = ("--header-timeout", "1.5", "--max-connections", "12")
    context = ssl.create_default_context(cafile=certificate[0])
    with fake_server(*files, *limits) as server:
        url = server.url(r"^Serving .* on (https://\S+)$")
        address = ("127.0.0.1", httpx.URL(url).port or 0)
        with ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
            assert wait_until(lambda: open_ones(clients) <= 12, 10)
            with httpx.Client(verify=context) as http:
                assert http.get(f"{url}/health").status_code == 200
                assert http.post(f"{url}/v1/completions", json=TEXT).status_code == 200
            assert wait_until(lambda: open_ones(clients) == 0, 10)
        assert "Traceback" not in server.log


def test_connections_of_which_all_are_busy_refuse_one_more(tight: ServerProcess) -> None:
    body = b'{"model": "smollm2", "prompt": [%d], "stream": true}' % fake_engine.HANG
    asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connections(tight, 12, asked) as clients:
        for client in clients:
            assert client.recv(12) == b"HTTP/1.1 200"
        with connections(tight, 1, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as [more]:
            answer = more.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in answer
        assert open_ones(clients) == 12
    assert wait_until(lambda: health(tight.url()) == (200, "ready"), 10)


def test_too_few_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: None)
    with pytest.raises(ConfigError, match="may open 64 files and needs at least 256"):
        bounded_protocol(10.0, 1024)


@pytest.mark.long
def test_a_flood_leaves_descriptors_for_others() -> None:
    serve = [sys.executable, "-m", "tests.server.serve_on", "tests.fake_engine"]
    limited = ["bash", "-c", 'ulimit -n 256; exec "$@"', "serve", *serve, "--world-size", "2"]
    with ServerProcess(*limited) as server:
        url = server.url()
        for _ in range(10):
            with connections(server, 400, b"GET /health HTTP/1.1\r\nHost: loc"):
                assert health(url) == (200, "ready")
        assert httpx.post(f"{url}/v1/completions", json=TEXT).status_code == 200
        assert "Too many open files" not in server.log


def test_fewer_files_than_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(300, 400)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    # As many as the hard limit leaves beside 128 other files.
    assert bounded_protocol(10.0, 1024).max_connections == 272
    assert limits[-1] == (400, 400)
    assert bounded_protocol(10.0, 50).max_connections == 50


def test_many_that_come_at_once_make_way_one_by_one() -> None:
    async def main() -> list[bool]:
        config = uvicorn.Config(app=Mock(), http=bounded_protocol(10.0, 2), log_config=None)
        config.load()
        state, transports = ServerState(), []
        for _ in range(5):
            transports.append(Mock())
            config.http_protocol_class(config, state, {}).connection_made(transports[-1])  # type: ignore[operator]
        return [transport.abort.called for transport in transports]

    assert asyncio.run(main()) == [True, True, True, False, False]


def test_a_client_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "SEND_TIMEOUT", 0.2)
    sent = 0

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive_until_gone(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b" " * 2**16, "more_body": True})
            sent += 1
            await asyncio.sleep(0)

    async def receive_until_gone(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def main() -> None:
        protocol = bounded_protocol(10.0, 8)
        config = uvicorn.Config(endless, http=protocol, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            _, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(10):
                while not (sent and not server.server_state.tasks):
                    await asyncio.sleep(0.02)
            server.should_exit = True
            writer.close()
            await serving

    asyncio.run(main())


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
    limits = Limits("smollm2", 1, 10_000, 49_152, {})
    assert body.answer(encoder, limits)["tokens"] == (
        plain.chat(messages) if chat else plain.text(content)
    )
    assert (encoder.rendered, encoder.tokenised) == (int(chat), len(text))
    # Of a text that may have too many tokens, no more is counted than is needed to know.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "_PIECE", 100)
        encoder.tokenised = 0
        body.answer(encoder, limits._replace(max_model_len=len(text) // 5))
    assert len(text) < encoder.tokenised < 1.5 * len(text)


def test_an_answer_takes_the_room_of_a_body_until_it_is_sent() -> None:
    async def main() -> None:
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

    asyncio.run(main())
