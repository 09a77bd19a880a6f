"""Optional packages: how to install them where this package is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

_NAME = "razor-dist"


def install_command(extra: str, folder: Path = Path(__file__).parents[2]) -> str:
    """Return the pip command that installs an extra's packages.

    If ``folder``, where this package is, is a checkout, the command names it, and no copy of one,
    such as Ray makes for a job; else, since no index has this package, the packages.
    """
    if (folder / "pyproject.toml").is_file() and (folder / ".git").exists():
        return f"pip install -e '{folder}[{extra}]'"
    try:
        return " ".join(["pip install", *(f"'{package}'" for package in _packages(extra))])
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in a checkout"


def _packages(extra: str) -> list[str]:
    found: list[str] = []
    for line in requires(_NAME) or ():
        one = Requirement(line)
        if one.marker is None or not one.marker.evaluate({"extra": extra}):
            continue
        if one.name == _NAME:  # an extra of extras
            found += [package for inner in sorted(one.extras) for package in _packages(inner)]
        elif not one.marker.evaluate({"extra": ""}):
            one.marker = None
            found.append(str(one))
    return found
