"""Processes of this package without their imports: forks of one process that has imported all.

Importing torch and transformers costs a rank six seconds of processor time, which the tests would
pay some two hundred times. `install` has `subprocess.Popen`, and all that is built on it, start
the modules of `MODULES` as forks instead: real processes, children of whoever started them, with
the command line, environment, descriptors, session, signals and exit code that they would have.
Their own children of these modules are forks as well. Every other command is executed as ever, and
so is every command inside ``with executed():``.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import ctypes
import gc
import inspect
import logging
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from razor_dist.frontend import guard

ROOT = Path(__file__).parents[1]
MODULES = (
    "razor_dist",
    "tests.engine.",
    "tests.fake_engine",
    "tests.server.",
    "torch.distributed.run",
)
# A reader of documents limits its own memory, in which these imports would count.
EXECUTED = "razor_dist.documents."
PRELOADED = (
    "razor_dist.cli",
    "razor_dist.commands.serve",
    "razor_dist.engine.worker",
    "razor_dist.server.main",
    "tests.fake_engine",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
)
# Room for a command line and an environment, which a fork writes over those of its template.
_PADDING = 1 << 16
_CLONE_PARENT = 0x8000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}

_execute = subprocess.Popen._execute_child
_signature = inspect.signature(_execute)
_lock = threading.Lock()
_template: socket.socket | None = None
_is_fork = False
_off = 0


class Program(NamedTuple):
    """A Python program to run in a fork, and what its process is given."""

    target: str
    is_module: bool
    command: list[str]
    arguments: list[str]
    unbuffered: bool
    cwd: str
    env: dict[str, str]
    new_session: bool
    numbers: list[int]  # of the descriptors; the first three are the standard ones


def install() -> None:
    """Have this process start the programs of `MODULES` as forks."""
    if sys.platform == "linux" and os.uname().machine in _SYS_CLONE:
        subprocess.Popen._execute_child = _execute_child


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """Execute every command, whatever it is."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


def _program(given: dict[str, Any]) -> tuple[Program, list[int]] | None:
    """The program of a call of `subprocess.Popen` and its descriptors, if it can be forked."""
    plain = {"executable": None, "preexec_fn": None, "shell": False, "close_fds": True}
    plain |= {"gid": None, "gids": None, "uid": None, "umask": -1, "process_group": -1}
    args = given["args"]
    if _off or isinstance(args, str | bytes | os.PathLike):
        return None
    if any(given.get(name, value) != value for name, value in plain.items()):
        return None
    command = [os.fspath(arg) for arg in args]
    if Path(command[0]).name == "torchrun":
        command[:1] = [sys.executable, "-m", "torch.distributed.run"]
    unbuffered = command[1:2] == ["-u"]
    rest = command[2:] if unbuffered else command[1:]
    if command[0] != sys.executable or len(rest) < 2:
        return None
    cwd = os.fspath(given["cwd"] or os.getcwd())
    if rest[:2] == ["-P", guard.__file__]:
        rest = ["-m", guard.__name__, *rest[2:]]
    if is_module := rest[0] == "-m":
        rest = rest[1:]
        guarded = rest[0] == guard.__name__
        names = (rest[0], *rest[2:3][: int(guarded)])
        if not all(name.startswith(MODULES) and not name.startswith(EXECUTED) for name in names):
            return None
    elif Path(cwd, rest[0]).parent not in (ROOT / "launch", ROOT / "tests" / "server"):
        return None
    env = dict(os.environ if given["env"] is None else given["env"])
    standard = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    held = [number if fd == -1 else fd for number, fd in enumerate(standard)]
    program = Program(
        *(rest[0], is_module, command, rest[1:], unbuffered, cwd, env),
        *(given["start_new_session"], [0, 1, 2, *given["pass_fds"]]),
    )
    return program, [*held, *given["pass_fds"]]


def _execute_child(self: Any, *args: Any, **kwargs: Any) -> None:
    given = _signature.bind(self, *args, **kwargs).arguments
    found = _program(given)
    if found is None:
        _execute(self, *args, **kwargs)
        return
    program, descriptors = found
    if _is_fork:
        self.pid = _fork(program, descriptors)
    else:
        self.pid = _ask_template(program, descriptors)
    self._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(given[name] for name in pipes))


def _fork(program: Program, descriptors: list[int]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        # A signal that came before `_forget` would go to this process's loop, by the descriptor
        # that both have.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
    if pid == 0:
        _run(program, descriptors)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


# ------------------------------------------------------------------- the template


def _ask_template(program: Program, descriptors: list[int]) -> int:
    """Have the template start a child of this process, and return its number."""
    global _template
    with _lock:
        if _template is None:
            _template, theirs = socket.socketpair()
            code = "from tests.preloaded import serve_forks; serve_forks()"
            padding = {"PADDING": "x" * _PADDING, "OPENBLAS_NUM_THREADS": "1"}
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), "x" * _PADDING],
                env={**os.environ, **padding, "PYTHONPATH": path},
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
        message = pickle.dumps(program)
        socket.send_fds(_template, [struct.pack("I", len(message))], descriptors)
        _template.sendall(message)
        (pid,) = struct.unpack("i", _template.recv(4, socket.MSG_WAITALL))
    return int(pid)


def serve_forks() -> None:
    """Be the template: import all, then fork until the process that asks is gone."""
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    asked = socket.socket(fileno=int(sys.argv[1]))
    while True:
        header, descriptors, _, _ = socket.recv_fds(asked, 4, 64)
        if not header:
            return
        (size,) = struct.unpack("I", header)
        program = pickle.loads(asked.recv(size, socket.MSG_WAITALL))
        pid = _clone_for_parent()
        if pid == 0:
            _run(program, descriptors)
        asked.sendall(struct.pack("i", pid))
        for descriptor in descriptors:
            os.close(descriptor)


def _clone_for_parent() -> int:
    """Fork a child of this process's parent."""
    assert threading.active_count() == 1
    api, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    api.PyOS_BeforeFork()
    zero = ctypes.c_long(0)
    flags = ctypes.c_long(_CLONE_PARENT | signal.SIGCHLD)
    number = ctypes.c_long(_SYS_CLONE[os.uname().machine])
    pid = int(libc.syscall(number, flags, zero, zero, zero, zero))
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    assert pid >= 0
    return pid


# ----------------------------------------------------------------------- the fork


def _run(program: Program, descriptors: list[int]) -> NoReturn:
    """Run a program in this new process as if it had been executed."""
    global _is_fork, _off
    code = 1
    try:
        _is_fork, _off = True, 0
        install()
        gc.freeze()  # what the other process has is not this one's to finalize
        atexit._clear()
        if program.new_session:
            os.setsid()
        _take(descriptors, program.numbers)
        os.chdir(program.cwd)
        _show(program)
        _forget(program)
        code = _outcome(program)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """Have the given descriptors under the given numbers, and no others."""
    free = max(*descriptors, *numbers) + 1
    copies = array.array("i")
    for descriptor in descriptors:
        while free in descriptors or free in copies:
            free += 1
        os.dup2(descriptor, free, inheritable=False)
        copies.append(free)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
    kept = sorted({0, 1, 2, *numbers})
    for below, above in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        _close_range(below + 1, above)


def _close_range(first: int, end: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if first <= int(name) < end:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _show(program: Program) -> None:
    """Set the environment, and write it and the command line where /proc shows them."""
    os.environ.clear()  # the C library's strings are now none of those that are written over
    os.environ.update(program.env)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, environment, environment_end = map(int, fields[45:49])
    for strings, begin, end in (
        (program.command, arguments, arguments_end),
        ([f"{k}={v}" for k, v in program.env.items()], environment, environment_end),
    ):
        shown = b"".join(os.fsencode(string) + b"\0" for string in strings)[: end - begin - 1]
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _forget(program: Program) -> None:
    """Undo what the process that was forked has set up for itself."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    if program.unbuffered or "PYTHONUNBUFFERED" in program.env:
        sys.stdout.reconfigure(write_through=True)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    sys.stderr.reconfigure(line_buffering=True)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    asyncio.set_event_loop_policy(None)
    tempfile.tempdir = None
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import")


def _outcome(program: Program) -> int:
    """Run the program; the exit code."""
    sys.argv = [program.target, *program.arguments]
    first = program.cwd if program.is_module else str(Path(program.cwd, program.target).parent)
    sys.path[0] = first
    try:
        if program.is_module:
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.target, run_name="__main__")
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
