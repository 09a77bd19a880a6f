"""Servers as a user starts them, and questions asked over HTTP."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx
import psutil

from razor_dist.config.errors import RazorError
from razor_dist.frontend.guard import guarded

SERVING = r"^Serving .* on (http://\S+)$"  # the line that tells an address
# From a server's SIGTERM to its SIGKILL.
_STOP_SECONDS = 60.0
# Until a server has an address, and until its ranks are ready.
_START_SECONDS = 600.0
# Of a server that reads a prompt, which may be a million tokens long.
_SILENCE = 7200.0


class ServingError(RazorError):
    """The server cannot be used; the message says why."""


class ServerProcess:
    """A server on a free port, ended with the ``with`` block.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments, a free port among them.
    stderr : int or None
        As for `subprocess.Popen`; by default `log` has standard error too.
    settings
        Further arguments of `subprocess.Popen`.
    """

    def __init__(
        self, *command: str, stderr: int | None = subprocess.STDOUT, **settings: Any
    ) -> None:
        self.ended_late = False  # by SIGKILL, since it did not end in time
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the object
        self.process = subprocess.Popen(command, stdout=self._log, stderr=stderr, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.ended_late = True
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """End the server and its ranks at once, by SIGKILL."""
        for process in reversed(self.family()):
            process.kill()

    @property
    def log(self) -> str:
        """All that the process and its children have printed."""
        # Without a seek: the position is also the children's, who would write over the start.
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def url(self, line: str = SERVING, timeout: float = _START_SECONDS) -> str:
        """The server's address, once it has printed the line that tells it; of several the last."""

        def found() -> list[str]:
            if self.process.poll() is not None:
                raise ServingError(
                    f"the server ended with code {self.process.returncode}\n{self.log}".strip()
                )
            return re.findall(line, self.log, re.MULTILINE)

        if not wait_until(found, timeout):
            raise ServingError(f"the server has no address after {timeout:.0f} s")
        return found()[-1]

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def serve(
    *flags: str, stderr: int | None = subprocess.STDOUT, env: Mapping[str, str] | None = None
) -> ServerProcess:
    """Start ``razor-dist serve``, in a session of its own, which Ctrl-C does not reach."""
    command = guarded("razor_dist", "serve", "--port=0", "--log-level=warning", *flags)
    return ServerProcess(
        *command, stderr=stderr, env=env, stdin=subprocess.DEVNULL, start_new_session=True
    )


def wait_until(condition: Callable[[], Any], timeout: float) -> bool:
    """Poll ``condition``; return whether it came true within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def connect(url: str) -> Iterator[httpx.Client]:
    """Yield a client of a server, once its ranks are ready."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as client:
        if not wait_until(lambda: client.get("/health").status_code == 200, _START_SECONDS):
            raise ServingError("the server does not become healthy")
        yield client


@dataclass(frozen=True)
class Answer:
    """An answer over HTTP: tokens as the server counts them, seconds since it was asked."""

    text: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    completion_tokens: int
    first_token_seconds: float
    total_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode speed; the first token belongs to the prompt."""
        seconds = self.total_seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / seconds if seconds > 0 else 0.0


def ask(
    client: httpx.Client,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int,
    *,
    on_text: Callable[[str], None] = lambda piece: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **more: Any,
) -> Answer:
    """Ask for a greedy answer, which may be empty; raise `ServingError` if the server fails.

    ``on_text`` takes each piece of it as it comes, ``on_progress`` the tokens of the prompt that
    have been read, and all of them. ``more`` are fields of the request.
    """
    body = {
        **more,
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    began, first = time.perf_counter(), 0.0
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body, timeout=_SILENCE) as response:
        if response.status_code != 200:
            raise ServingError(f"the server answered {response.status_code}: {response.read()!r}")
        for event in events(response.iter_lines()):
            if "error" in event:
                raise ServingError(f"the server failed: {event['error']['message']}")
            usage = event.get("usage") or usage
            if read := event.get("prompt_progress"):
                on_progress(read["processed"], read["total"])
            for piece in filter(None, (c["delta"].get("content") for c in event["choices"])):
                first = first or time.perf_counter() - began
                pieces.append(piece)
                on_text(piece)
    total = time.perf_counter() - began
    return Answer(
        "".join(pieces),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        first or total,
        total,
    )


def events(lines: Iterable[str]) -> Iterator[Any]:
    """Yield the data of server-sent events up to ``[DONE]``; comments are skipped."""
    for line in itertools.takewhile(lambda line: line != "data: [DONE]", lines):
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
