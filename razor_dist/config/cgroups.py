"""The cgroups of this process, which may give it less than the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def own_cgroups(
    controller: str, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and all above it, version 1 or 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controllers
        group = root / path.lstrip("/")
        # In a container the path may be the host's, and the root the container's own cgroup.
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(root):
                break
            yield folder
