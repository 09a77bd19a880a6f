"""The page pool: no page is lost, shared or overwritten by accident."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from razor_dist.cache.pages import PagePool, PageTable, held_by
from razor_dist.config.errors import EngineError
from razor_dist.kernels.quantized import INT4, INT8, Codes, packed, unpacked
from razor_dist.parallel.sharding import owner_of, shard_positions
from razor_dist.parallel.zigzag import Chunk, chunks

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
            self.live.append((self.pool.fork(table, table.tokens, total), list(content)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.live:
            chosen = data.draw(st.sampled_from(range(len(self.live))))
            self.pool.release(self.live.pop(chosen)[0])

    @invariant()
    def content_is_intact(self) -> None:
        for table, content in self.live:
            segments = self.pool.segments(slice(0, ROWS), self.pool.spans(table, 0, table.tokens))
            assert sum(k.shape[1] for k, _ in segments) == len(content)
            read = [x for k, _ in segments for x in k[1, :, 2].tolist()]
            assert read == content
            assert [x for _, v in segments for x in v[0, :, 0].tolist()] == [-x for x in content]

    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        if self.live:
            table, _ = data.draw(st.sampled_from(self.live))
            if not table.cached:
                self.pool.cache(table)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        held = {page for table, _ in self.live for page in table.pages}
        assert self.pool.free_pages == PAGES - len(held)
        assert set(np.flatnonzero(held_by((t for t, _ in self.live), PAGES)).tolist()) == held
        used = {page for table, _ in self.live if not table.cached for page in table.pages}
        assert self.pool.used_bytes == len(used) * 2 * ROWS * SIZE * DIM * 4
        for table, _ in self.live:
            assert table.numbers.tolist() == table.pages and table.numbers is table.numbers
            others = {page for t, _ in self.live if t is not table for page in t.pages}
            assert self.pool.exclusive_pages(table) == len(set(table.pages) - others)
            assert self.pool.unused_pages(table) == len(set(table.pages) - used)
        # What a step writes to the spare page is in nobody's way.
        self.pool.put(slice(0, ROWS), torch.tensor([self.pool.dummy_slot]), *NOISE)


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


def test_a_fork_copies_the_page_that_both_will_write_to() -> None:
    pool = make_pool()
    pool.k.normal_()
    pool.v.normal_()
    first = pool.allocate(2 * SIZE)
    first.tokens = SIZE + 1
    other = pool.fork(first, first.tokens, 3 * SIZE)
    assert other.pages[0] == first.pages[0] and other.pages[1] != first.pages[1]
    [(a, _)], [(b, _)] = (pool.extents(table, SIZE, SIZE + 1) for table in (first, other))
    for store in (pool.k, pool.v):
        assert (store[:, a] == store[:, b]).all()
        store[:, a] = 0.0  # what one of them writes, the other does not see
        assert (store[:, b] != 0).all()


@pytest.mark.parametrize(("dtype", "steps", "width"), [(INT8, 127, 8), (INT4, 7.5, 4)])
def test_codes_are_read_as_they_were_written(dtype: torch.dtype, steps: float, width: int) -> None:
    """A long run of pages is read in place; scattered ones are copied, 4,096 tokens at a time."""
    long, single = 150, 1100  # pages
    cpu = torch.device("cpu")
    pool = PagePool(ROWS, 2 * single + long, SIZE, 8, dtype=dtype, device=cpu)
    begin = pool.allocate(long * SIZE)
    held = [pool.allocate(SIZE) for _ in range(2 * single)]
    for table in (begin, *held[1::2]):
        pool.release(table)
    table = pool.allocate((long + single) * SIZE)
    table.tokens = len(table.pages) * SIZE - 3
    new = torch.randn(2, ROWS, table.tokens, 8) * 10 ** torch.arange(-2.0, 6.0)
    new[0, 0, 1] = 0.0
    k, v = pool.stored(*new)
    codes = unpacked(k)
    assert isinstance(codes, Codes)
    rounded, want = codes.transform(codes.to(torch.float32)), codes.transform(new[0])
    assert ((rounded - want).abs() <= 0.501 / steps * want.abs().amax(-1, keepdim=True)).all()
    rows, last = slice(0, ROWS), table.tokens - 1
    pool.write(rows, pool.extents(table, 0, last), k[:, :-1], v[:, :-1])
    pool.put(rows, torch.tensor([pool.slot(table, last)]), k[:, -1:], v[:, -1:])
    pool.release(held[0])
    copy = pool.fork(table, last - 1, last - 1)
    for of, tokens in ((table, last + 1), (copy, last - 1)):
        segments = pool.segments(rows, pool.spans(of, 0, tokens))
        assert len(segments) == 3
        parts = [torch.cat(list(map(packed, x)), 1) for x in zip(*segments, strict=True)]
        for found in (parts, pool.read(of, 0, tokens)):
            assert torch.equal(found[0], k[:, :tokens]) and torch.equal(found[1], v[:, :tokens])
    assert pool.page_bytes == 2 * ROWS * SIZE * (width + 4)


def test_positions_are_kept_and_counted_where_they_are_wanted() -> None:
    plain = make_pool()
    assert plain.positions is None
    track_positions = PagePool(
        ROWS,
        PAGES,
        SIZE,
        DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        track_positions=True,
    )
    assert track_positions.positions is not None
    assert track_positions.reserved_bytes == plain.reserved_bytes + track_positions.positions.nbytes
    assert track_positions.page_bytes == plain.page_bytes + 8 * SIZE
    table = track_positions.allocate(6)
    track_positions.place(track_positions.extents(table, 0, 6), torch.arange(10, 16))
    table.tokens = 6
    copy = track_positions.fork(table, 6, 8)
    held = [track_positions.positions[a:b].tolist() for a, b in track_positions.extents(copy, 0, 6)]
    assert [p for extent in held for p in extent] == list(range(10, 16))
    assert track_positions.used_bytes == 3 * track_positions.page_bytes


@given(
    world=st.integers(1, 4),
    prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=3),
    cut=st.integers(1, 20),
)
def test_a_shard_holds_the_positions_that_it_was_given(
    world: int, prompts: list[tuple[int, int]], cut: int
) -> None:
    """Prompts in chunks, each followed by decoded tokens; a continued one begins behind those."""
    shards: list[list[int]] = [[] for _ in range(world)]
    done: list[Chunk] = []
    end = 0
    for tokens, decoded in prompts:
        for chunk in chunks(end, end + tokens, cut, world):
            assert all(p < chunk.begin for shard in shards for p in shard)
            for rank in range(world):
                for part in chunk.owned(rank):
                    shards[rank] += range(part.begin, part.end)
            done.append(chunk)
        end += tokens
        for position in range(end, end + decoded):
            shards[owner_of(position, world)].append(position)
        end += decoded
        for rank in range(world):
            runs = shard_positions(done, end, rank, world)
            assert [p for run in runs for p in run] == shards[rank]
    assert shard_positions([], 0, 0, world) == []


def test_more_than_the_pool_holds_is_refused() -> None:
    with pytest.raises(EngineError, match="13 KV pages needed, 12 free"):
        make_pool().allocate(50)
