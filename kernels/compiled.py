"""The operations of the folder ``cpu``, compiled for this machine when they are first asked for.

Where there is no C++ compiler, or it fails, everything is computed by torch's own operations:
slower, and what tests compare with. What was compiled stays in the user's cache, by source, torch
and processor.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

# Set to 0, nothing is compiled and nothing compiled is used.
SWITCH = "RAZOR_DIST_CPU_KERNELS"

_SOURCES = Path(__file__).with_name("cpu")
# A product may be added with one rounding (FMA); all else is rounded as it is written. torch's own
# threads are OpenMP's.
_FLAGS = "-std=c++20 -O3 -march=native -ffp-contract=fast -fopenmp -fPIC -shared"
_PATIENCE = 600  # seconds; it takes nine on one core


@functools.cache
def operations() -> Any:
    """Return ``torch.ops.razor_dist_cpu``, or None where it cannot be had."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        torch.ops.load_library(_library())
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("steps of few tokens take longer: no kernels for this CPU: %s", said)
        return None
    return torch.ops.razor_dist_cpu


def _library() -> Path:
    """Return the compiled library; one process compiles it, others wait.

    `OSError` or `subprocess.SubprocessError` if it cannot be compiled or kept.
    """
    from filelock import FileLock

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = caches / "razor_dist" / f"cpu-{_key()}.so"
    if target.is_file():
        return target
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise OSError("there is no C++ compiler (docs/install.md)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.is_file():
            print("razor_dist: compiling kernels for this CPU, once", file=sys.stderr, flush=True)
            partial = target.with_suffix(".partial")
            source = str(_SOURCES / "library.cpp")
            command = [compiler, *_FLAGS.split(), source, "-o", str(partial), *_torch()]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE)
            partial.rename(target)
    return target


def _torch() -> Iterator[str]:
    from torch.utils.cpp_extension import include_paths, library_paths

    for folder in include_paths():
        yield from ("-isystem", folder)
    for folder in library_paths():
        yield f"-L{folder}"
    yield from ("-lc10", "-ltorch_cpu")


def _key() -> str:
    """Name all that the library depends on."""
    digest = hashlib.sha256(f"{_FLAGS} {torch.__version__} {platform.machine()}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    # A cache folder may be shared by machines of different processors.
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    told = "flags", "Features", "model name"
    digest.update("".join(sorted({line for line in lines if line.startswith(told)})).encode())
    return digest.hexdigest()[:16]
