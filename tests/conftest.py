"""Fixtures: pools of real rank processes, and tiny models made once per session."""

from __future__ import annotations

import os

# Read as torch is loaded, here and in the processes that tests start: threads that spin while they
# wait for one that has no core took three times the CPU, and up to ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from razor_dist.config.logs import LOG_ENV
from tests import alibi_models, preloaded
from tests.alibi_models import make_alibi
from tests.ranks import RankPool, Ranks
from tests.tiny_models import Tiny, make_tiny
from tests.tokenizer import write_letters
from tests.triton_processes import pool_that

preloaded.install()
# Ranks of modules in this folder are started without the working directory on their path.
_path = [str(preloaded.ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_path))


@pytest.fixture(autouse=True)
def _threads() -> None:
    # As many test processes as cores: threads of one would wait for those of another. For each
    # test, since commands that compute in this process set their own number.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logs() -> None:
    # Commands that run in this process have set them for the processes that they start; a server
    # that is started by a later test would not tell what it waits for.
    for name in LOG_ENV:
        os.environ.pop(name, None)


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of tests that are coroutines, which anyio runs (Starlette brings it)."""
    return "asyncio"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """``ranks(P)``: a pool of P rank processes, the same one each time."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size in pools and pools[size].failed:
            pools.pop(size).close()  # its ranks may be in the midst of a collective
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """``tiny(family)``: the folder of a tiny random model."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            make = make_alibi if family in alibi_models.FAMILIES else make_tiny
            made[family] = make(family, tmp_path_factory.mktemp("tiny") / family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama that knows letters."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("letters") / "tiny-llama")
    write_letters(folder)
    return folder


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    yield from pool_that(interprets=True)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    yield from pool_that(interprets=False)
