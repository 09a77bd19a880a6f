"""A rank's process: rank 0 serves the frontend over a socket, the others follow its plans."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from razor_dist.config.errors import RazorError, RequestError
from razor_dist.config.logs import inherit_logging
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import RankEngine, load, start, warmed_up
from razor_dist.engine.device import torch_device
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.process_group import check_alike, init_distributed
from razor_dist.protocol.heartbeat import heartbeat, interval
from razor_dist.protocol.messages import (
    EXIT_USER_ERROR,
    HEADER_SIZE,
    Abort,
    Add,
    Failed,
    FrontendUnreachableError,
    Ready,
    Shutdown,
    Stats,
    StatsQuery,
    ToEngine,
    ToFrontend,
    body_length,
    encode,
    read_for_engine,
)
from razor_dist.protocol.step_plan import StepPlan, Stop

log = logging.getLogger(__name__)

T = TypeVar("T")

# Ranks wait this long while one fetches and loads the model: a long download is no fault, and the
# parent process notices a rank that dies.
_LOADING = timedelta(days=1)
# Seconds in which the frontend can read why rank 0 ends, before rank 0 ends.
_LAST_WORDS_SECONDS = 5.0


class FrontendClosedError(OSError):
    """The frontend has gone."""


class Link:
    """Rank 0's end of the frontend's Unix-domain socket; any thread may send, one receives."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise FrontendUnreachableError(
                f"the frontend does not listen on {path}: {error.strerror}"
            ) from error
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, message: ToFrontend) -> None:
        try:
            with self._sending:
                self._socket.sendall(encode(message))
        except OSError as error:
            raise FrontendClosedError from error

    def send_failure(self, error: RazorError) -> None:
        """Tell the frontend why the ranks cannot start; the frontend tells the user.

        Raises `FrontendUnreachableError`, with the reason, if the frontend has gone without the
        message ``shutdown``. A frontend that sent it gives the user its own reason.
        """
        try:
            self.send(Failed.of("", error))
        except FrontendClosedError:
            if self.was_told_to_end():
                return
            raise FrontendUnreachableError(f"{error} (the frontend has gone)") from error
        with contextlib.suppress(FrontendClosedError):
            # The frontend hangs up when it has read that. Our exit makes torchrun's agent end, and
            # that the frontend, which must know the reason by then.
            self.receive(_LAST_WORDS_SECONDS)

    def receive(self, timeout: float) -> list[ToEngine | Failed]:
        """Return the messages that have come, after at most ``timeout`` seconds without a byte.

        Raises `FrontendClosedError` if the frontend has closed the connection, and for malformed
        messages as `read_for_engine`.
        """
        while select.select([self._socket], [], [], timeout)[0]:
            try:
                data = self._socket.recv(1 << 20)
            except ConnectionResetError:  # closed with something of ours unread
                data = b""
            if not data:
                raise FrontendClosedError
            self._buffer += data
            timeout = 0.0
        return self._messages()

    def was_told_to_end(self) -> bool:
        """Return whether ``shutdown`` is among the last messages of a frontend that has gone."""
        with contextlib.suppress(FrontendClosedError):
            self.receive(0.0)
        return any(isinstance(message, Shutdown) for message in self._messages())

    def _messages(self) -> list[ToEngine | Failed]:
        messages: list[ToEngine | Failed] = []
        while len(header := bytes(self._buffer[:HEADER_SIZE])) == HEADER_SIZE:
            end = HEADER_SIZE + body_length(header)
            if len(self._buffer) < end:
                break
            messages += read_for_engine(bytes(self._buffer[HEADER_SIZE:end]))
            del self._buffer[:end]
        return messages


def serve_frontend(engine: RankEngine, link: Link, most_idle: float) -> None:
    """Rank 0's loop: take messages, make a step, send what came of it.

    ``most_idle`` is the time in seconds that the ranks may go without hearing from each other.

    Raises `FrontendUnreachableError` if the frontend goes without saying ``shutdown``. The other
    ranks are not asked to stop: they must fail as this one does, so that torchrun on every node
    starts all of them again.
    """
    core = engine.core
    try:
        link.send(Ready(engine.info))
        core.grammars.prepare()
        while True:
            patience = 0.0 if core.has_work else max(0.0, most_idle - core.idle_seconds)
            for message in link.receive(patience):
                if isinstance(message, Shutdown):
                    core.stop()
                    return
                for answer in _handle(engine, message):
                    link.send(answer)
            if core.has_work:
                for event in core.step():
                    link.send(event)
            elif core.idle_seconds >= most_idle:  # no matter what messages came that make no plan
                core.idle()
    except FrontendClosedError:
        if not link.was_told_to_end():
            raise FrontendUnreachableError("the frontend has gone") from None
        core.stop()


def _handle(engine: RankEngine, message: Add | Abort | StatsQuery | Failed) -> Sequence[ToFrontend]:
    core = engine.core
    match message:
        case Add():
            try:
                core.add(
                    message.id,
                    message.prompt,
                    message.checked_params(),  # rank 0 trusts no frontend
                    prefix_id=message.prefix,
                    pin=message.pin,
                    quota=message.quota,
                    scope=message.scope,
                )
            except RequestError as error:
                return message.refused(error)
        case Abort():
            core.abort(message.id)
        case StatsQuery():
            return [Stats(message.tag, core.stats())]
        case Failed():  # the refusal of a malformed request
            return [message]
    return []


def follow(engine: RankEngine) -> None:
    """The other ranks' loop: carry out rank 0's plans until it says stop."""
    runner = engine.runner
    while True:
        plan = StepPlan.receive(runner.comm)
        if isinstance(plan, Stop):
            return
        runner.execute(plan)


def agree(comm: Communicator, build: Callable[[], T]) -> T:
    """``build()``, which succeeds on every rank or raises the same error on every rank.

    The nodes of a job have their own disks: a model may be missing on one, which only the ranks
    there can know, and only rank 0 can tell the frontend. One may also have to fetch what others
    have, so the ranks wait here without the time-out that their collectives have. The `RazorError`
    raised is that of the lowest rank that met one.
    """
    # Made before the wait: a rank that is not there yet must not fail those that are.
    patient = dist.new_group(timeout=_LOADING) if comm.size > 1 else None
    built: T | None = None
    mine: RazorError | None = None
    try:
        built = build()
    except RazorError as error:
        mine = error
    everyones = [mine] * comm.size
    if patient is not None:
        dist.all_gather_object(everyones, mine, group=patient)
        dist.destroy_process_group(patient)
    for problem in everyones:
        if problem is not None:
            raise problem
    assert built is not None
    return built


def run_rank(config: EngineConfig, socket_path: str | None) -> None:
    """Be one rank until the frontend says shutdown or goes away.

    ``socket_path`` is the frontend's socket on rank 0, None on the others.

    Raises `FrontendUnreachableError` if rank 0 cannot reach the frontend or loses it: only the
    caller can tell the user. Any other `RazorError` says why the engine cannot be built on some
    rank: every rank raises the same, and the frontend, which has the message, reports it. What
    fails later is no `RazorError`.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(config.threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if socket_path is None:
        engine = _engine(config, local_rank)
        with contextlib.closing(engine.runner), _serving():
            follow(engine)
    else:
        link, started = Link(socket_path), False

        def seconds_left() -> dict[str, float]:
            return engine.core.seconds_left() if started else {}

        with heartbeat(link.send, interval(config.heartbeat_timeout), seconds_left):
            try:
                engine = _engine(config, local_rank)
            except RazorError as error:
                link.send_failure(error)
                raise
            started = True
            with contextlib.closing(engine.runner), _serving():
                serve_frontend(engine, link, most_idle=config.collective_timeout / 4)
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _serving() -> Iterator[None]:
    """Raise a `RazorError` as a `RuntimeError`: no setting is wrong, the rank has crashed."""
    try:
        yield
    except FrontendUnreachableError:
        raise
    except RazorError as error:
        raise RuntimeError(str(error)) from error


def _engine(config: EngineConfig, local_rank: int) -> RankEngine:
    device = torch_device(config, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    comm = init_distributed(config, device)
    # In three parts: what ranks do together begins once none has failed alone.
    loaded = agree(comm, lambda: load(config, comm, device))
    check_loaded(comm, loaded.about)
    return warmed_up(agree(comm, lambda: start(config, loaded, comm)))


def check_loaded(comm: Communicator, about: dict[str, object]) -> None:
    """Raise one `ConfigError` on all ranks if what they have loaded differs."""
    ranks = [about] * comm.size
    if comm.size > 1:
        dist.all_gather_object(ranks, about)
    check_alike(ranks)


def main() -> None:
    """Entry point of a rank that `razor_dist.frontend.managed_engine` starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-json", type=Path, required=True)
    parser.add_argument("--socket")
    arguments = parser.parse_args()
    inherit_logging()
    config = EngineConfig.from_json(arguments.config_json.read_text())
    is_first = os.environ["RANK"] == "0"
    try:
        run_rank(config, arguments.socket if is_first else None)
    except FrontendUnreachableError as error:
        sys.exit(f"razor-dist: rank 0 ends: {error}")  # code 1: another start may help
    except RazorError:
        sys.exit(EXIT_USER_ERROR)  # the frontend tells the user


if __name__ == "__main__":
    main()
