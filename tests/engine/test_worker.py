"""Rank 0's end of the socket: what it sends to the frontend, and what it raises instead."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from razor_dist.config.errors import ConfigError, EngineError, RazorError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import build, worker
from razor_dist.engine.core import EngineCore
from razor_dist.engine.worker import FrontendClosedError, Link, serve_frontend
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.heartbeat import heartbeat
from razor_dist.protocol.messages import (
    HEADER_SIZE,
    Abort,
    Add,
    Alive,
    Failed,
    FrontendUnreachableError,
    Ready,
    Shutdown,
    body_length,
    decode_to_frontend,
    encode,
)
from razor_dist.protocol.step_plan import Report, StepPlan, Stop
from tests.engine.cores import make_core
from tests.server.process import wait_until
from tests.tiny_models import Tiny


@contextlib.contextmanager
def linked(folder: Path) -> Iterator[tuple[Link, socket.socket]]:
    """A link and the frontend's end of it."""
    path = str(folder / "engine")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        link = Link(path)
        frontend, _ = listener.accept()
        with frontend, link._socket:
            yield link, frontend


def test_a_frontend_that_does_not_listen(tmp_path: Path) -> None:
    with pytest.raises(FrontendUnreachableError, match=r"does not listen on .*: No such file"):
        Link(str(tmp_path / "engine"))
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "engine"))
    with pytest.raises(FrontendUnreachableError, match="Connection refused"):
        Link(str(tmp_path / "engine"))


def test_the_frontend_can_read_why_rank_0_ends(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, frontend):
        told = []

        def read() -> None:
            header = frontend.recv(HEADER_SIZE, socket.MSG_WAITALL)
            told.append(decode_to_frontend(frontend.recv(body_length(header), socket.MSG_WAITALL)))
            frontend.close()

        reader = threading.Thread(target=read)
        reader.start()
        link.send_failure(ConfigError("world_size must be at least 1"))
        reader.join()
        [message] = told
        assert message == Failed("", "world_size must be at least 1", code="engine_error")
        assert isinstance(message.exception, EngineError)


def test_an_error_that_reaches_no_frontend_is_raised(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, frontend):
        frontend.close()
        with pytest.raises(FrontendClosedError):
            link.receive(1.0)
        with pytest.raises(FrontendUnreachableError, match=r"at least 1 \(the frontend has gone\)"):
            link.send_failure(ConfigError("world_size must be at least 1"))


def test_an_error_after_the_frontends_shutdown_is_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(tmp_path) as (link, frontend):
        link.send(Alive(1, {}))  # unread by the frontend, which resets the connection
        frontend.sendall(encode(Shutdown()))
        frontend.close()
        ask, told = link.was_told_to_end, []
        monkeypatch.setattr(link, "was_told_to_end", lambda: told.append(ask()) or told[-1])
        link.send_failure(ConfigError("world_size must be at least 1"))
        assert told == [True]  # asked for, and so nothing is raised


def test_a_malformed_request_is_refused_beside_others(tmp_path: Path) -> None:
    with linked(tmp_path) as (link, frontend):
        malformed = {"t": "add", "id": "a", "params": {}, "prompt": b"abc"}
        frontend.sendall(encode(malformed) + encode(Abort("b")))
        refused, abort = link.receive(1.0)
        assert isinstance(refused, Failed) and refused.id == "a" and abort == Abort("b")
        frontend.sendall(encode({"t": "pause"}))
        with pytest.raises(EngineError, match="Invalid value 'pause'"):
            link.receive(1.0)


@pytest.mark.parametrize("every", [9.0, 29.0])
def test_ranks_hear_from_rank_0_while_only_refused_requests_come(
    every: float, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they end after `collective_timeout`, which is four times as long."""
    now = begin = time.monotonic()
    runner = make_core(tiny("llama")).runner
    config = EngineConfig(model=str(tiny("llama")), max_model_len=400, prefix_cache=False)
    about: Any = {"chunked_prefill_size": 40, "eos_token_ids": ()}
    core = EngineCore(runner, config, clock=lambda: now, **about)
    plans: list[tuple[float, type[StepPlan]]] = []
    sent: list[Any] = []
    execute = runner.execute

    def noted(plan: StepPlan) -> Any:
        plans.append((now - begin, type(plan)))
        return execute(plan)

    class Refused(Link):
        """A link by which a message comes ``every`` seconds."""

        def __init__(self) -> None:
            self.next = begin

        def send(self, message: Any) -> None:
            sent.append(message)

        def receive(self, timeout: float) -> list[Any]:
            nonlocal now
            if now - begin > 200:
                return [Shutdown()]
            if self.next > now + timeout:
                now += timeout
                return []
            now, self.next = self.next, self.next + every
            long = Add("a", {}, np.full(1000, 5, np.int32))
            wrong = Add("b", {"temperature": 9.0}, long.prompt[:1])
            return [long, wrong, Failed("c", "malformed"), Abort("unknown")]

    monkeypatch.setattr(runner, "execute", noted)
    info: Any = {}
    serve_frontend(build.RankEngine(runner, core, info), Refused(), most_idle=30.0)
    assert [type(message) for message in sent[:4]] == [Ready, Failed, Failed, Failed]
    assert [message.param for message in sent[1:4]] == ["prompt", "temperature", None]
    times, ops = zip(*plans, strict=True)
    assert ops[-1] is Stop and set(ops[:-1]) == {Report}
    assert max(b - a for a, b in itertools.pairwise((0.0, *times))) <= 30.0 + 1e-6
    assert len(times) < 10


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_while_it_serves_is_no_mistake_of_the_users(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rank ends without a word, for the frontend has not been told why."""

    def fail(*of: Any, **given: Any) -> None:
        raise EngineError("a defect of razor_dist; please report it")

    runner = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(worker, "init_distributed", lambda *of: Communicator(None))
    monkeypatch.setattr(worker, "agree", lambda *of: SimpleNamespace(about={}))
    monkeypatch.setattr(worker, "warmed_up", lambda *of: SimpleNamespace(runner=runner))
    monkeypatch.setattr(worker, "serve_frontend", fail)
    monkeypatch.setattr(worker, "follow", fail)
    monkeypatch.setattr(worker, "Link", lambda path: SimpleNamespace(send=lambda message: None))
    with pytest.raises(RuntimeError, match="a defect of razor_dist") as error:
        worker.run_rank(EngineConfig(device="cpu"), None if rank else "/the/frontends/socket")
    assert not isinstance(error.value, RazorError)  # of which callers say that the user is told


def test_a_heartbeat_holds_nothing_after_its_block() -> None:
    """Else its thread may free the engine's tensors while the interpreter ends, and be aborted."""
    sent: list[Alive] = []
    with heartbeat(sent.append, 60.0, lambda: {"a": 1.5}):
        assert wait_until(lambda: bool(sent), 5)
    assert sent == [Alive(os.getpid(), {"a": 1.5})]
    assert "razor-heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_all_ranks_are_built_before_any_warms_up(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others would wait there for one that could not be built."""
    done: list[str] = []
    make, agree = build.make_engine, worker.agree

    def make_on_cuda(*of: Any, **given: Any) -> build.RankEngine:
        engine = make(*of, **given)
        engine.runner.device = torch.device("cuda")
        return engine

    def agreed(*of: Any) -> Any:
        found = agree(*of)
        done.append("agreed")
        return found

    monkeypatch.setattr(build, "make_engine", make_on_cuda)
    monkeypatch.setattr(build, "warm_up", lambda runner: done.append("warmed up"))
    monkeypatch.setattr(worker, "agree", agreed)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    given = {"attention": "full", "device": "cpu", "max_model_len": 64}
    config = EngineConfig(model=str(tiny("llama")), **given)
    worker._engine(config, 0)
    assert done == ["agreed", "agreed", "warmed up"]
