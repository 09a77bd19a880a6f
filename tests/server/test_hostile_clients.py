"""Clients that send slowly, never end, or come in numbers: others are answered meanwhile."""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from razor_dist.server import connections as connections_module
from razor_dist.server.connections import bounded_protocol
from tests import fake_engine
from tests.server.process import ServerProcess, fake_server, health, wait_until

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
    """How many of the connections the server has not closed."""
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


def test_all_bodies_together_are_bounded(tight: ServerProcess) -> None:
    url = tight.url()
    large = HEAD + b"Content-Length: 2000000\r\n\r\n" + b" " * 1_500_000
    with connections(tight, 2, large):  # 3.0 of 3.1 million bytes
        refused = b""

        def full() -> bool:
            nonlocal refused
            answer = httpx.post(
                f"{url}/v1/completions", json={**TEXT, "prompt": "a" * 500_000}, timeout=20
            )
            refused = answer.content
            return answer.status_code == 429 and answer.headers["retry-after"] == "1"

        assert wait_until(full, 10), refused
        assert b"bodies_full" in refused
        assert health(url) == (200, "ready")
        # A small one still fits.
        assert httpx.post(f"{url}/v1/completions", json=TEXT).status_code == 200
    free = {**TEXT, "prompt": "a" * 500_000}  # which the context does not hold
    read = httpx.post(f"{url}/v1/completions", json=free, timeout=60)
    assert read.json()["error"]["code"] == "context_length_exceeded"


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
            serving = asyncio.create_task(server._serve([listener]))
            _, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(10):
                while not (sent and not server.server_state.tasks):
                    await asyncio.sleep(0.02)
            server.should_exit = True
            writer.close()
            await serving

    asyncio.run(main())
