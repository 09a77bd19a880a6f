"""Two hosts on one machine: network namespaces that a cable (a veth pair) joins."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.server.process import ROOT, ServerProcess

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
# Starts a command again, a second after its end, as systemd does under Restart=always.
_AGAIN = """
trap 'kill $child; wait $child; exit' TERM
while :; do "$@" & child=$!; wait $child; sleep 1; done
"""


class Hosts:
    """Hosts 0 and 1, each with an address of a private network."""

    def __init__(self) -> None:
        mark = f"{os.getpid() % 100000}"
        self.names = [f"razor{mark}-{host}" for host in (0, 1)]
        self.links = [f"rz{mark}-{host}" for host in (0, 1)]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def set_up(self) -> None:
        """Make the hosts and the cable; `CalledProcessError` where that is not allowed."""
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")

    def remove(self) -> None:
        for name in self.names:  # its end of the cable goes with it, and the other end, too
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def join(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "up")

    def torchrun(self, host: int, *arguments: str, per_host: int = 1) -> ServerProcess:
        """One host's torchrun, as docs/recipes.md has it, under a supervisor."""
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:29400")
        where = ("--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", self.addresses[host])
        return ServerProcess(
            *("ip", "netns", "exec", self.names[host]),
            *("env", f"GLOO_SOCKET_IFNAME={self.links[host]}", "bash", "-c", _AGAIN, "supervisor"),
            *(TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(per_host), *rendezvous, *where),
            *(str(ROOT / "launch" / "serve.py"), "--world-size", str(2 * per_host), *arguments),
        )

    def on(self, host: int, function: Callable[[], T]) -> T:
        """Return what ``function`` returns in a thread on that host."""
        found: list[T] = []

        def run() -> None:
            with open(f"/run/netns/{self.names[host]}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(function())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found[0]

    def listeners(self, host: int) -> list[str]:
        """Addresses on which processes of that host accept TCP connections."""
        table = ["ip", "netns", "exec", self.names[host], "ss", "-Hltn"]
        lines = subprocess.run(table, capture_output=True, text=True, check=True).stdout
        return sorted(line.split()[3] for line in lines.splitlines())


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[Hosts | None]:
    """Two hosts; ``None`` where namespaces cannot be made."""
    hosts = Hosts()
    try:
        hosts.set_up()
    except (OSError, subprocess.CalledProcessError):
        hosts.remove()
        yield None
        return
    try:
        yield hosts
    finally:
        hosts.remove()


class Clock:
    """Seconds since it was made, and a print of them for whoever measures."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self, what: str = "", *more: Any) -> float:
        passed = time.monotonic() - self._begun
        if what:
            print(f"{passed:6.1f} s  {what}", *more, flush=True)
        return passed
