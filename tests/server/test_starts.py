"""Starting a server, by itself and under torchrun: what is refused and told, and what is run."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from razor_dist import cli
from razor_dist.config.errors import ConfigError, EngineError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.managed_engine import ManagedEngine
from razor_dist.server.main import bind
from tests.fake_engine import told
from tests.preloaded import executed
from tests.server.process import ROOT, ServerProcess, alive, folder, health, wait_until


def send(url: str, body: bytes, kind: str) -> httpx.Response:
    return httpx.post(url, content=body, headers={"Content-Type": kind}, timeout=60)


def ended(*command: str) -> tuple[int, str]:
    """Exit code and errors of a command that is expected to end by itself."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def run(*arguments: str) -> tuple[int, str]:
    """As `ended`, of a server."""
    serve_on = (sys.executable, "-m", "tests.server.serve_on", "tests.fake_engine")
    return ended(*serve_on, "--port", "0", *arguments)


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = run("--port", str(port))
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert "Traceback" not in output


def test_a_host_that_is_no_name_is_told() -> None:
    with pytest.raises(ConfigError, match=r"host 'a\.\.b' is not an address: "):
        bind(ServerConfig(host="a..b", port=0))


def test_a_disk_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(EngineError, match="cannot make a folder in TMPDIR: No such file"):
        ManagedEngine(ServerConfig())

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Where TMPDIR is, tempfile finds out by writing a file.
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(EngineError, match="cannot make a folder in TMPDIR: No usable temporary"):
        ManagedEngine(ServerConfig())


def test_a_server_serves_though_nobody_can_read_where_it_is(tmp_path: Path) -> None:
    told = tmp_path / "url"
    command = [sys.executable, "-m", "tests.server.serve_on", "tests.fake_engine", "--port", "0"]
    command += ["--url-file", str(told), "--served-model-name", "\N{KATAKANA LETTER KA}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    with (
        open("/dev/full", "wb") as full,
        executed(),  # a fork has this process's encoding
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=full) as server,
    ):
        try:
            assert wait_until(lambda: told.exists() and health(told.read_text())[0] == 200, 60)
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(1)
        finally:
            server.terminate()
    assert server.returncode == 0


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


def test_what_the_ranks_refuse_is_told_without_another_start(tmp_path: Path) -> None:
    model = folder(tmp_path, "bad-head-map")
    code, output = run("--model", model, "--world-size", "3")
    assert code == 2
    assert "the head map belongs to another model" in output.splitlines()[-1]
    assert output.count("the head map belongs to another model") == 1
    assert "restarted" not in output


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
        (["--port", "70000"], "port must be at most 65535, got 70000 (from --port)"),
        (["--config", "/no/such.yaml"], "cannot read the file /no/such.yaml"),
        (["--host", "no.such.host.invalid"], "host 'no.such.host.invalid' is not an address"),
        (["--head-map", "/no/map.json"], "cannot read the head map /no/map.json: No such file"),
        (["--max-model-len", "9000"], "max_model_len is 9000, but smollm2 was made for 8192"),
        (["--weights", "zero3"], "weights: zero3 shards the weights over the ranks"),
        (["--config", "needle_smolm2"], "did you mean 'needle_smollm2'?"),
    ],
)
def test_wrong_settings_are_one_line(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """And refused before anything listens: that would be another line."""
    assert cli.main(["serve", "--port", "0", *arguments]) == 2
    output = capfd.readouterr().err
    assert output.count("\n") == 1
    assert message in output


# ------------------------------------------------------------------- torchrun

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RANKS = "tests/server/rank_fake.py"


def test_a_single_torchrun_process_starts_the_ranks_itself() -> None:
    serve = ["tests/server/serve_on.py", "tests.fake_engine"]
    with ServerProcess(*TORCHRUN, *serve, "--world-size", "2") as server:
        url = server.url()
        env = told(httpx.get(f"{url}/stats").json()["decode_reason"])["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("0", "2", "2")
        assert not any(name.startswith(("TORCHELASTIC", "MASTER", "GROUP")) for name in env)
        family = server.family()
        server.process.kill()  # not even a killed agent leaves anything behind
        assert wait_until(lambda: not alive(family), 20)


@pytest.mark.long
def test_torchrun_restarts_a_rank_0_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAZOR_API_KEY", "sk-1")

    def stats() -> Any:
        return httpx.get(f"{url}/stats", headers={"Authorization": "Bearer sk-1"}).json()

    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    with ServerProcess(*TORCHRUN, *options, RANKS, "--heartbeat-timeout", "2") as server:
        url = server.url()
        before = stats()
        assert before["world_size"] == 2  # torchrun's, for want of --world-size
        itself = told(before["decode_reason"])
        assert "RAZOR_API_KEY" not in itself["env"]
        first = itself["pid"]
        os.kill(first, signal.SIGSTOP)
        assert wait_until(lambda: health(url)[0] == 503, 10)
        assert wait_until(lambda: health(url) == (200, "ready"), 60), server.log
        assert told(stats()["decode_reason"])["pid"] != first


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
