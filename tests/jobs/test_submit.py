"""A job that is submitted to a cluster as `docs/jobs.md` says, with token authentication."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from razor_dist.config.schema import EngineConfig
from razor_dist.jobs.host_engine import host_pool
from razor_dist.jobs.job import run_task
from tests.jobs.tasks import Completions
from tests.jobs.test_job import without_times
from tests.server.process import free_ports

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address for jobs of a cluster of one node, and a client's environment."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    names = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    with tempfile.TemporaryDirectory(prefix="rj", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={folder}"]
            + ["--object-store-memory=80000000", "--disable-usage-stats"]
            + [f"--{name}={port}" for name, port in ports.items()],
            cwd=tmp_path,  # not where the library lies
            env=env | {"RAY_worker_niceness": "0"},
            stdin=subprocess.DEVNULL,
        )
        address = f"http://127.0.0.1:{ports['dashboard-port']}"
        try:
            while not listens(ports["dashboard-port"]):
                assert process.poll() is None
                time.sleep(0.2)
            yield address, env
        finally:
            process.terminate()
            process.wait(60)


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def test_a_submitted_job(
    head: tuple[str, dict[str, str]], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    address, env = head
    engine = EngineConfig(
        model=str(tiny("llama")), attention="full", world_size=2, max_model_len=256
    )
    task = Completions({"full": engine})
    run_task(task, tmp_path / "undisturbed", host_pool(task))

    submit = [RAY, "job", "submit", "--address", address, "--working-dir", "."]
    program = [sys.executable, "tests/jobs/driver.py", str(tmp_path / "out"), engine.model]
    command = [*submit, "--", *program, "engines=2"]
    stranger = env | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}
    (tmp_path / "other").write_text(secrets.token_hex(32))
    refused = subprocess.run(command, cwd=ROOT, env=stranger, capture_output=True, text=True)
    assert refused.returncode != 0 and "oken" in refused.stderr + refused.stdout

    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    [library] = [line for line in done.stdout.splitlines() if line.startswith("library: ")]
    assert "working_dir_files" in library, "the uploaded code runs, not an installed one"
    assert "6/6 | full-" in done.stdout
    assert without_times(tmp_path / "out") == without_times(tmp_path / "undisturbed")
