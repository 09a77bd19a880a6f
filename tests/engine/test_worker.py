"""Rank 0's end of the socket: what is told to the front, and what rank 0 has to tell itself."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from razor_dist.engine.protocol import (
    HEADER_SIZE,
    body_length,
    decode,
    encode,
    exception_of,
)
from razor_dist.engine.ranks import FrontUnreachableError
from razor_dist.engine.worker import FrontClosed, Link
from razor_dist.errors import ConfigError, EngineError


@contextlib.contextmanager
def linked(folder: Path) -> Iterator[tuple[Link, socket.socket]]:
    """A link and the front's end of it."""
    path = str(folder / "engine")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        link = Link(path)
        front, _ = listener.accept()
        with front, link._socket:
            yield link, front


def test_a_front_that_does_not_listen(tmp_path: Path) -> None:
    with pytest.raises(FrontUnreachableError, match=r"does not listen on .*: No such file"):
        Link(str(tmp_path / "engine"))
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "engine"))
    with pytest.raises(FrontUnreachableError, match="Connection refused"):
        Link(str(tmp_path / "engine"))


def test_the_front_gets_to_read_why_rank_0_ends(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, front):
        told = []

        def read() -> None:
            header = front.recv(HEADER_SIZE, socket.MSG_WAITALL)
            told.append(decode(front.recv(body_length(header), socket.MSG_WAITALL)))
            front.close()

        reader = threading.Thread(target=read)
        reader.start()
        link.send_failure(ConfigError("world_size must be at least 1"))
        reader.join()
        [message] = told
        assert (message["t"], message["id"]) == ("error", "")
        assert message["message"] == "world_size must be at least 1"
        assert isinstance(exception_of(message), EngineError)


def test_what_a_lost_front_cannot_tell_is_raised(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, front):
        front.close()
        with pytest.raises(FrontClosed):
            link.receive(1.0)
        with pytest.raises(FrontUnreachableError, match=r"at least 1 \(the front has gone\)"):
            link.send_failure(ConfigError("world_size must be at least 1"))


def test_a_front_that_ends_for_its_own_reason_tells_it_itself(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, front):
        link.send({"t": "alive"})  # unread by the front, which resets the connection
        front.sendall(encode({"t": "shutdown"}))
        front.close()
        link.send_failure(ConfigError("world_size must be at least 1"))
