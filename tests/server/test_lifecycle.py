"""Loading, failing, restarting and ending: nothing hangs and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import fake_engine
from tests.server.process import ServerProcess, alive, fake_server, folder, health, wait_until

LISTENING = r"listening on (http://[^,\s]+)"


def complete(url: str, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": prompt, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)


def serving(model: str) -> ServerProcess:
    return fake_server("--model", model, "--served-model-name", "smollm2")


@contextmanager
def held_server(parent: Path, *, held: bool = False) -> Iterator[tuple[ServerProcess, Path]]:
    """A server, and a file during whose life no rank of it starts; it is there if ``held``."""
    model = folder(parent, "held")
    hold = Path(model, fake_engine.WAIT)
    if held:
        hold.touch()
    with serving(model) as server:
        yield server, hold


def test_health_tells_of_loading_and_requests_get_503(tmp_path: Path) -> None:
    with held_server(tmp_path, held=True) as (server, hold):
        url = server.url(LISTENING)
        assert health(url) == (503, "loading")
        early = complete(url, [1, 2])
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "engine_loading"
        assert early.headers["retry-after"] == "1"
        hold.unlink()
        server.url()
        assert health(url) == (200, "ready")


def test_a_folder_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    model = folder(tmp_path, "ids-only")
    with serving(model) as server:
        url = server.url()
        answer = complete(url, [5, 6, 7], max_tokens=2, logprobs=1).json()["choices"][0]
        assert answer["token_ids"] == [7, 6]
        assert answer["text"] == ""
        assert answer["logprobs"]["tokens"] == ["token_id:7", "token_id:6"]
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"model": "smollm2", "prompt": [5, 6, 7], "stream": True},
        ) as stream:
            chunks = [json.loads(s[6:]) for s in stream.iter_lines() if s.startswith("data: {")]
        assert [c["choices"][0]["token_ids"] for c in chunks] == [[7], [6], [5], [2]]
        text = httpx.post(f"{url}/v1/completions", json={"model": "smollm2", "prompt": "Hello"})
        assert text.status_code == 400
        assert "no tokenizer" in text.json()["error"]["message"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_fails_requests_and_serving_resumes(tmp_path: Path, victim: int) -> None:
    with held_server(tmp_path) as (server, hold):
        url = server.url()
        lines: list[str] = []
        whole: list[httpx.Response] = []
        streaming = threading.Event()

        def read() -> None:
            body = {"model": "smollm2", "prompt": [fake_engine.HANG], "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as stream:
                streaming.set()
                lines.extend(line for line in stream.iter_lines() if line)

        def ask() -> None:
            whole.append(complete(url, [fake_engine.HANG]))

        clients = [threading.Thread(target=client) for client in (read, ask)]
        for client in clients:
            client.start()
        assert wait_until(lambda: httpx.get(f"{url}/stats").json()["running"] == 2, 20)
        assert streaming.wait(20)
        ranks = [p for p in server.family() if "RANK" in p.environ()]
        rank = {int(p.environ()["RANK"]): p for p in ranks}
        hold.touch()
        rank[victim].kill()
        assert wait_until(lambda: health(url)[0] == 503, 20)
        assert complete(url, [5]).status_code == 503
        for client in clients:
            client.join(20)
        error, done = lines[-2:]
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
        assert done == "data: [DONE]"
        assert whole[0].status_code == 500
        assert whole[0].json()["error"]["type"] == "server_error"
        hold.unlink()
        assert wait_until(lambda: health(url) == (200, "ready"), 60)
        assert server.log.count("engine ready") == 2
        assert complete(url, [5, 6], max_tokens=1).status_code == 200
        assert alive(ranks) == []


@pytest.mark.long
def test_a_signal_ends_everything_within_seconds() -> None:
    with fake_server("--shutdown-timeout", "1") as server:
        url = server.url()
        body = {"model": "smollm2", "prompt": [fake_engine.HANG], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as stream:
            family = server.family()
            assert len(family) == 3
            server.process.send_signal(signal.SIGINT)
            rest = "".join(stream.iter_text())
        assert "the server is shutting down" in rest
        assert server.process.wait(20) == 0
        assert alive(family) == []


@pytest.mark.long
def test_sigterm_lets_answers_end_and_takes_no_more() -> None:
    with fake_server() as server:
        url = server.url()
        body = {"model": "smollm2", "prompt": [fake_engine.ENDLESS, 20], "max_tokens": 250}
        whole: list[httpx.Response] = []

        def ask() -> None:
            whole.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20))

        asked = threading.Thread(target=ask)
        asked.start()
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as stream:
            rest = stream.iter_lines()
            lines = [next(rest) for _ in range(4)]
            assert wait_until(lambda: httpx.get(f"{url}/stats").json()["running"] == 2, 10)
            server.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: health(url) == (503, "draining"), 10)
            refused = complete(url, [5])
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_draining"
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
            lines = [line for line in [*lines, *rest] if line]
        asked.join(10)
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert len(chunks) == 250
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert lines[-1] == "data: [DONE]"
        assert whole[0].json()["usage"]["completion_tokens"] == 250
        assert server.process.wait(20) == 0
        assert "2 requests get 30 s to end" in server.log


@pytest.mark.long
def test_a_second_signal_does_not_wait() -> None:
    with fake_server() as server:
        url = server.url()
        body = {"model": "smollm2", "prompt": [fake_engine.HANG], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as stream:
            family = server.family()
            server.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: health(url) == (503, "draining"), 10)
            server.process.send_signal(signal.SIGTERM)
            assert "the server is shutting down" in "".join(stream.iter_text())
        assert server.process.wait(20) == 0
        assert alive(family) == []


@pytest.mark.long
def test_a_killed_frontend_takes_its_ranks_along_and_the_next_start_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with fake_server() as server:
        server.url()
        [left], family = tmp_path.glob("razor-*"), server.family()
        server.process.kill()
        assert wait_until(lambda: not alive(family), 20)
    long_ago = time.time() - 3600
    os.utime(left / "engine", (long_ago, long_ago))
    with fake_server() as server:
        server.url()
        [own] = tmp_path.glob("razor-*")
        assert own != left
        os.utime(own / "engine", (long_ago, long_ago))
        with fake_server() as other:
            other.url()
            assert own.exists()


def test_a_later_start_that_the_ranks_refuse_is_tried_again(tmp_path: Path) -> None:
    with held_server(tmp_path) as (server, hold):
        url, bad = server.url(), hold.with_name(fake_engine.BAD)
        bad.touch()
        next(p for p in server.family() if "RANK" in p.environ()).kill()
        reason = "the head map belongs to another model"
        assert wait_until(lambda: server.log.count(f"restarting: {reason}") > 1, 60)
        refused = complete(url, [5])
        assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 60
        bad.unlink()
        assert wait_until(lambda: health(url) == (200, "ready"), 60)
        assert complete(url, [5, 6], max_tokens=1).status_code == 200


def test_later_starts_that_go_on_failing_end_the_server_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_FAILED_RESTARTS", "2")
    with held_server(tmp_path) as (server, hold):
        server.url()
        family = server.family()
        hold.with_name(fake_engine.BAD).touch()
        family[-1].kill()
        assert server.process.wait(60) == 1
        assert "2 starts failed in a row; the last: the head map" in server.log
        assert alive(family) == []


def test_a_signal_ends_a_server_that_is_still_loading(tmp_path: Path) -> None:
    with held_server(tmp_path, held=True) as (server, _):
        url = server.url(LISTENING)
        assert health(url) == (503, "loading")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
