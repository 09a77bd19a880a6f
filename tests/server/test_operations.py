"""The embedded model's server under hostile load, ended and replaced while clients use it.

Slow; what is printed (``-s``) is what docs/benchmarks/server.md reports.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.server.hosts import TORCHRUN
from tests.server.process import ServerProcess, free_ports, health, wait_until
from tests.server.raw_connections import HEAD, connections
from tests.server.test_real_ranks import frontend_of, is_healthy

pytestmark = pytest.mark.slow
SERVE = [sys.executable, "-m", "razor_dist", "serve", "--max-num-seqs", "8", "--threads", "1"]
MB = 2**20


class Watch:
    """The worst latency of /health and the front's largest resident memory, while it lasts."""

    def __init__(self, server: ServerProcess, url: str) -> None:
        self._url, self._process = url, psutil.Process(server.process.pid)
        self.before = self._process.memory_info().rss / MB
        self.peak, self.worst, self.failed, self.asked = self.before, 0.0, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self.peak = max(self.peak, self._process.memory_info().rss / MB)
            begun = time.perf_counter()
            try:  # a new connection each time, as a load balancer's
                ok = httpx.get(f"{self._url}/health", timeout=20).status_code == 200
            except httpx.TransportError:
                ok = False
            self.worst = max(self.worst, time.perf_counter() - begun)
            self.failed += not ok
            self.asked += 1

    def __str__(self) -> str:
        return (
            f"RSS {self.before:.0f} -> at most {self.peak:.0f} MiB; /health: {self.asked} asked, "
            f"{self.failed} failed, worst {self.worst:.2f} s"
        )


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ServerProcess, str]]:
    with ServerProcess(*SERVE) as process:
        yield process, process.url(timeout=120)


@pytest.mark.parametrize("files", [256, 4096])
def test_half_sent_headers(files: int) -> None:
    """The second is more than the server's 1,024 connections."""
    count = {256: 400, 4096: 2000}[files]
    limit = f'ulimit -n {files}; exec "$@"'
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with ServerProcess("bash", "-c", limit, "server", *SERVE) as process:
            url = process.url(timeout=120)
            with (
                Watch(process, url) as watch,
                connections(process, count, b"GET / HTTP/1.1\r\nHo") as c,
            ):
                for _ in range(12):
                    for client in c:
                        with suppress(OSError):  # closed by now
                            client.send(b"s")
                    time.sleep(1)
            log = len(process.log)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(f"\n{count} half-sent headers for 12 s, {files} files: {watch}; log {log} bytes")
    assert watch.failed == 0 and log < 100_000


def test_unfinished_bodies(server: tuple[ServerProcess, str]) -> None:
    process, url = server
    begun = HEAD + b"Content-Length: %d\r\n\r\n" % (60 * MB)
    part = b'{"model": "smollm2", "prompt": "' + b" " * (59 * MB)
    statuses: Counter[bytes] = Counter()

    def upload(client: socket.socket) -> None:
        client.settimeout(10)
        answer = b""
        try:
            client.sendall(part)
            answer = client.recv(12)
        except TimeoutError:
            pass  # it waits for the rest
        except OSError:
            answer = b"closed"
        statuses[answer] += 1

    with (
        Watch(process, url) as watch,
        connections(process, 24, begun) as clients,
        ThreadPoolExecutor(24) as pool,
    ):
        list(pool.map(upload, clients))
    print(f"\n24 unfinished bodies of 60 MiB: {dict(statuses)}; {watch}")
    assert watch.failed == 0
    assert watch.peak - watch.before < 600


def test_whole_bodies_at_once(server: tuple[ServerProcess, str]) -> None:
    process, url = server
    body = b'{"model": "smollm2", "prompt": [' + b"5," * (30 * MB) + b"5]}"

    def upload(_: int) -> str:
        headers = {"Content-Type": "application/json"}
        try:
            answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=300)
        except httpx.TransportError as error:
            return type(error).__name__
        return f"{answer.status_code} {answer.json()['error']['code']}"

    with Watch(process, url) as watch, ThreadPoolExecutor(24) as pool:
        statuses = Counter(pool.map(upload, range(24)))
    family = {p.pid: round(p.memory_info().rss / MB) for p in process.family()}
    print(f"\n24 bodies of 60 MiB at once: {dict(statuses)}; {watch}; after it {family}")
    assert watch.failed == 0
    assert watch.peak - watch.before < 600
    assert statuses["400 context_length_exceeded"] >= 1


# ---------------------------------------------------------------------- ends and restarts


def test_sigterm_in_a_stream() -> None:
    with ServerProcess(*SERVE) as process:
        url = process.url(timeout=120)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="smollm2",
            prompt="Once",
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [next(stream) for _ in range(5)]
        begun = time.monotonic()
        process.process.terminate()
        assert wait_until(lambda: health(url) == (503, "draining"), 2)
        told = time.monotonic() - begun
        chunks += list(stream)
        ended = time.monotonic() - begun
        code = process.process.wait(10)
        gone = time.monotonic() - begun
    reason = chunks[-1].choices[0].finish_reason
    print(
        f"\nSIGTERM in a stream: draining after {told:.2f} s, stream ended after {ended:.1f} s "
        f"({len(chunks)} chunks, {reason}), process after {gone:.1f} s with {code}"
    )
    assert (reason, code) == ("length", 0)


def test_sigterm_to_torchruns_server_in_a_stream() -> None:
    """SIGTERM to the server, not to torchrun: ranks and torchrun end by themselves."""
    torchrun = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "launch/serve.py"]
    with ServerProcess(*torchrun, *SERVE[4:]) as process:
        url = process.url(timeout=120)
        body = {"model": "smollm2", "prompt": "Once", "max_tokens": 60, "ignore_eos": True}
        path = f"{url}/v1/completions"
        with httpx.stream("POST", path, json=body | {"stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            frontend_of(process).terminate()
            rest = [line for line in lines if line]
        begun = time.monotonic()
        code = process.process.wait(30)
    print(f"\ntorchrun ended {time.monotonic() - begun:.1f} s after the stream, with {code}")
    assert '"finish_reason":"length"' in rest[-2] and rest[-1] == "data: [DONE]"
    assert code == 0


def test_a_rolling_restart_loses_no_answer() -> None:
    """Two servers, each ended and started again in its turn; clients retry at the other."""
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    over = threading.Event()
    answered: list[int] = []
    tries: Counter[str] = Counter()

    def ask(user: int) -> None:
        while not over.is_set():
            for attempt in range(100):
                url = urls[(user + attempt) % 2]
                body = {"model": "smollm2", "prompt": "Once", "max_tokens": 24, "ignore_eos": True}
                try:
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                except httpx.TransportError as error:
                    tries[type(error).__name__] += 1
                else:
                    tries[str(answer.status_code)] += 1
                    if answer.status_code == 200:
                        answered.append(answer.json()["usage"]["completion_tokens"])
                        break
                    assert answer.status_code == 503, answer.text
                time.sleep(0.3)
            else:
                raise AssertionError("an answer was lost")

    def start(port: int) -> subprocess.Popen[bytes]:
        silent = subprocess.DEVNULL
        command = [*SERVE, "--port", str(port)]
        return subprocess.Popen(
            command, stdout=silent, stderr=silent, cwd=Path(__file__).parents[2]
        )

    servers = [start(port) for port in ports]
    with ThreadPoolExecutor(4) as pool:
        try:
            for url in urls:
                assert wait_until(lambda url=url: is_healthy(url), 120)
            users = [pool.submit(ask, user) for user in range(4)]
            codes = []
            for place, port in enumerate(ports):
                time.sleep(4)
                servers[place].terminate()
                codes.append(servers[place].wait(60))
                servers[place] = start(port)
                assert wait_until(lambda place=place: is_healthy(urls[place]), 120)
            time.sleep(2)
            over.set()
            for user in users:
                user.result(120)
        finally:
            over.set()
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait(60)
    print(f"\nrolling restart: {len(answered)} answers of 24 tokens, none lost; {dict(tries)}")
    assert codes == [0, 0] and set(answered) == {24} and tries["ReadError"] == 0
