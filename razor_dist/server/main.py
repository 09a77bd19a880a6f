"""The frontend's process: HTTP on one side, the engine on the other, until a signal.

``python -m razor_dist.server.main --config-json FILE --socket PATH --agent PID`` is the frontend of
ranks that torchrun starts: see `razor_dist.server.torchrun`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch
import uvicorn

from razor_dist.config.errors import ConfigError, EngineError, RazorError
from razor_dist.config.logs import set_up_logging
from razor_dist.config.schema import ServerConfig
from razor_dist.engine.checks import check_settings
from razor_dist.engine.device import prepare_device, torch_device
from razor_dist.files import replacing
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.grammar_process import GrammarProcess
from razor_dist.frontend.managed_engine import ManagedEngine, silence
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.frontend.ranks import RankGroup, StartRanks
from razor_dist.models.registry import local_model, resolve_model
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.protocol.sampling_params import request_defaults
from razor_dist.server.access import is_loopback, load_keys, tls_context
from razor_dist.server.app import build_app
from razor_dist.server.connections import TlsProtocol, bounded_protocol, quiet_loop
from razor_dist.server.context_files import sweep
from razor_dist.server.parsing_process import ParsingProcess
from razor_dist.server.service import Service

# Not __name__: torchrun's frontend is run as a module.
log = logging.getLogger("razor_dist.server.main")

T = TypeVar("T")
P = ParamSpec("P")

# Seconds that open connections get to finish when the server ends.
_GRACE_SECONDS = 2
# Seconds that a connection may idle between two requests: longer than load balancers and clients
# keep theirs (60 s), so that none sends a request on a connection that is being closed.
_KEEP_ALIVE_SECONDS = 75
# Seconds that a collector gets to take the last traces.
_LAST_TRACES_SECONDS = 3
# Connections accepted in one turn of the loop: few, since a connection that must make way is closed
# a few turns later, and `_OTHER_FILES` holds those until then.
_ACCEPTED_AT_ONCE = 16
# Connections that wait to be accepted.
_BACKLOG = 1024
# TCP notices a client that has vanished, so that no more is computed for it. Silence before the
# first probe of its host:
_IDLE_SECONDS = 30
# Time between two probes, and their number.
_INTERVAL_SECONDS, _PROBES = 10, 3
# Time in which the client must acknowledge what is sent.
_UNACKNOWLEDGED_MS = 60_000


def serve(config: ServerConfig, *, start_ranks: StartRanks = RankGroup.start) -> int:
    """Serve a model on ranks that this process starts, until SIGINT or SIGTERM; returns 0.

    Returns 1 if the ranks end later and do not start again, so that a supervisor starts the server
    anew.

    Raises `ConfigError` if the address is taken, `ModelError` if the model cannot be found, and
    `EngineError` if the ranks cannot be started.
    """
    # Under torchrun the agent is our parent; a killed agent must not leave a server behind.
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    set_up_logging(config.log_level, config.log_format, discreet=True)

    async def run(listener: socket.socket) -> int:
        engine = ManagedEngine(config, max_queue=config.max_queue, start_ranks=start_ranks)
        try:
            return await Frontend(config, engine.client, listener, engine.start, agent).run()
        finally:
            await engine.close()

    return _listening(config, run)


def _listening(
    config: ServerConfig, run: Callable[[socket.socket], Coroutine[Any, Any, int]]
) -> int:
    """Run a frontend on the configured address, unless a setting is wrong or the port taken."""
    folder = local_model(config.model)
    if folder is not None:
        # Without a GPU's number, so that this process opens no CUDA context to ask what it can do.
        check_settings(config, folder, torch.device(torch_device(config, 0).type))
    with bind(config) as listener:
        return asyncio.run(run(listener))


@dataclass
class Frontend:
    config: ServerConfig
    client: EngineClient
    # Bound already, so that an address in use is found before anything is started.
    listener: socket.socket
    # Starts the engine; called once the model is known to exist. None: another process does.
    start: Callable[[], Awaitable[None]] | None = None
    agent: int | None = None  # the process whose end is the frontend's

    def __post_init__(self) -> None:
        self._service = Service(self.config, self.client)
        self._keys = load_keys(self.config)
        self._tls = tls_context(self.config)
        self._bound: str = self.listener.getsockname()[0]

    async def run(self) -> int:
        """Serve until a signal, the agent's end, or a failure to start, which is raised."""
        if self.config.url_file is not None:
            with replacing(Path(self.config.url_file)) as draft:
                draft.write_text(self._url)
        server = _Uvicorn(self._uvicorn_config())
        stop, now = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        quiet_loop(loop)

        def end(number: signal.Signals) -> None:
            if stop.is_set() or number == signal.SIGINT:  # who presses Ctrl-C does not want to wait
                now.set()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        http = asyncio.create_task(server.serve(sockets=[self.listener]))
        ends = [asyncio.create_task(stop.wait()), http]
        if self.agent is not None:
            ends.append(asyncio.create_task(_process_end(self.agent)))
        log.info("listening on %s, loading %s", self._url, self.config.name)
        if not self._keys and not is_loopback(self._bound):
            log.warning("anybody who reaches %s may use this server: --api-key-file", self._url)
        try:
            if await _unless(ends, load(self._service, self.start)):
                with contextlib.suppress(OSError):  # a full disk, or a pipe that nobody reads
                    print(f"Serving {self.config.name} on {self._url}", flush=True)
                failure = asyncio.create_task(self._failure())
                await asyncio.wait([failure, *ends], return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    return 1
                failure.cancel()
                if ends[0].done():
                    await _unless([asyncio.create_task(now.wait()), *ends[1:]], self._drain(server))
            return 0
        finally:
            log.info("ending")
            await close(self._service)
            server.should_exit = True
            for task in ends[:1] + ends[2:]:
                task.cancel()
            await http

    def _uvicorn_config(self) -> uvicorn.Config:
        config, tls = self.config, self._tls
        protocol = bounded_protocol(config.header_timeout, config.max_connections)
        settings: Any = {
            "lifespan": "off",
            "log_config": None,
            "backlog": _ACCEPTED_AT_ONCE,
            "access_log": False,  # it has paths that clients write
            "timeout_graceful_shutdown": _GRACE_SECONDS,
            "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
            "http": protocol
            if tls is None
            else lambda **given: TlsProtocol(protocol(**given), tls),
            "ws": "none",
            "server_header": False,
            "proxy_headers": False,
        }
        return uvicorn.Config(build_app(self._service, self._keys, self._bound), **settings)

    async def _drain(self, server: uvicorn.Server) -> None:
        """Refuse new requests; wait up to ``shutdown_timeout`` for the others to end."""
        self._service.draining = True
        seconds, count = self.config.shutdown_timeout, self.client.unfinished
        if count:
            log.info("%d requests get %g s to end; a second signal ends them now", count, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.client.unfinished or server.server_state.tasks:
                    await asyncio.sleep(0.05)

    async def _failure(self) -> None:
        """Wait until the engine has failed for good, and log why."""
        while self.client.status.state != "failed":
            await self.client.wait_change()
        log.error("the engine failed: %s", self.client.status.reason)

    @property
    def _url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def load(service: Service, start: Callable[[], Awaitable[None]] | None = None) -> None:
    """Start the engine and load the tokenizer meanwhile; returns when both are ready.

    ``start`` starts the engine once the model is known to exist. None: another process does.
    """
    config, client, trust = service.config, service.client, service.config.trust_remote_code
    if start is not None:
        prepare_device(config)
    folder = await in_daemon_thread(resolve_model, config.model, trust_remote_code=trust)
    defaults = request_defaults(folder, config)
    if defaults:
        log.info("sampling defaults of the model: %s", dict(defaults))
    if start is not None:
        await start()
    if config.prefix_store is not None:  # also without --pinned-gb, and of other models
        await in_daemon_thread(sweep, Path(config.prefix_store))
    tokenizer = await in_daemon_thread(load_tokenizer, folder, trust_remote_code=trust)
    # Now, since it would hold up the loop when the first request needs it.
    grammars = GrammarProcess(tokenizer, client.require_ready)
    await in_daemon_thread(grammars.load)
    # What has been loaded stays: a full collection would look at all of it again, for a
    # quarter of a second in which no request is answered.
    gc.collect()
    gc.freeze()
    process = ParsingProcess(folder, trust_remote_code=trust)
    client.grammars = grammars
    service.load(PromptEncoder(tokenizer), process, defaults)
    await client.ready()


async def close(service: Service) -> None:
    """End what `load` has started but the engine, and send the last traces."""
    service.client.shutdown("the server is shutting down")
    if service.reader is not None:
        await service.reader.process.aclose()
    if service.client.grammars is not None:
        await service.client.grammars.aclose()
    if service.traces is not None:
        with contextlib.suppress(TimeoutError):
            closed = in_daemon_thread(service.traces.close)
            await asyncio.wait_for(closed, _LAST_TRACES_SECONDS)


async def in_daemon_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a blocking call that must not hold up the end of the process.

    ``asyncio.to_thread`` would: its threads are joined at exit, and a download may take hours.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)


async def _process_end(pid: int) -> None:
    """Return once the process ``pid`` has ended.

    A zombie, which its parent has not waited for, has ended too; `psutil.Process.wait` would stay.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.25)


async def _unless(ends: list[asyncio.Task[Any]], work: Coroutine[Any, Any, None]) -> bool:
    """Return whether ``work`` was done before any of ``ends``; it is cancelled if not."""
    task = asyncio.create_task(work)
    await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, EngineError):
        await task
    return False


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the ranks.

    More connections may wait to be accepted than it accepts at once.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def bind(config: ServerConfig) -> socket.socket:
    """Listen on the configured address; `ConfigError` if it is unknown or in use."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:  # the second for a label of the wrong length
        problem = getattr(error, "strerror", error)
        raise ConfigError(f"host {config.host!r} is not an address: {problem}") from None
    # IPv4 if there is any: localhost may be ::1 first, which clients that know 127.0.0.1 miss.
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    # With the protocol, by which asyncio knows TCP: it then sends what is written at once, instead
    # of waiting up to 40 ms for the client to acknowledge what was sent before.
    listener = socket.socket(family, kind, protocol)
    # A port whose last connections linger after a restart can be used again at once.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # where connections have what is set for their listener
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {os.strerror(error.errno or 0)}; "
            "choose another --port, or 0 for a free one"
        ) from None
    return listener


async def _serve_torchrun(
    config: ServerConfig, socket_path: Path, agent: int, listener: socket.socket
) -> int:
    client = EngineClient(socket_path, max_queue=config.max_queue)
    # At once, not when the model is found: rank 0 waits for the socket.
    await client.rank0.listen()
    watch = asyncio.create_task(_kill_when_silent(client, config.heartbeat_timeout))
    try:
        return await Frontend(config, client, listener, agent=agent).run()
    finally:
        watch.cancel()
        await client.close()


async def _kill_when_silent(client: EngineClient, timeout: float) -> None:
    """Kill a rank 0 that is stuck; torchrun sees its death and does the rest.

    One that has not connected is left alone: torchrun may still wait for other nodes, and /health
    says so.
    """
    while True:
        reason = await silence(client, timeout)
        stuck = client.rank0_pid
        client.lost(reason)
        if stuck is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stuck, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-json", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--agent", type=int, required=True)
    given = parser.parse_args()
    config = ServerConfig.from_json(given.config_json.read_text())
    set_up_logging(config.log_level, config.log_format, discreet=True)
    try:
        return _listening(config, partial(_serve_torchrun, config, given.socket, given.agent))
    except RazorError as error:
        print(f"razor-dist: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(given.socket.parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
