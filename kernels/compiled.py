"""The operations of the folder ``cpu``, compiled for this machine when they are first asked for.

Where there is no C++ compiler, or it fails, everything is computed by torch's own operations:
slower, and what tests compare with. What was compiled stays in the user's cache, by source, torch
and processor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

log = logging.getLogger(__name__)

# Set to 0, nothing is compiled and nothing compiled is used.
SWITCH = "RAZOR_DIST_CPU_KERNELS"

_SOURCES = Path(__file__).with_name("cpu")
# Everything is rounded as it is written: `fused` of cpu/vectors.h says where a product is added
# with one rounding. torch's own threads are OpenMP's.
_FLAGS = "-std=c++20 -O3 -march=native -ffp-contract=off -fopenmp -fPIC"
# Errors that will recur: the compiler names a line of the sources, or a library that is missing. A
# lack of memory, disk or processes may pass. It names no line, except in "x.cpp:9:1: fatal error:
# error writing to x.s: No space left on device", and if an assembler reads the truncated output of
# a compiler that was killed.
_LASTING = re.compile(
    r":\d+: (fatal )?[Ee]rror: (?!error (writing|closing))|(cannot|unable to) find (library )?-l"
)
_PATIENCE = 180  # seconds, for the compiler and for another process; compiling takes twenty


@functools.cache
def operations() -> Any:
    """``torch.ops.razor_dist_cpu``, compiled if need be; None if it is switched off or fails."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        _load(_library())
    except Exception as error:  # whatever it is, torch's operations compute instead
        reason = getattr(error, "stderr", None) or error.__cause__ or error
        log.warning("computing on this CPU is slower without compiled kernels: %s", reason)
        return None
    return torch.ops.razor_dist_cpu


def compile_ahead() -> None:
    """Compile in the background, unless this machine has the library already.

    Processes that call `operations` wait for it, and log the reason if it fails.
    """

    def compile_quietly() -> None:
        with contextlib.suppress(Exception):
            _make(_library())

    if os.environ.get(SWITCH) != "0":
        threading.Thread(target=compile_quietly, daemon=True).start()


def _library() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "razor_dist" / f"cpu-{_key()}.so"


def _load(library: Path) -> None:
    """Load the library; compile it first if it is missing or cannot be loaded.

    A library that cannot be loaded stays until its replacement is complete: other hosts may use it.
    """
    broken = None
    if library.is_file():
        broken = library.stat().st_mtime_ns
        try:
            return torch.ops.load_library(library)
        except OSError as error:
            log.warning("%s cannot be loaded: %s", library, error.__cause__)
    failed = _make(library, broken)
    try:
        return torch.ops.load_library(library)
    except OSError as error:
        # As on a file system that is mounted noexec: another would not be loaded either.
        reason = f"{error.__cause__}; set XDG_CACHE_HOME to keep kernels in another place"
        failed.write_text(reason)
        raise OSError(reason) from None


def _make(library: Path, broken: int | None = None) -> Path:
    """Compile the library if it is missing, or was modified at ``broken``, in nanoseconds.

    One process compiles, and others wait. Return the path of the file that keeps a lasting error.
    """
    from filelock import FileLock

    command = shlex.split(os.environ.get("CXX") or "c++")
    compiler = shutil.which(command[0])
    if compiler is None:
        raise OSError(f"there is no C++ compiler {command[0]} (docs/install.md)")
    library.parent.mkdir(parents=True, exist_ok=True)
    # A compiler's error is kept, so that not every rank runs it again.
    tried = f"{command} {os.stat(compiler).st_mtime}".encode()
    failed = library.with_suffix(f".{hashlib.sha256(tried).hexdigest()[:8]}.failed")
    with FileLock(library.with_suffix(".lock"), timeout=_PATIENCE):
        if library.is_file() and library.stat().st_mtime_ns != broken:
            return failed
        # An empty file is from a full disk.
        if failed.is_file() and (reason := failed.read_text()):
            raise OSError(f"{reason} ({failed})")
        log.warning("compiling kernels for this CPU, once: about twenty seconds")
        try:
            _compile(command, library)
        except subprocess.CalledProcessError as error:
            if _LASTING.search(error.stderr) and "Killed" not in error.stderr:
                failed.write_text(error.stderr)
            raise
    return failed


def _compile(command: list[str], library: Path) -> None:
    """Compile the sources side by side, and link them."""
    torch_folder, partial = Path(torch.__file__).parent, library.with_suffix(".partial")
    sources, own = sorted(_SOURCES.glob("*.cpp")), (".objects", f"{library.stem}.", library.parent)
    for killed in library.parent.glob(f"{library.stem}.*.objects"):  # as they were compiling
        shutil.rmtree(killed, ignore_errors=True)
    with TemporaryDirectory(*own) as folder, ThreadPool(len(sources)) as threads:

        def compile_one(source: Path) -> str:
            made = f"{folder}/{source.stem}.o"
            of_torch = f"-isystem{torch_folder / 'include'}"
            _run([*command, *_FLAGS.split(), of_torch, "-c", str(source), "-o", made])
            return made

        made = threads.map(compile_one, sources)
        of_torch = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        _run([*command, *_FLAGS.split(), "-shared", *made, "-o", str(partial), *of_torch])
    with partial.open("rb") as file:
        os.fsync(file.fileno())  # half a library would crash the process that loads it
    partial.rename(library)


def _run(command: list[str]) -> None:
    subprocess.run(
        command,
        check=True,
        env={**os.environ, "LC_ALL": "C"},  # `_make` reads what it says
        timeout=_PATIENCE,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def _key() -> str:
    """A hash of all that the library depends on."""
    system = platform.machine(), *platform.libc_ver()
    digest = hashlib.sha256(f"{_FLAGS} {torch.__version__} {system}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    # A cache folder may be shared by machines of different processors.
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    identifying = "flags", "Features", "model name", "CPU part"
    digest.update(
        "".join(sorted({line for line in lines if line.startswith(identifying)})).encode()
    )
    return digest.hexdigest()[:16]
