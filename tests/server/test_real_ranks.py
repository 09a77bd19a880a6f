"""The server with real ranks of a tiny model: mistakes, stuck ranks, two nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import torch.distributed as dist

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import RankEngine, build_engine
from razor_dist.engine.worker import agree
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.ranks import RankPool
from tests.server.hosts import TORCHRUN
from tests.server.process import (
    ROOT,
    ServerProcess,
    alive,
    free_ports,
    health,
    server_on,
    wait_until,
)
from tests.server.slow_rank import CHUNK_SECONDS
from tests.tiny_models import save_head_map

SERVE = [sys.executable, "launch/serve.py", "--world-size", "2"]
SERVE_UNDER_TORCHRUN = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "launch/serve.py"]
PROMPT = [3 + 7 * i % 180 for i in range(150)]


@pytest.fixture(scope="module")
def arguments(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a tiny model with retrieval heads and streaming heads, and short windows."""
    model = tiny("llama")
    retrieval = ((False, False), (True, False)) * 2
    head_map = save_head_map(model, retrieval, tmp_path_factory.mktemp("heads") / "map.json")
    return [
        *("--model", str(model), "--served-model-name", "tiny"),
        *("--head-map", str(head_map), "--max-model-len", "400"),
        *("--window-min", "24", "--block", "8", "--chunked-prefill-size", "64"),
        *("--threads", "1"),
    ]


def complete(url: str, timeout: float = 60) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 16}
    fields = {"ignore_eos": True, "logprobs": 0}
    return httpx.post(f"{url}/v1/completions", json={**body, **fields}, timeout=timeout)


# ------------------------------------------------------------------- mistakes


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "mistake"),
    # A model that the frontend does not find: tests/test_cli.py.
    [(SERVE, "head map"), (SERVE_UNDER_TORCHRUN, "head map"), (SERVE_UNDER_TORCHRUN, "model")],
    ids=["frontend-head map", "torchrun-head map", "torchrun-model"],
)
def test_a_mistake_is_told_once(
    command: list[str], mistake: str, tiny: Callable[[str], Path]
) -> None:
    flags, sentence = {
        "model": (["--model", "/no/such/model"], "'/no/such/model': there is no such folder"),
        "head map": (["--head-map", "configs/head_maps/smollm2.json"], "made for 'smollm2'"),
    }[mistake]
    done = subprocess.run(
        [*command, "--port", "0", "--model", str(tiny("llama")), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert output.count(sentence) == 1, output
    if command is SERVE:
        assert done.returncode == 2
        assert "Traceback" not in output


def fail_on(comm: Communicator, rank: int) -> str:
    """Return the error that `agree` raises when one rank alone cannot be built."""

    def build() -> RankEngine:
        if comm.rank == rank:
            raise ModelError("no such folder here")
        return RankEngine(None, None, {})

    try:
        agree(comm, build)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_of_one_node_is_known_to_all(rank: int, ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(fail_on, rank) == ["no such folder here"] * 2
    assert ranks(2).run(fail_on, None) == [""] * 2


def load_slowly(comm: Communicator) -> str:
    """`agree` on ranks whose collectives are impatient, where one rank takes its time."""
    impatient = dist.new_group(timeout=timedelta(seconds=1))

    def build() -> RankEngine:
        if comm.rank == 1:
            time.sleep(3)
        return RankEngine(None, None, {"rank": comm.rank})

    return str(agree(Communicator(impatient), build).info)


@pytest.mark.long
def test_a_node_may_take_longer_to_load_than_a_collective_may(
    ranks: Callable[[int], RankPool],
) -> None:
    assert ranks(2).run(load_slowly) == ["{'rank': 0}", "{'rank': 1}"]


def test_a_rank_0_that_finds_no_frontend_says_so(tmp_path: Path) -> None:
    settings = tmp_path / "config.json"
    settings.write_text(EngineConfig().engine_json())
    socket_path = tmp_path / "engine"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "razor_dist.engine.worker"),
            *("--config-json", str(settings), "--socket", str(socket_path)),
        ],
        cwd=ROOT,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1  # and not what says that another start is no use
    assert f"the frontend does not listen on {socket_path}: No such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_without_other_ranks_is_itself() -> None:
    def build() -> RankEngine:
        raise ConfigError("as it was")

    with pytest.raises(ConfigError, match="as it was"):
        agree(Communicator(None), build)


# --------------------------------------------------------------- cancellation


@pytest.mark.long
def test_a_client_that_vanishes_in_mid_prefill_frees_all_ranks_within_one_chunk(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = tmp_path / "chunks"
    monkeypatch.setenv("CHUNKS_LOG", str(chunks))

    def begun() -> list[tuple[int, float]]:
        """Rank and time of every chunk that has begun."""
        lines = [line.split() for line in chunks.read_text().splitlines()]
        return [(int(rank), float(when)) for rank, when in lines]

    def vanish(url: str, stream: bool) -> float:
        """Ask, and hang up during the second chunk or soon after; when that was."""
        chunks.write_text("")
        body = {"model": "tiny", "prompt": PROMPT * 2, "max_tokens": 1, "stream": stream}
        sent = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}"
        head += "\r\nContent-Type: application/json"
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as client:
            client.sendall(f"{head}\r\n\r\n".encode() + sent)
            assert wait_until(lambda: len(begun()) >= 4, 60)  # two chunks on two ranks
        return time.monotonic()

    def stats(url: str) -> dict[str, Any]:
        return dict(httpx.get(f"{url}/stats", timeout=60).json())

    with server_on("tests.server.slow_rank", *arguments, "--chunked-prefill-size", "16") as server:
        url = server.url(timeout=180)
        for stream in (False, True):
            gone = vanish(url, stream)
            assert wait_until(lambda: stats(url)["running"] + stats(url)["waiting"] == 0, 30)
            time.sleep(1.5 * CHUNK_SECONDS)  # time for a chunk that should not be
            for rank in (0, 1):
                late = [when for r, when in begun() if r == rank and when > gone]
                assert len(late) <= 1, late
            assert stats(url)["kv_bytes_per_rank"] == [0, 0]
        after = stats(url)
        assert min(after["peak_kv_bytes_per_rank"]) > 0
        assert 0 < after["prompt_tokens"] < 2 * len(PROMPT * 2)
        assert after["generated_tokens"] == 0


# ---------------------------------------------------------------- stuck ranks


def rank_processes(server: ServerProcess) -> dict[int, psutil.Process]:
    """The ranks that ``razor-dist serve`` has started, by rank."""
    family = [p for p in server.family() if "razor_dist.engine.worker" in " ".join(p.cmdline())]
    return {int(p.environ()["RANK"]): p for p in family}


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stopped_rank_0_is_replaced(world_size: int, arguments: list[str]) -> None:
    size = ["--world-size", str(world_size)]
    with ServerProcess(*SERVE[:2], *size, *arguments, "--heartbeat-timeout", "4") as server:
        url = server.url()
        before = complete(url).json()["choices"][0]["token_ids"]
        stopped = rank_processes(server)[0]
        stopped.suspend()
        answers: list[httpx.Response] = []
        request = threading.Thread(target=lambda: answers.append(complete(url)))
        request.start()
        assert wait_until(lambda: health(url)[0] == 503, 30)
        request.join(30)
        assert answers[0].status_code in (500, 503)
        assert "no sign of life" in server.log
        assert wait_until(lambda: health(url)[0] == 200, 90), server.log
        assert not stopped.is_running()
        assert complete(url).json()["choices"][0]["token_ids"] == before


@pytest.mark.long
def test_another_rank_that_is_stopped_while_idle_is_replaced(arguments: list[str]) -> None:
    with ServerProcess(*SERVE, *arguments, "--collective-timeout", "8") as server:
        url = server.url()
        stopped = rank_processes(server)[1]
        stopped.suspend()
        assert wait_until(lambda: health(url)[0] == 503, 60)
        assert wait_until(lambda: health(url)[0] == 200, 90), server.log
        assert not stopped.is_running()
        assert complete(url).status_code == 200


@pytest.mark.long
def test_requests_that_rank_0_refuses_do_not_keep_it_from_the_other_ranks(
    arguments: list[str],
) -> None:
    little = ("--kv-tokens", "64", "--page-size", "8", "--max-num-seqs", "1")
    with ServerProcess(*SERVE, *arguments, *little, "--collective-timeout", "6") as server:
        url = server.url()
        pids = {rank: process.pid for rank, process in rank_processes(server).items()}
        end = time.monotonic() + 9
        while time.monotonic() < end:
            refused = complete(url)
            assert refused.status_code == 400, (refused.text, server.log)
            assert refused.json()["error"]["code"] == "kv_capacity_exceeded"
            time.sleep(0.2)
        assert {rank: one.pid for rank, one in rank_processes(server).items()} == pids


# ------------------------------------------------------------------- torchrun


def under_torchrun(server: ServerProcess) -> dict[int, psutil.Process]:
    """The ranks that torchrun has started, by rank."""
    children = psutil.Process(server.process.pid).children()
    environments = {child: child.environ() for child in children}
    return {int(env["RANK"]): child for child, env in environments.items() if "RANK" in env}


def restarts(server: ServerProcess) -> int:
    return int(under_torchrun(server)[0].environ()["TORCHELASTIC_RESTART_COUNT"])


def frontend_of(server: ServerProcess) -> psutil.Process:
    """The frontend of torchrun's job; it is nobody's child once the rank 0 that made it is dead."""
    mine = f"--agent {server.process.pid}"
    return next(
        p
        for p in psutil.process_iter(["cmdline"])
        if " ".join(p.info["cmdline"] or []).rstrip().endswith(mine)
    )


def is_healthy(url: str) -> bool:
    try:
        return health(url)[0] == 200
    except httpx.TransportError:
        return False


def stream_until_killed(url: str, victim: psutil.Process) -> str:
    """Kill a process in the middle of a stream; returns the stream's last event."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
    lines = []
    fields = {"stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | fields, timeout=60) as stream:
        for line in stream.iter_lines():
            lines.append(line)
            if len(lines) == 6:
                victim.kill()
    return next(line for line in reversed(lines) if line.startswith("data: {"))


@pytest.mark.long
def test_one_death_costs_one_restart_of_torchrun(arguments: list[str]) -> None:
    """Real ranks: those of a restart must not meet the addresses of the dead."""
    command = [*SERVE_UNDER_TORCHRUN]
    command[1:1] = ["--max-restarts", "3", "--monitor-interval", "0.1"]
    with ServerProcess(*command, *arguments) as server:
        url = server.url(timeout=120)
        before = complete(url).json()["choices"][0]["token_ids"]
        for count, rank in enumerate((1, 0), start=1):
            last = stream_until_killed(url, under_torchrun(server)[rank])
            assert "engine_error" in last
            assert wait_until(lambda: is_healthy(url), 120), server.log
            assert restarts(server) == count
            assert complete(url).json()["choices"][0]["token_ids"] == before
        killed = frontend_of(server)
        folder = Path(killed.cmdline()[killed.cmdline().index("--socket") + 1]).parent
        killed.kill()
        assert wait_until(lambda: server.log.count("Serving tiny on") == 2, 120), server.log
        url = server.url()
        assert is_healthy(url)
        assert restarts(server) == 3
        assert complete(url).json()["choices"][0]["token_ids"] == before
        # No restart is left: the job ends, and says by its exit code that it failed.
        frontend_of(server).kill()
        assert server.process.wait(60) != 0
        assert not folder.exists()


# ------------------------------------------------------------------ two nodes


def tokens_alone(arguments: list[str]) -> list[int]:
    """The tokens that one rank in this process answers with."""
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    del flags["--served-model-name"]
    settings: dict[str, Any] = {
        name[2:].replace("-", "_"): int(value) if value.isdecimal() else value
        for name, value in flags.items()
    }
    core = build_engine(EngineConfig(**settings), Communicator(None), torch.device("cpu")).core
    core.add("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    tokens = []
    while core.has_work:
        tokens += [message.token for message in core.step() if isinstance(message, Token)]
    return tokens


@pytest.mark.long
def test_two_nodes_answer_as_one_process(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    agent = [
        *(TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"),
        *("launch/serve.py", "--world-size", "4", *arguments),
    ]
    with ServerProcess(*agent) as one, ServerProcess(*agent) as other:
        assert wait_until(lambda: "Serving" in one.log + other.log, 120), one.log + other.log
        served = next(node for node in (one, other) if "Serving" in node.log)
        url = served.url()
        stats = httpx.get(f"{url}/stats", timeout=60).json()
        assert stats["world_size"] == 4
        answer = complete(url)
        assert answer.json()["choices"][0]["token_ids"] == tokens_alone(arguments)
        family = one.family() + other.family()
        for node in (one, other):
            node.process.send_signal(signal.SIGTERM)
        for node in (one, other):
            node.process.wait(60)
        assert wait_until(lambda: not alive(family), 15)
