"""Two hosts, as docs/recipes.md has them: an answer, and a cable that is cut and joined again.

What is printed (``-s``) is what docs/benchmarks/server.md reports.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.hosts import Clock, Hosts, two_hosts
from tests.server.process import ServerProcess, wait_until
from tests.server.test_real_ranks import PROMPT, arguments, tokens_alone

__all__ = ["arguments"]  # a fixture
pytestmark = pytest.mark.slow
TIMEOUT = 10.0


class Pair(NamedTuple):
    hosts: Hosts
    torchruns: tuple[ServerProcess, ServerProcess]

    @property
    def url(self) -> str:
        log = "".join(torchrun.log for torchrun in self.torchruns)
        return re.findall(r"^Serving .* on (http://\S+)$", log, re.MULTILINE)[-1]

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body, as a client on the first host gets them; 0 if nobody listens."""

        def ask() -> tuple[int, Any]:
            try:
                answer = httpx.get(self.url + path, timeout=5)
                return answer.status_code, answer.json()
            except httpx.TransportError as error:
                return 0, repr(error)

        return self.hosts.on(0, ask)

    def tokens(self) -> list[int]:
        body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 16}
        url, body = f"{self.url}/v1/completions", body | {"ignore_eos": True}
        answer = self.hosts.on(0, lambda: httpx.post(url, json=body, timeout=60))
        return list(answer.json()["choices"][0]["token_ids"])

    def cut_during(self, prompt: list[int], max_tokens: int) -> tuple[float, list[str]]:
        """Cut the cable at a stream's sixth line; seconds until its end, and its lines."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        body |= {"stream": True, "return_progress": True}

        def read() -> tuple[float, list[str]]:
            lines: list[str] = []
            cut = 0.0
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=90) as got:
                for line in got.iter_lines():
                    lines += [line] if line else []
                    if len(lines) == 6 and not cut:
                        self.hosts.cut()
                        cut = time.monotonic()
            return time.monotonic() - cut, lines

        return self.hosts.on(0, read)


@pytest.fixture(scope="module")
def pair(arguments: list[str]) -> Iterator[Pair]:
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    # Short chunks make a long prefill; both are processes of one machine, which memory would join.
    flags |= {"--max-model-len": "4096", "--chunked-prefill-size": "16", "--window-max": "64"}
    flags |= {"--collective-timeout": f"{TIMEOUT:g}"}
    settings = [word for flag in flags.items() for word in flag] + ["--no-shared-memory"]
    with two_hosts() as hosts:
        if hosts is None:
            pytest.skip("network namespaces cannot be made here")
        clock = Clock()
        with hosts.torchrun(0, *settings) as one, hosts.torchrun(1, *settings) as other:
            one.url(timeout=180)
            clock("serving")
            yield Pair(hosts, (one, other))


def test_two_hosts_answer_as_one(pair: Pair, arguments: list[str]) -> None:
    assert pair.get("/stats")[1]["world_size"] == 2
    assert pair.tokens() == tokens_alone(arguments)
    first, second = pair.hosts.listeners(0), pair.hosts.listeners(1)
    print("listeners:", first, second)
    # HTTP on loopback of the first host alone; the ranks on the cable; torch's stores everywhere.
    address, rest = pair.url.removeprefix("http://"), {*first, *second}
    assert address in first and address.startswith("127.0.0.1:")
    rest = {at.rpartition(":")[0] for at in rest - {address}}
    assert rest == {"*", *pair.hosts.addresses}
    assert all(at.startswith(pair.hosts.addresses[1]) for at in second)


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [(PROMPT, 3800), ((PROMPT * 30)[:4000], 1)], ids=["stream", "prefill"]
)
def test_a_cable_that_is_cut_and_joined(pair: Pair, prompt: list[int], max_tokens: int) -> None:
    before = pair.tokens()
    seconds, lines = pair.cut_during(prompt, max_tokens)
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    print(f"client told after {seconds:.1f} s: {error['message']}; {pair.get('/health')}")
    assert error["code"] == "engine_error" and lines[-1] == "data: [DONE]"
    # The collectives' patience; nobody may wait for long beyond it.
    assert TIMEOUT / 2 < seconds < 3 * TIMEOUT
    assert pair.get("/health")[0] in (503, 0)
    time.sleep(15)  # torchrun gives up on both hosts, and is started again
    still = pair.get("/health")
    assert still[0] in (503, 0)
    pair.hosts.join()
    clock = Clock()
    assert wait_until(lambda: pair.get("/health")[0] == 200, 180)
    clock("serving again; it was", still)
    assert pair.tokens() == before
