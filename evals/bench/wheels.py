"""Unpack the wheels of a folder that are not installed here: no network, no pip, no environment.

``python evals/bench/wheels.py WHEELS TARGET``; TARGET then belongs on the path. This file imports
nothing of the package, whose dependencies may be among the wheels.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def unpack_missing(wheels: Path, target: Path) -> list[str]:
    """Unpack into ``target``, and return the packages' names; what is installed stays in use."""
    unpacked = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            version(name)
        except PackageNotFoundError:
            # Not once more: another run may have its libraries in use.
            if not any(target.glob(f"{name}-*.dist-info")):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(target)
            unpacked.append(name)
    return unpacked


def hide_kernels(target: Path) -> None:
    """Have transformers take Hugging Face's package ``kernels`` for one that it cannot use.

    The checkout's own folder ``kernels`` comes before it on the path, and transformers would import
    names from there that it does not have. ``target`` comes before the installed packages, so that
    the version is what stands there.
    """
    about = target / "kernels-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0\n")


if __name__ == "__main__":
    found = unpack_missing(*map(Path, sys.argv[1:]))
    hide_kernels(Path(sys.argv[2]))
    print("not installed here, taken from wheels:", ", ".join(found) or "nothing")
