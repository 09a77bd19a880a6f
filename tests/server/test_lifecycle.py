"""Starting, failing, restarting and ending: nothing hangs and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from razor_dist.config.schema import ServerConfig
from razor_dist.server.main import bind
from tests import fake_engine
from tests.preloaded import executed
from tests.server.process import ROOT, ServerProcess, alive, fake_server, health, wait_until

LISTENING = r"listening on (http://[^,\s]+)"


def folder(parent: Path, name: str) -> str:
    """A model folder whose name tells `tests.fake_engine` how to fail; it has no tokenizer."""
    path = parent / name
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    return str(path)


def complete(url: str, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": prompt, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)


def send(url: str, body: bytes, kind: str) -> httpx.Response:
    return httpx.post(url, content=body, headers={"Content-Type": kind}, timeout=60)


def serving(model: str) -> ServerProcess:
    return fake_server("--model", model, "--served-model-name", "smollm2")


@contextmanager
def held_server(parent: Path) -> Iterator[tuple[ServerProcess, Path]]:
    """A server, and a file during whose life no rank of it is started again."""
    model = folder(parent, "held")
    with serving(model) as server:
        yield server, Path(model, fake_engine.WAIT)


def ended(*command: str) -> tuple[int, str]:
    """Exit code and errors of a command that is expected to end by itself."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def run(*arguments: str) -> tuple[int, str]:
    """As `ended`, of a server."""
    serve_on = (sys.executable, "-m", "tests.server.serve_on", "tests.fake_engine")
    return ended(*serve_on, "--port", "0", *arguments)


def test_health_tells_of_loading_and_requests_get_503(tmp_path: Path) -> None:
    model = folder(tmp_path, "slow-start")
    with serving(model) as server:
        url = server.url(LISTENING)
        assert health(url) == (503, "loading")
        early = complete(url, [1, 2])
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "engine_loading"
        assert early.headers["retry-after"] == "1"
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_within_seconds(number: signal.Signals) -> None:
    with fake_server("--shutdown-timeout", "1") as server:
        url = server.url()
        body = {"model": "smollm2", "prompt": [fake_engine.HANG], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as stream:
            family = server.family()
            assert len(family) == 3
            server.process.send_signal(number)
            rest = "".join(stream.iter_text())
        assert "the server is shutting down" in rest
        assert server.process.wait(20) == 0
        assert alive(family) == []


def test_sigterm_lets_answers_end_and_takes_no_more() -> None:
    with fake_server() as server:
        url = server.url()
        body = {"model": "smollm2", "prompt": [fake_engine.ENDLESS, 20], "max_tokens": 150}
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
        assert len(chunks) == 150
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert lines[-1] == "data: [DONE]"
        assert whole[0].json()["usage"]["completion_tokens"] == 150
        assert server.process.wait(20) == 0
        assert "2 requests get 30 s to end" in server.log


def test_a_second_signal_does_not_wait() -> None:
    with fake_server() as server:
        url = server.url()
        body = {"model": "smollm2", "prompt": [fake_engine.HANG], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as stream:
            server.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: health(url) == (503, "draining"), 10)
            server.process.send_signal(signal.SIGTERM)
            assert "the server is shutting down" in "".join(stream.iter_text())
        assert server.process.wait(20) == 0


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


def test_a_client_that_vanishes_while_it_uploads_is_no_error() -> None:
    with fake_server() as server:
        url = httpx.URL(server.url())
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        head += b"Content-Type: application/json\r\n\r\n{"
        with socket.create_connection((url.host, url.port or 0)) as client:
            client.sendall(head)
            time.sleep(0.3)
        time.sleep(0.5)
        assert health(str(url))[0] == 200
        assert "Traceback" not in server.log


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = run("--port", str(port))
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert "Traceback" not in output


def test_a_name_of_both_families_is_bound_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: found)
    with bind(ServerConfig(host="localhost", port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.skipif(sys.platform != "linux", reason="options are not inherited")
def test_a_client_that_has_vanished_is_noticed_within_a_minute() -> None:
    with (
        bind(ServerConfig(port=0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as ours,
    ):
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"
        options = (getattr(socket, name) for name in names)
        idle, interval, count, milliseconds = (
            ours.getsockopt(socket.IPPROTO_TCP, option) for option in options
        )
    assert idle + interval * count <= 60 and 0 < milliseconds <= 60_000


def test_no_such_model_is_told() -> None:
    code, output = run("--model", "/no/such/model")
    assert code == 2
    assert output.splitlines()[-1].startswith("razor-dist: model '/no/such/model'")
    assert "Traceback" not in output


def test_what_the_ranks_refuse_is_told_without_another_start(tmp_path: Path) -> None:
    model = folder(tmp_path, "bad-head-map")
    code, output = run("--model", model, "--world-size", "3")
    assert code == 2
    assert "the head map belongs to another model" in output.splitlines()[-1]
    assert output.count("the head map belongs to another model") == 1
    assert "restarted" not in output


def test_a_later_start_that_the_ranks_refuse_is_tried_again(tmp_path: Path) -> None:
    with held_server(tmp_path) as (server, hold):
        url, bad = server.url(), hold.with_name(fake_engine.BAD)
        bad.touch()
        next(p for p in server.family() if "RANK" in p.environ()).kill()
        reason = "the head map belongs to another model"
        assert wait_until(lambda: server.log.count(f"restarting: {reason}") > 1, 60)
        refused = complete(url, [5])
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
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


@pytest.mark.long
def test_nothing_of_the_working_directory_is_run(tmp_path: Path) -> None:
    for name in ("bs4", "json", "numpy", "psutil", "torch", "transformers"):
        planted = f"open({str(tmp_path / 'run')!r}, 'a').write({name!r})"
        (tmp_path / f"{name}.py").write_text(planted)
    command = [sys.executable, "-P", "-m", "tests.server.serve_on", "tests.fake_engine"]
    with executed(), ServerProcess(*command, cwd=tmp_path) as server:
        url = server.url()
        # So long that another process reads it.
        long = b'{"model": "smollm2", "prompt": "Hi"}' + b" " * 2**18
        assert send(f"{url}/tokenize", long, "application/json").status_code == 200
        page = send(f"{url}/documents/text", b"<html><p>text", "application/octet-stream")
        assert page.text == "text"
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_nothing_of_torchruns_working_directory_is_run(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text(f"open({str(tmp_path / 'run')!r}, 'a')")
    options = ["--nproc-per-node", "2", str(ROOT / RANKS)]
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *options]
    with executed(), ServerProcess(*command, cwd=tmp_path) as server:
        server.url()
    assert not (tmp_path / "run").exists()


def test_children_run_the_package_of_their_parent(tmp_path: Path) -> None:
    """Python starts in a checkout that is not installed, while another one is."""
    package = tmp_path / "razor_dist"
    (package / "frontend").mkdir(parents=True)
    for name in ("__init__.py", "frontend/__init__.py", "frontend/guard.py"):
        shutil.copy(ROOT / "razor_dist" / name, package / name)
    (package / "where.py").write_text("print(__file__)")
    code = "import subprocess; from razor_dist.frontend.guard import guarded; "
    code += "subprocess.run(guarded('razor_dist.where'), check=True)"
    with executed():
        found = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert found == f"{package / 'where.py'}\n"


def test_starts_that_fail_are_given_up(tmp_path: Path) -> None:
    code, output = run("--model", folder(tmp_path, "crash-at-start"))
    assert code == 1
    assert "3 starts failed in a row; the last: rank 0 exited with code 1" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "0"], "world_size must be at least 1, got 0 (from --world-size)"),
        (["--port", "70000"], "port must be at most 65535, got 70000 (from --port)"),
        (["--config", "/no/such.yaml"], "cannot read the file /no/such.yaml"),
        (["--host", "no.such.host.invalid"], "host 'no.such.host.invalid' is not an address"),
        (["--head-map", "/no/map.json"], "cannot read the head map /no/map.json: No such file"),
        (["--max-model-len", "9000"], "max_model_len is 9000, but smollm2 was made for 8192"),
        (["--weights", "zero3"], "weights: zero3 shards the weights over the ranks"),
        (["--config", "needle_smolm2"], "did you mean 'needle_smollm2'?"),
    ],
)
def test_wrong_settings_are_one_line(arguments: list[str], message: str) -> None:
    """And refused before anything listens: that would be another line."""
    serve = (sys.executable, "-m", "razor_dist", "serve", "--port", "0")
    code, output = ended(*serve, *arguments)
    assert code == 2
    assert output.count("\n") == 1
    assert message in output


# ------------------------------------------------------------------- torchrun

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RANKS = "tests/server/rank_fake.py"


def test_a_single_torchrun_process_starts_the_ranks_itself() -> None:
    serve = ["tests/server/serve_on.py", "tests.fake_engine"]
    with ServerProcess(*TORCHRUN, *serve, "--world-size", "2") as server:
        url = server.url()
        env = httpx.get(f"{url}/stats").json()["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("0", "2", "2")
        assert not any(name.startswith(("TORCHELASTIC", "MASTER", "GROUP")) for name in env)
        family = server.family()
        server.process.kill()  # not even a killed agent leaves anything behind
        assert wait_until(lambda: not alive(family), 20)


def test_torchrun_restarts_a_rank_0_that_was_stopped() -> None:
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    with ServerProcess(*TORCHRUN, *options, RANKS, "--heartbeat-timeout", "2") as server:
        url = server.url()
        stats = httpx.get(f"{url}/stats").json()
        assert stats["world_size"] == 2  # torchrun's, for want of --world-size
        first = stats["pid"]
        os.kill(first, signal.SIGSTOP)
        assert wait_until(lambda: health(url)[0] == 503, 10)
        assert wait_until(lambda: health(url) == (200, "ready"), 60), server.log
        assert httpx.get(f"{url}/stats").json()["pid"] != first


def test_a_world_size_that_contradicts_torchruns_is_told_once() -> None:
    code, output = ended(*TORCHRUN, "--nproc-per-node", "4", RANKS, "--world-size", "5")
    assert code != 0
    assert output.count("world_size is 5, but torchrun started 4 processes") == 1


def test_a_taken_port_ends_torchruns_job() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, output = ended(*TORCHRUN, "--nproc-per-node", "2", RANKS, "--port", port)
    assert code != 0
    assert output.count(f"cannot listen on 127.0.0.1:{port}: Address already in use") == 1


def test_a_signal_ends_a_server_that_is_still_loading(tmp_path: Path) -> None:
    with serving(folder(tmp_path, "slow-start")) as server:
        url = server.url(LISTENING)
        assert health(url) == (503, "loading")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
