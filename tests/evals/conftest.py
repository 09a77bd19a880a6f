"""Commands of ``eval`` on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from razor_dist import cli


@pytest.fixture
def evaluate(letters: Path, tmp_path: Path) -> Callable[..., int]:
    """Return a function that runs a suite with flags; without ``--out`` results are in ``out``."""

    def run(suite: str, flags: str, out: Path = tmp_path / "out") -> int:
        shared = f"--model {letters} --no-ray --window-min 64 --block 16 --out {out}"
        return cli.main(["eval", suite, *shared.split(), *flags.split()])

    return run
