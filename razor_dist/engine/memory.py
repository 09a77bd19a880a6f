"""The memory that this process occupies."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> tuple[int, int]:
    """Resident bytes of this process now, and the most since it started.

    Pages that processes share, such as the libraries' and mapped weights, count in each of them.
    """
    if _STATUS.exists():
        # Linux. Not `getrusage`, whose peak outlives exec: it would be our parent's.
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return now, max(now, peak)
    import psutil

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return psutil.Process().memory_info().rss, peak * unit
