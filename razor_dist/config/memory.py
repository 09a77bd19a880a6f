"""The memory that this process occupies."""

from __future__ import annotations

import re
from pathlib import Path


def resident_bytes() -> tuple[int, int]:
    """Resident bytes of this process now, and the most since it started.

    Pages that processes share, such as the libraries' and mapped weights, count in each of them.
    """
    # Not `getrusage`, whose peak outlives exec: it would be our parent's.
    status = Path("/proc/self/status").read_text()
    fields = dict(re.findall(r"(VmRSS|VmHWM):\s*(\d+) kB", status))
    now, peak = (1024 * int(fields[name]) for name in ("VmRSS", "VmHWM"))
    return now, max(now, peak)
