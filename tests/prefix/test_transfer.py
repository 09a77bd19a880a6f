"""The parts of a stored prefix that a rank reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from razor_dist.parallel.sharding import held_positions
from razor_dist.parallel.zigzag import Chunk
from razor_dist.prefix.manifest import Manifest
from razor_dist.prefix.transfer import LoadJob, Transfers

CHUNKS, SIZE = [Chunk(0, 777, 4)], 4  # of the sequence that is filled


def node(world: int, begin: int, end: int, parts: int) -> Manifest:
    rows = Manifest.rows_of([Chunk(0, end, world)], begin, end)
    return Manifest("f", "n", "c", None, begin, end, "s", world, rows, (), parts, (), (), 0, "")


def assert_read(rank: int, parts: int) -> None:
    """Assert that a rank reads its tokens, each from where it is in the parts."""
    chain = [node(3, 0, 500, parts), node(2, 400, 777, parts)]
    comm: Any = SimpleNamespace(rank=rank, size=SIZE)
    sequence: Any = SimpleNamespace(chunks=CHUNKS)
    caches: Any = None
    reads = Transfers(comm, caches, None)._reads(sequence, LoadJob(chain, [400, 777], False, (), 0))
    mine = held_positions(CHUNKS, 0, 777, rank, SIZE)
    found: list[int] = []
    for read in reads:
        of, positions = chain[read.node], read.positions.numpy()
        held = held_positions(of.layout, of.begin, of.end, read.rank, of.world_size)
        part = held[len(held) * read.part // parts :][: read.tokens]
        assert np.array_equal(part[read.take.numpy()], positions)
        assert np.array_equal(mine[read.at.numpy()], positions)
        found += positions.tolist()
    assert sorted(found) == mine.tolist()


def test_what_a_rank_looks_at_does_not_grow_with_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million tokens are thousands of parts, and running answers wait meanwhile."""
    looked: list[int] = []
    isin, searchsorted = np.isin, np.searchsorted
    monkeypatch.setattr(
        np, "isin", lambda a, b, **how: looked.append(len(a) + len(b)) or isin(a, b, **how)
    )
    monkeypatch.setattr(
        np, "searchsorted", lambda a, v: looked.append(len(v)) or searchsorted(a, v)
    )
    each = []
    for parts in (1, 50):
        looked.clear()
        for rank in range(SIZE):
            assert_read(rank, parts)
        each.append(sum(looked))
    assert each[0] == each[1]
