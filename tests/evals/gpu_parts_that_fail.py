"""Parts for ``bench gpu`` that go wrong in every way that a part on a GPU can."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from razor_dist.evals.bench.gpu import Bench, Parts, Skipped
from razor_dist.evals.bench.measure import Table
from razor_dist.evals.bench.sweep import sweep

PartResult = tuple[dict[str, Any], list[Table]]


def good(bench: Bench) -> Iterator[PartResult]:
    yield {"process": os.getpid(), "left": bench.left}, [Table("One:", [["a"], ["first row"]])]
    yield {"more": 2}, []


def hangs(bench: Bench) -> Iterator[PartResult]:
    yield {"before": 1}, []
    time.sleep(60)


def raises(bench: Bench) -> Iterator[PartResult]:
    yield {"before": 1}, []
    raise RuntimeError("CUDA error: an illegal memory access\nmore")


def crashes(bench: Bench) -> Iterator[PartResult]:
    yield {"before": 1}, []
    os.abort()


def absent(bench: Bench) -> Iterator[PartResult]:
    yield {"before": 1}, []
    raise Skipped("needs a CUDA device")


PARTS: Parts = {
    "good": (good, 20),
    "raises": (raises, 20),
    "absent": (absent, 20),
    "good again": (good, 20),
    "crashes": (crashes, 20),
    "hangs": (hangs, 1),
    "last": (good, 20),
}


def swept(seconds: float) -> list[dict[str, Any]]:
    bench = Bench(torch.device("cpu"), time.monotonic() + seconds)
    return [figures for figures, _ in sweep(bench, (128,))]


if __name__ == "__main__":
    print(json.dumps([swept(300), swept(-1)]))
