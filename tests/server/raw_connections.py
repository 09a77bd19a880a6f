"""Connections to a server that send bytes as they are told, and whether it has closed them."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from tests.server.process import ServerProcess

TEXT = {"model": "smollm2", "prompt": "Hello"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


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
