"""The processor cores that this process may use, and settings of the libraries that use them."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

from razor_dist.config.cgroups import CGROUPS, MEMBERSHIP, own_cgroups

# Turns of its waiting loop before an OpenMP thread sleeps: 0.1 to 0.5 ms, which covers the gaps
# between the operations of a decode step. GNU's default, 300,000, is 28 ms on some machines. If
# another program has a core, that time is taken from the thread for which the others wait.
_SPINS = "5000"
# Products that oneDNN, and torch's calls of it, keep compiled, each for one number of rows and one
# matrix, in 0.55 MB. Prompts have any number of rows: with the default of 1,024 a rank that read a
# million tokens grew by 0.4 GB. To compile one takes 0.6 ms, once in a step for all layers.
_PRODUCTS = "128"


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the number of cores that this process can keep busy at once, at least 1.

    The smallest of the processors it may be scheduled on and the CPU quotas of its cgroups,
    rounded up. A container with a quota of 1.5 CPUs sees all processors of its host.
    """
    found = map(_quota, own_cgroups("cpu", cgroups, membership))
    quotas = [quota for quota in found if quota > 0]
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *quotas])))


def _quota(folder: Path) -> float:
    """Return a cgroup's quota in CPUs; infinity if it has none."""
    try:
        if (limits := folder / "cpu.max").is_file():  # version 2
            quota, period = limits.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def set_library_defaults(env: MutableMapping[str, str]) -> None:
    """Set what torch's libraries read from the environment, for less waiting and less memory.

    OpenMP's threads sleep after a fraction of a millisecond without work, and oneDNN keeps fewer
    compiled products. ``env`` is the environment of a process that has not loaded torch yet.
    Settings of the user's own are kept.
    """
    if not env.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        env["GOMP_SPINCOUNT"] = _SPINS
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        env.setdefault(cache, _PRODUCTS)
