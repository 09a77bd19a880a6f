"""Clients that send slowly, never end, or come in numbers: others are answered meanwhile."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any
from unittest.mock import Mock

import h11
import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from razor_dist.config.errors import ConfigError
from razor_dist.server import connections as connections_module
from razor_dist.server.bodies import in_pieces
from razor_dist.server.connections import bounded_protocol
from tests import fake_engine
from tests.server.process import ServerProcess, fake_server, health, wait_until
from tests.server.raw_connections import HEAD, TEXT, connections, is_closed, open_ones


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


@pytest.mark.long
def test_an_idle_connection_stays_and_half_a_request_on_it_does_not(tight: ServerProcess) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connections(tight, 1, asked) as [client]:
        for rest in (asked, asked[:20]):
            assert client.recv(12) == b"HTTP/1.1 200"
            time.sleep(5.5)  # longer than --header-timeout, and than uvicorn's own 5 s
            assert client.recv(1 << 16).endswith(b"}") and not is_closed(client)
            client.sendall(rest)
        assert wait_until(lambda: is_closed(client), 4)


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


def test_an_offer_of_another_protocol_is_passed_over(tight: ServerProcess) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    asked = HEAD + offer + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    with connections(tight, 1, asked) as [client]:
        client.settimeout(20)
        assert client.recv(12) == b"HTTP/1.1 200"
    assert "upgrade" not in tight.log


def test_a_wrong_chunk_behind_an_answer_ends_the_connection(tight: ServerProcess) -> None:
    asked = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connections(tight, 1, asked) as [client]:
        client.settimeout(20)
        assert client.recv(12) == b"HTTP/1.1 405"
        client.sendall(b"wrong\r\n")
        while client.recv(1 << 16):
            pass
    assert "Fatal error" not in tight.log


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


@pytest.mark.anyio
async def test_a_client_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "SEND_SECONDS", 0.2)
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

    async with answering(endless) as (server, _), asyncio.timeout(10):
        while not (sent and not server.server_state.tasks):
            await asyncio.sleep(0.02)


@pytest.mark.anyio
async def test_a_client_that_takes_a_long_answer_slowly_gets_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections_module, "SEND_SECONDS", 0.5)
    answer, got = b"x" * 2**21, b""
    loop = asyncio.get_running_loop()
    async with answering(in_pieces(answer)) as (_, client), asyncio.timeout(20):
        while len(got) < len(answer) and (some := await loop.sock_recv(client, 2**15)):
            got += some
            await asyncio.sleep(0.02)
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(answer) in head.lower()
    assert answer.startswith(body) and len(got) >= len(answer)


@asynccontextmanager
async def answering(app: Any) -> AsyncIterator[tuple[uvicorn.Server, socket.socket]]:
    """A server of an application, and a client that has asked it; few bytes are on their way."""
    config = uvicorn.Config(app, http=bounded_protocol(10.0, 8), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        client.setblocking(False)
        serving = asyncio.create_task(server.serve([listener]))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        yield server, client
        server.should_exit = True
        client.close()
        await serving
