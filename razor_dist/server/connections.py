"""Connections that send no request, read no answer, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from razor_dist.config.errors import ConfigError

log = logging.getLogger(__name__)

# Seconds in which a client must take some of what is sent to it.
SEND_SECONDS = 60.0
# File descriptors for everything but connections: libraries, the engine's socket, children.
_OTHER_FILES = 128
# With fewer there would be no room for connections beside those.
_LEAST_FILES = 256
_SECONDS_BETWEEN_WARNINGS = 10.0
# Bytes of a request line and headers: uvicorn's default. Its ``h11_max_incomplete_event_size`` is
# without effect, since `BoundedProtocol` makes the connection itself.
_LARGEST_HEAD_BYTES = 64 * 1024
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)
_HEAD_END = re.compile(rb"\n\r?\n")
_FOLDED = re.compile(rb"\n[ \t]")
_FRAMING = re.compile(rb"\n(content-length|transfer-encoding):", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """h11's connection without the request heads that a proxy may read differently.

    Such a head has both ``Content-Length`` and ``Transfer-Encoding``, or a folded line: a proxy
    before this server might end the request elsewhere, and take the rest for another client's.

    A head is looked at when it is complete, so that one that comes in many small pieces costs no
    more than one that comes at once.
    """

    # The last bytes received, where a blank line may have begun; and whether one has been received
    # that may end a head, or be a part of a body.
    _last = b""
    _has_blank_line = False

    def receive_data(self, data: bytes) -> None:
        super().receive_data(data)
        recent = self._last + data
        self._has_blank_line = self._has_blank_line or _HEAD_END.search(recent) is not None
        self._last = recent[-2:]

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE and self._has_blank_line:
            received, _ = self.trailing_data
            end = _HEAD_END.search(received)
            if end is None:  # it was in the body of the request before
                self._has_blank_line = False
            else:
                _check_head(received[: end.start() + 1])
        return super().next_event()


def _check_head(head: bytes) -> None:
    framing = {name.lower() for name in _FRAMING.findall(head)}
    if len(framing) > 1 or _FOLDED.search(head):
        raise h11.RemoteProtocolError("the head is ambiguous")


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a header time-out and a bound on connections.

    When there are more than ``max_connections``, the one that has been sending its request for the
    longest is closed, idle ones included, so that a client that sends its request at once is
    always served.
    """

    header_timeout = 10.0
    max_connections = 1024
    # Connections of the process, and those that have not sent their request, the oldest first.
    _open: set[BoundedProtocol] = set()  # noqa: RUF012 - shared on purpose
    _sending: dict[BoundedProtocol, None] = {}  # noqa: RUF012 - shared on purpose
    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.conn = StrictConnection(h11.SERVER, _LARGEST_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self not in self._open:
            self.accept(transport, _BUSY)

    def accept(self, transport: asyncio.Transport, refusal: bytes) -> None:
        """Count a connection, which with TLS is not made yet, and begin waiting for its request."""
        self.transport = transport
        self._open.add(self)
        self._sending[self] = None
        self._await_headers()
        if len(self._open) > self.max_connections:
            oldest = next(iter(self._sending))
            if oldest is self:  # all others have sent theirs
                transport.write(refusal)
                transport.close()
            else:
                del self._sending[oldest]  # now: its end is reported later, and others may come
                oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_state()

    def _should_upgrade(self) -> bool:
        """False, without uvicorn's advice in the log: Java's client offers HTTP/2 each time."""
        return False

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; behind an answer that has begun, only hang up."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        begun, _ = self.conn.trailing_data
        self._note_state(idle=not begun)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.forget()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def _note_state(self, *, idle: bool = False) -> None:
        """Begin or end waiting for the rest of a request, of which nothing has come if ``idle``."""
        state = self.conn.their_state
        if state in (h11.IDLE, h11.SEND_BODY):
            self._sending.setdefault(self)
        else:
            self._sending.pop(self, None)
        # A body that is read has a time-out of its own; what comes after the answer has none.
        answered = state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if (state is h11.IDLE and not idle) or answered:
            self._await_headers()
        elif self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self._too_slow)

    def _too_slow(self) -> None:
        log.debug("a connection sent no request within %g s and is closed", self.header_timeout)
        self.transport.abort()

    def forget(self) -> None:
        """End counting and waiting; does nothing the second time."""
        self._open.discard(self)
        self._sending.pop(self, None)
        for timer in (self._header_timer, self._send_timer):
            if timer is not None:
                timer.cancel()


class TlsProtocol(SSLProtocol):
    """TLS of a connection that is counted, and must send its request, from when it is accepted.

    asyncio's own servers tell a protocol of its connection only when the handshake is done.
    """

    def __init__(self, protocol: BoundedProtocol, context: ssl.SSLContext) -> None:
        nobody_waits: Any = None  # which the stubs do not know
        super().__init__(protocol.loop, protocol, context, nobody_waits, server_side=True)
        self._bounded = protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bounded.accept(transport, b"")  # no client could read an answer

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._bounded.forget()


def bounded_protocol(header_timeout: float, max_connections: int) -> type[BoundedProtocol]:
    """Return the protocol with these bounds; RLIMIT_NOFILE may allow fewer connections.

    The soft limit is raised as far as connections need it and the system lets it. Raises
    `ConfigError` if that is too few files to serve at all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if soft < wanted:
        soft = min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < _LEAST_FILES:
        raise ConfigError(
            f"this process may open {files} files and needs at least {_LEAST_FILES}: raise the "
            "limit (ulimit -n, LimitNOFILE= in a unit of systemd)"
        )
    possible = files - _OTHER_FILES
    if possible < max_connections:
        log.warning("max_connections is %d: the process may open few files", possible)
    limits: dict[str, Any] = {
        "header_timeout": header_timeout,
        "max_connections": min(possible, max_connections),
        "_open": set(),
        "_sending": {},
    }
    return type("Protocol", (BoundedProtocol,), limits)


def quiet_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Log once in a while that connections cannot be accepted, not thousands of times a second."""
    last = -_SECONDS_BETWEEN_WARNINGS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if "out of system resource" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - last > _SECONDS_BETWEEN_WARNINGS:
            last = loop.time()
            log.error("connections cannot be accepted: %s", context.get("exception"))

    loop.set_exception_handler(handle)
