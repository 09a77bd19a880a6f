"""The page pool: no page is lost, shared or overwritten by accident."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from razor_dist.cache.pages import PagePool, PageTable
from razor_dist.errors import EngineError

ROWS, SIZE, PAGES, DIM = 2, 4, 12, 3
NOISE = (torch.full((ROWS, 1, DIM), math.nan),) * 2


def make_pool() -> PagePool:
    return PagePool(ROWS, PAGES, SIZE, DIM, dtype=torch.float32, device=torch.device("cpu"))


class PoolMachine(RuleBasedStateMachine):
    """Random opens, writes, forks and releases against a model of plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.live: list[tuple[PageTable, list[float]]] = []
        self.counter = 0.0

    @rule(tokens=st.integers(0, 20))
    def open(self, tokens: int) -> None:
        if self.pool.pages_for(tokens) <= self.pool.free_pages:
            self.live.append((self.pool.allocate(tokens), []))

    @rule(data=st.data(), count=st.integers(1, 6))
    def write(self, data: st.DataObject, count: int) -> None:
        if not self.live:
            return
        table, content = data.draw(st.sampled_from(self.live))
        count = min(count, len(table.pages) * SIZE - table.tokens)
        if count <= 0:
            return
        values = [self.counter + i for i in range(count)]
        self.counter += count
        k = torch.tensor(values).view(1, -1, 1).expand(ROWS, count, DIM)
        begin, end = table.tokens, table.tokens + count
        if data.draw(st.booleans()):
            self.pool.write(slice(0, ROWS), self.pool.extents(table, begin, end), k, -k)
        else:
            at = torch.tensor([self.pool.slot(table, token) for token in range(begin, end)])
            self.pool.put(slice(0, ROWS), at, k, -k)
        table.tokens += count
        content += values

    @rule(data=st.data(), extra=st.integers(0, 9))
    def fork(self, data: st.DataObject, extra: int) -> None:
        if not self.live:
            return
        table, content = data.draw(st.sampled_from(self.live))
        total = table.tokens + extra
        if self.pool.pages_for(total) - table.tokens // SIZE <= self.pool.free_pages:
            self.live.append((self.pool.fork(table, total), list(content)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.live:
            chosen = data.draw(st.sampled_from(range(len(self.live))))
            self.pool.release(self.live.pop(chosen)[0])

    @invariant()
    def content_is_intact(self) -> None:
        for table, content in self.live:
            segments = self.pool.segments(slice(0, ROWS), self.pool.extents(table, 0, table.tokens))
            assert sum(k.shape[1] for k, _ in segments) == len(content)
            read = [x for k, _ in segments for x in k[1, :, 2].tolist()]
            assert read == content
            assert [x for _, v in segments for x in v[0, :, 0].tolist()] == [-x for x in content]

    @invariant()
    def pages_are_accounted_for(self) -> None:
        held = {page for table, _ in self.live for page in table.pages}
        assert self.pool.free_pages == PAGES - len(held)
        assert self.pool.used_bytes == len(held) * 2 * ROWS * SIZE * DIM * 4
        # What a step writes to the spare page is in nobody's way.
        self.pool.put(slice(0, ROWS), torch.tensor([self.pool.spare]), *NOISE)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, deadline=None)


def test_an_admitted_sequence_is_one_contiguous_run_if_the_pool_allows_it() -> None:
    pool = make_pool()
    a, b, c = (pool.allocate(n) for n in (8, 8, 8))
    pool.release(b)
    d = pool.allocate(16)
    assert pool.extents(d, 0, 16) == [(24, 40)]
    assert pool.extents(pool.allocate(16), 0, 16) == [(8, 16), (40, 48)]
    assert pool.free_pages == 0
    assert a.pages == [0, 1]
    assert c.pages == [4, 5]


def test_pages_are_cleared_when_they_are_taken_if_that_is_asked_for() -> None:
    pool = PagePool(ROWS, 4, SIZE, DIM, dtype=torch.float32, device=torch.device("cpu"), clear=True)
    for store in (pool.k, pool.v):
        store.fill_(math.nan)
    first = pool.allocate(6)
    assert pool.extents(first, 0, 8) == [(0, 8)]
    first.tokens = 6
    other = pool.fork(first, 9)
    for store in (pool.k, pool.v):
        assert (store[:, :16] == 0).all()
        assert store[:, 16:].isnan().all()
    pool.put(slice(0, ROWS), torch.tensor([14]), *NOISE)
    pool.release(first)
    pool.release(other)
    again = pool.allocate(16)
    assert again.pages == [0, 1, 2, 3]
    assert (pool.k[:, :16] == 0).all()


def test_more_than_the_pool_holds_is_refused() -> None:
    with pytest.raises(EngineError, match="13 KV pages needed, 12 free"):
        make_pool().allocate(50)
