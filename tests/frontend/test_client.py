"""The client and the launcher against ranks that compute nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from razor_dist.config.errors import ClusterError, EngineError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend import managed_engine
from razor_dist.frontend.answers import LiveChoices
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.client import EngineClient, StartClock, Status
from razor_dist.frontend.managed_engine import ManagedEngine, silence
from razor_dist.frontend.pins import Pin, Pinned
from razor_dist.frontend.prompts import Checked
from razor_dist.frontend.ranks import RankGroup
from razor_dist.frontend.stream import RequestStream
from razor_dist.protocol.messages import Alive, EngineInfo, Progress, Ready, Token, encode
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server.metrics import Metrics
from tests import fake_engine
from tests.fake_engine import told

pytestmark = pytest.mark.anyio
fake_ranks = partial(RankGroup.start, module="tests.fake_engine")

MANY = SamplingParams(max_tokens=100)


@contextlib.asynccontextmanager
async def running(
    model: str = "smollm2",
    *,
    world_size: int = 2,
    max_queue: int | None = None,
    heartbeat_timeout: float = 30.0,
) -> AsyncIterator[ManagedEngine]:
    config = EngineConfig(model=model, world_size=world_size, heartbeat_timeout=heartbeat_timeout)
    engine = ManagedEngine(config, max_queue=max_queue, start_ranks=fake_ranks)
    await engine.start()
    try:
        yield engine
    finally:
        pids = engine.pids
        await engine.close()
        assert not any(exists(pid) for pid in pids)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def submit(client: EngineClient, request_id: str, prompt: list[int], **more: Any) -> RequestStream:
    """Submit a request with one answer; return its stream."""
    [stream] = client.submit(request_id, prompt, MANY, **more)
    return stream


async def tokens(client: EngineClient, request_id: str, prompt: list[int]) -> list[int]:
    with contextlib.closing(submit(client, request_id, prompt)) as stream:
        return [m.token async for m in stream if isinstance(m, Token)]


@pytest.mark.long
async def test_requests_are_answered_side_by_side() -> None:
    async with running() as engine:
        client = engine.client
        info = await client.ready()
        assert (info.max_model_len, info.world_size) == (512, 2)
        got = await asyncio.gather(
            *(tokens(client, str(n), list(range(10, 10 + n))) for n in range(1, 9))
        )
        assert got == [[*reversed(range(10, 10 + n)), fake_engine.EOS] for n in range(1, 9)]
        assert client.unfinished == 0


async def test_each_rank_gets_its_environment() -> None:
    async with running(world_size=3) as engine:
        env = told((await engine.client.ready()).decode_reason)["env"]
        assert env["RANK"] == env["LOCAL_RANK"] == "0"
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "3"
        assert env["RAZOR_RENDEZVOUS"].startswith("file:///")
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert env["OMP_NUM_THREADS"] == str(EngineConfig(world_size=3).threads_per_rank(3))


async def test_a_stream_that_is_closed_early_is_aborted() -> None:
    async with running() as engine:
        client = engine.client
        await client.ready()
        with contextlib.closing(submit(client, "a", [fake_engine.HANG])):
            assert (await client.stats()).running == 1
        stats = await client.stats()
        assert (stats.running, stats.bytes_sent["aborted"], client.unfinished) == (0, 1, 0)
        task = asyncio.create_task(tokens(client, "b", [fake_engine.HANG]))
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (await client.stats()).bytes_sent["aborted"] == 2
        await tokens(client, "c", [5])
        assert (await client.stats()).bytes_sent["aborted"] == 2


async def test_a_request_does_not_wait_while_its_context_is_read() -> None:
    async with running() as engine:
        client = engine.client
        await client.ready()
        metrics = client.observer = Metrics("tiny")
        context = np.array([fake_engine.SLOW_PREFILL, 5, 6, 7], np.int32)
        pin = Pin(client, context)
        prompt = Checked(np.append(context, np.int32(fake_engine.HANG)), MANY)
        pinned = Pinned([pin], [pin], lambda _: pin.close())
        choices = LiveChoices(client, None, [prompt], report_progress=True, pinned=pinned)
        event = await anext(choices.events())
        assert event is not None and isinstance(event.what, Progress)
        assert (event.index, event.what.processed, event.what.total) == (0, 0, 5)
        assert not pin.is_whole
        told = {
            name: metrics.registry.get_sample_value(f"razor:{name}", {"model_name": "tiny"})
            for name in ("num_requests_waiting", "request_queue_time_seconds_count")
        }
        assert told == {"num_requests_waiting": 0, "request_queue_time_seconds_count": 1}
        choices.close()


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_stream_forgets_the_log_probabilities_that_it_has_sent(forgets: bool) -> None:
    async with running() as engine:
        await engine.client.ready()
        params = replace(MANY, n=2, max_tokens=3, logprobs=2)
        prompt = Checked(np.array([5, 6, 7, 8], np.int32), params)
        choices = LiveChoices(engine.client, None, [prompt])
        sent = [e.what async for e in choices.events(forgets=forgets) if e is not None]
        choices.close()
    assert len(sent) == 6
    assert all(isinstance(piece, TextPiece) and piece.logprobs for piece in sent)
    kept = [piece.logprobs is not None for choice in choices.choices for piece in choice.pieces]
    assert kept == [not forgets] * 6


async def test_nor_while_its_context_is_read_for_another_request() -> None:
    async with running() as engine:
        client = engine.client
        await client.ready()
        metrics = client.observer = Metrics("tiny")
        context = np.array([fake_engine.SLOW_PREFILL, 5, 6, 7], np.int32)
        prompt = Checked(np.append(context, np.int32(fake_engine.HANG)), MANY)
        pin = Pin(client, context)
        first, second = (
            LiveChoices(client, None, [prompt], report_progress=True, pinned=pinned)
            for pinned in (Pinned([pin], [pin], lambda _: None), Pinned([pin], [], lambda _: None))
        )
        first.close()  # the second still hears of it
        while not pin.is_whole:
            await asyncio.sleep(0.02)
        name, labels = "razor:request_queue_time_seconds_count", {"model_name": "tiny"}
        assert metrics.registry.get_sample_value(name, labels) == 1
        assert await anext(second.events(heartbeat=0.05)) is None
        second.close()
        pin.close()


async def test_a_refusal_names_its_field() -> None:
    async with running() as engine:
        await engine.client.ready()
        with pytest.raises(RequestError, match="more pages") as raised:
            await tokens(engine.client, "a", [fake_engine.REFUSE])
        assert raised.value.code == "context_length_exceeded"
        assert raised.value.param == "messages"


async def test_a_stopped_rank_is_killed_with_the_others() -> None:
    async with running(world_size=3) as engine:
        await engine.client.ready()
        before = engine.pids
        os.kill(before[0], signal.SIGSTOP)
        os.kill(before[1], signal.SIGKILL)
        while engine.client.status.state == "ready":
            await engine.client.wait_change()
        async with asyncio.timeout(60):
            await engine.client.ready()
        assert not any(exists(pid) for pid in before)


async def test_silence_before_and_after_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_engine, "patience", lambda _: 0.2)
    client = EngineClient(tmp_path / "engine")
    await client.rank0.listen()
    assert await silence(client, 0.01) == "rank 0 did not connect within 0.2 s"
    _, writer = await asyncio.open_unix_connection(client.rank0.path)
    writer.write(encode(Alive(7, {})))
    while client.rank0_pid != 7:
        await asyncio.sleep(0.01)
    assert await silence(client, 0.3) == "rank 0 gave no sign of life for 0.3 s"
    client.lost("it was silent")
    assert client.rank0_pid is None  # it may be another process by the time of a next silence
    writer.close()
    await client.close()


@pytest.mark.long
async def test_a_rank_0_that_is_stopped_before_it_connects_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience = [5.0]
    monkeypatch.setattr(managed_engine, "patience", lambda _: patience[0])
    async with running("connects-late", heartbeat_timeout=4.0) as engine:
        while not engine.pids:
            await asyncio.sleep(0)
        stopped = engine.pids[0]
        os.kill(stopped, signal.SIGSTOP)
        while engine.client.status.state == "loading":
            await engine.client.wait_change()
        assert engine.client.status == Status("restarting", "rank 0 did not connect within 5 s")
        patience[0] = 60.0
        async with asyncio.timeout(60):
            await engine.client.ready()
        assert not exists(stopped)


async def test_ranks_whose_node_is_gone_are_not_started_again() -> None:
    starts = 0

    async def start(config: EngineConfig, folder: Path, socket_path: Path) -> RankGroup:
        nonlocal starts
        starts += 1
        if starts > 1:
            raise ClusterError("a node is gone")
        return await fake_ranks(config, folder, socket_path)

    engine = ManagedEngine(EngineConfig(world_size=2), start_ranks=start)
    await engine.start()
    try:
        await engine.client.ready()
        os.kill(engine.pids[1], signal.SIGKILL)
        async with asyncio.timeout(20):
            while engine.client.status.state != "failed":
                await engine.client.wait_change()
    finally:
        await engine.close()
    assert starts == 2


async def test_who_sees_the_socket_can_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank 0 that torchrun starts looks for it: a bound socket refuses until it listens."""
    path, listen = tmp_path / "engine", socket.socket.listen
    seen: list[bool] = []

    def listening(self: socket.socket, *backlog: int) -> None:
        seen.append(path.exists())
        listen(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", listening)
    client = EngineClient(path)
    await client.rank0.listen()
    assert seen == [False]
    assert path.stat().st_mode & 0o777 == 0o600
    _, writer = await asyncio.open_unix_connection(path)
    writer.close()
    await client.close()


def test_a_restart_is_expected_to_take_as_long_as_the_last_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("razor_dist.frontend.client.time", SimpleNamespace(monotonic=lambda: now))
    clock = StartClock()
    assert clock.seconds_left == 1  # nothing is known of a first start
    for took, expected in ((20.5, 21), (300, 60)):
        now += took
        clock.note("ready")
        now += 1000
        clock.note("restarting")
        assert clock.seconds_left == expected
        clock.note("loading")
        now += took - 3
        assert clock.seconds_left == 3
        clock.note("ready")
        now += 7
        clock.note("restarting")
        assert clock.seconds_left == min(60, math.ceil(took - 3))
        now += took
        clock.note("restarting")
        assert clock.seconds_left == 1
        clock = StartClock()


async def test_a_malformed_message_costs_the_engine_not_the_frontend(tmp_path: Path) -> None:
    client = EngineClient(tmp_path / "engine")
    await client.rank0.listen()
    _, writer = await asyncio.open_unix_connection(client.rank0.path)
    writer.write(encode(Ready(EngineInfo(8, 9))))
    await client.ready()
    stream = submit(client, "a", [1])
    writer.write(encode({"unexpected": 1}))
    with pytest.raises(EngineError, match="cannot be handled"):
        await anext(stream)
    assert client.status.state == "restarting"
    writer.close()
    await client.close()


async def test_a_kept_prompt_that_ended_tells_how(tmp_path: Path) -> None:
    ready = encode(Ready(EngineInfo(8, 9)))
    client = EngineClient(tmp_path / "engine")
    await client.rank0.listen()
    _, writer = await asyncio.open_unix_connection(client.rank0.path)
    writer.write(ready)
    await client.ready()
    released, lost = (submit(client, name, [1], pin=True) for name in "ab")
    released.close()
    assert released.ended and released.closed
    with pytest.raises(RequestError, match="the prefix was released") as error:
        submit(client, "c", [1], prefix=released)
    assert error.value.param == "prefix"
    client.lost("it died")
    writer.close()
    _, writer = await asyncio.open_unix_connection(client.rank0.path)
    writer.write(ready)
    await client.ready()
    lost.close()  # too late to matter
    assert lost.ended and not lost.closed
    with pytest.raises(EngineError, match="lost with its engine"):
        submit(client, "c", [1], prefix=lost)
    assert client.unfinished == 0
    writer.close()
    await client.close()


async def test_the_socket_is_the_users_alone() -> None:
    async with running() as engine:
        await engine.client.ready()
        assert engine.client.rank0.path.stat().st_mode & 0o777 == 0o600
        assert engine.client.rank0.path.parent.stat().st_mode & 0o777 == 0o700
    assert not engine.client.rank0.path.parent.exists()


def test_a_socket_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="set TMPDIR to a shorter folder"):
        EngineClient(tmp_path / ("x" * 108))


def test_the_guard_runs_a_module_as_python_m_would() -> None:
    import subprocess

    command = [sys.executable, "-m", "razor_dist.frontend.guard"]
    shown = subprocess.run(
        [*command, str(os.getpid()), "json.tool", "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage:")
    orphan = subprocess.run([*command, "1", "json.tool", "--help"], capture_output=True)
    assert (orphan.returncode, orphan.stdout) == (1, b"")
