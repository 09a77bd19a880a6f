"""The memory that this process occupies, and the memory that is free for it."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path

import psutil

from razor_dist.config.cgroups import CGROUPS, MEMBERSHIP, own_cgroups


def resident_bytes() -> tuple[int, int]:
    """Resident bytes of this process now, and the most since it started.

    Pages that processes share, such as the libraries' and mapped weights, count in each of them.
    """
    # Not `getrusage`, whose peak outlives exec: it would be our parent's.
    status = Path("/proc/self/status").read_text()
    fields = dict(re.findall(r"(VmRSS|VmHWM):\s*(\d+) kB", status))
    now, peak = (1024 * int(fields[name]) for name in ("VmRSS", "VmHWM"))
    return now, max(now, peak)


def die_first() -> None:
    """Have the kernel end this process before others when memory is short (Linux)."""
    with contextlib.suppress(OSError):  # raising it needs no rights
        Path("/proc/self/oom_score_adj").write_text("1000")


def free_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the host's free memory in bytes, or less if this process's cgroups limit it."""
    left = map(_left, own_cgroups("memory", cgroups, membership))
    return int(max(0, min([psutil.virtual_memory().available, *left])))


def _left(folder: Path) -> float:
    """Return the bytes below a cgroup's limit; infinity if it has none.

    Inactive file cache counts as free, since the kernel reclaims it.
    """
    try:
        if (limits := folder / "memory.max").is_file():  # version 2
            limit, used = limits.read_text(), (folder / "memory.current").read_text()
        else:
            limit = (folder / "memory.limit_in_bytes").read_text()
            used = (folder / "memory.usage_in_bytes").read_text()
        # In version 1 the last match, total_inactive_file, includes child cgroups.
        idle = re.findall(r"inactive_file (\d+)", (folder / "memory.stat").read_text())[-1:]
        return math.inf if limit.strip() == "max" else int(limit) - int(used) + sum(map(int, idle))
    except (OSError, ValueError):
        return math.inf
