"""Paged storage of retrieval keys and values: this rank's shard of every sequence.

A page holds ``page_size`` tokens of all retrieval heads of all layers. A sequence's pages are
taken when it is admitted, contiguous where the pool allows it, so that attention reads plain
views. Where they are not, a long run of pages is one more segment to merge, and short runs are
copied together, some thousand tokens at a time: a segment for every page would be a kernel each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from razor_dist.config.errors import EngineError
from razor_dist.kernels.quantized import (
    Codes,
    KeysOrValues,
    code_width,
    has_scale,
    packed,
    packed_width,
    quantize,
    unpacked,
)

# Shorter runs of pages than this many tokens are copied together, up to this many tokens at
# a time: a call for each run costs more than the copy (docs/LOG.md).
_LONG_RUN = 512
_COPIED = 4096

# Slots of the pool: a run of them, or int64 ``[n]`` in any order.
Span = slice | Tensor


@dataclass
class PageTable:
    """One sequence's pages on this rank."""

    pages: list[int] = field(default_factory=list)  # in the order in which tokens fill them
    tokens: int = 0  # stored so far; their order does not matter: keys are stored rotated
    cached: bool = False  # not in use: it may be evicted

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs of consecutive pages: index in the table and number of the first, and how many.

        Found once: every decode step asks, and a million tokens have thousands of pages on a rank.
        """
        begins = np.flatnonzero(np.diff(self.numbers, prepend=-2) != 1)
        counts = np.diff(begins, append=len(self.pages))
        found = begins.tolist(), self.numbers[begins].tolist(), counts.tolist()
        return list(zip(*found, strict=True))

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The pages as int64 ``[n]``, made once: rank 0 asks for those of hundreds of sequences."""
        return np.asarray(self.pages, np.int64)


def held_by(tables: Iterable[PageTable], num_pages: int) -> npt.NDArray[np.bool_]:
    """Return which of a pool's pages any of the tables holds, ``[num_pages]``."""
    held = np.zeros(num_pages, np.bool_)
    for table in tables:
        held[table.numbers] = True
    return held


class PagePool:
    """Keys and values of the retrieval heads, in pages with reference counts.

    A page is free, cached (only tables that are not in use hold it) or in use.

    ``rows`` counts the retrieval KV heads of all layers together, layer by layer; the pool has
    ``num_pages`` pages of ``page_size`` tokens.

    With a ``dtype`` of codes, codes and scales lie in tensors of their own, as the kernels that
    decode on CUDA want them. What is written is packed (`razor_dist.kernels.quantized`).

    ``track_positions`` notes where the tokens stand, for heads that are biased by distance.
    """

    def __init__(
        self,
        rows: int,
        num_pages: int,
        page_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        track_positions: bool = False,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        # Of one page more than is lent, where a step of fixed shape writes what is not kept here.
        self.dummy_slot = num_pages * page_size
        shape = (rows, self.dummy_slot + page_size, code_width(head_dim, dtype))
        # torch.empty: memory that no token has touched yet is not resident on CPU.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.width = packed_width(head_dim, dtype)  # of a key, as `read` gives it
        self.k_scale: Tensor | None = None  # float32 [rows, slots], where they are codes
        self.v_scale: Tensor | None = None
        if has_scale(dtype):
            self.k_scale, self.v_scale = (torch.empty(shape[:2], device=device) for _ in "kv")
        self.positions: Tensor | None = None  # of each slot's token in its sequence, int64
        if track_positions:
            self.positions = torch.zeros(shape[1], dtype=torch.int64, device=device)

    # Made on first use: plans make pools of any size to ask for their bytes alone.
    @cached_property
    def references(self) -> npt.NDArray[np.int32]:
        """The number of tables that hold each page."""
        return np.zeros(self.num_pages, np.int32)

    @cached_property
    def _users(self) -> npt.NDArray[np.int32]:
        """The number of tables in use that hold each page."""
        return np.zeros(self.num_pages, np.int32)

    @property
    def _stores(self) -> list[Tensor]:
        """All that a token of every row has, ``[rows, slots, ...]``."""
        return [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]

    @property
    def page_bytes(self) -> int:
        return self.reserved_bytes // (self.num_pages + 1)

    @property
    def reserved_bytes(self) -> int:
        positions = 0 if self.positions is None else self.positions.nbytes
        return sum(store.nbytes for store in self._stores) + positions

    @property
    def free_pages(self) -> int:
        """Pages that no table holds."""
        return self.num_pages - int(np.count_nonzero(self.references))

    @property
    def available_pages(self) -> int:
        """Pages that are free, or would be if all that is cached were evicted."""
        return self.num_pages - int(np.count_nonzero(self._users))

    @property
    def used_bytes(self) -> int:
        return (self.num_pages - self.available_pages) * self.page_bytes

    @property
    def cached_bytes(self) -> int:
        return (self.available_pages - self.free_pages) * self.page_bytes

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> PageTable:
        """Take pages for ``tokens`` tokens: the first free run that is long enough, or pieces.

        `EngineError` if the pool is too small: a bug, for the scheduler admits only what fits.
        """
        return PageTable(self._take(self.pages_for(tokens)))

    def _take(self, need: int) -> list[int]:
        free = np.flatnonzero(self.references == 0)
        if need > len(free):
            raise EngineError(f"{need} KV pages needed, {len(free)} free")
        # Where a run of consecutive free pages begins and ends, as indices of ``free``.
        edges = np.flatnonzero(np.diff(free, prepend=-2, append=self.num_pages + 1) > 1)
        long = np.flatnonzero(np.diff(edges) >= need)
        begin = edges[long[0]] if len(long) else 0
        pages = free[begin : begin + need]
        self.references[pages] = self._users[pages] = 1
        taken: list[int] = pages.tolist()
        return taken

    def release(self, table: PageTable) -> None:
        """Give a sequence's pages back; a page that a fork still holds stays."""
        self._drop(table, 0)
        table.tokens = 0

    def _drop(self, table: PageTable, kept: int) -> None:
        """Give back all of a table's pages but the first ``kept``."""
        pages = table.numbers[kept:]
        self.references[pages] -= 1
        if not table.cached:
            self._users[pages] -= 1
        table.pages = table.pages[:kept]
        for made in ("runs", "numbers"):
            table.__dict__.pop(made, None)

    def cache(self, table: PageTable) -> None:
        """Mark a sequence as cached: not in use. Pages that it has not filled become free."""
        self._drop(table, self.pages_for(table.tokens))
        self._users[table.numbers] -= 1
        table.cached = True

    def exclusive_pages(self, table: PageTable) -> int:
        """The number of pages that only this table holds."""
        return int(np.count_nonzero(self.references[table.numbers] == 1))

    def unused_pages(self, *tables: PageTable) -> int:
        """The number of the tables' pages that no table in use holds."""
        return int(np.count_nonzero(held_by(tables, self.num_pages) & (self._users == 0)))

    def fork(self, table: PageTable, stored: int, tokens: int) -> PageTable:
        """Return a table with the first ``stored`` tokens, and room for ``tokens`` in all.

        Full pages are shared; the partly filled one is copied, for both sequences write to it.
        """
        shared = stored // self.page_size
        own = self._take(max(0, self.pages_for(max(tokens, stored)) - shared))
        pages = table.numbers[:shared]
        self.references[pages] += 1
        self._users[pages] += 1
        rest = stored - shared * self.page_size
        if rest:
            source, target = table.pages[shared] * self.page_size, own[0] * self.page_size
            for store in self._stores:
                store[:, target : target + rest] = store[:, source : source + rest]
            if self.positions is not None:
                self.positions[target : target + rest] = self.positions[source : source + rest]
        return PageTable(table.pages[:shared] + own, stored)

    def extents(self, table: PageTable, begin: int, end: int) -> list[tuple[int, int]]:
        """Slots ``[a, b)`` of the pool for the table's tokens ``begin`` to ``end``."""
        extents: list[tuple[int, int]] = []
        size = self.page_size
        for index, page, count in table.runs:
            a, b = max(begin, index * size), min(end, (index + count) * size)
            if a < b:
                moved = (page - index) * size
                extents.append((a + moved, b + moved))
        return extents

    def slot(self, table: PageTable, token: int) -> int:
        page, offset = divmod(token, self.page_size)
        return table.pages[page] * self.page_size + offset

    def slots(self, table: PageTable, tokens: Tensor) -> Tensor:
        """Slots of the table's tokens, both int64 ``[n]``, on the CPU."""
        pages = torch.from_numpy(table.numbers)
        return pages[tokens // self.page_size] * self.page_size + tokens % self.page_size

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return new keys and values ``[K, n, D]`` as they are kept, and travel.

        Attention uses these even for the step's own tokens, so that its result does not depend on
        which keys have been through a cache or a link.
        """
        if self.k_scale is not None:
            return quantize(k, self.k.dtype).packed(), quantize(v, self.k.dtype).packed()
        return k.to(self.k.dtype), v.to(self.k.dtype)

    def _parts(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return what of keys and values goes to each of `_stores`."""
        both = [unpacked(k), unpacked(v)]
        codes = [x for x in both if isinstance(x, Codes)]
        return [x.codes for x in codes] + [x.scale for x in codes] if codes else [k, v]

    def at(self, rows: slice, span: Span) -> tuple[KeysOrValues, KeysOrValues]:
        """Return the keys and values ``[K, n, D]`` in some slots: views of a run of them."""
        return self.keys(rows, span), _read(self.v, self.v_scale, rows, span)

    def keys(self, rows: slice, span: Span) -> KeysOrValues:
        """Return the keys alone."""
        return _read(self.k, self.k_scale, rows, span)

    def write(self, rows: slice, extents: list[tuple[int, int]], k: Tensor, v: Tensor) -> None:
        """Keep one layer's ``k`` and ``v``, as `stored` gives them, in the slots of ``extents``."""
        for store, new in zip(self._stores, self._parts(k, v), strict=True):
            done = 0
            for a, b in extents:
                store[rows, a:b] = new[:, done : done + b - a]
                done += b - a

    def read(self, table: PageTable, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Copy all rows' keys and values of the table's tokens ``begin`` to ``end``, packed."""
        spans = [slice(0, 0), *(slice(a, b) for a, b in self.extents(table, begin, end))]
        parts = [map(packed, self.at(slice(None), at)) for at in spans]
        k, v = (torch.cat(found, dim=1) for found in zip(*parts, strict=True))
        return k, v

    def place(self, extents: list[tuple[int, int]], positions: Tensor) -> None:
        """Note the ``positions`` (int64 ``[n]``) of the tokens in the slots of ``extents``."""
        assert self.positions is not None
        for (a, b), part in zip(extents, positions.split([b - a for a, b in extents]), strict=True):
            self.positions[a:b] = part

    def put(self, rows: slice, at: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep ``k`` and ``v``, as `stored` gives them, in the slots ``at`` (int64 ``[n]``)."""
        for store, new in zip(self._stores, self._parts(k, v), strict=True):
            store[rows].index_copy_(1, at, new)

    def spans(self, table: PageTable, begin: int, end: int) -> list[Span]:
        """Slots for the table's tokens ``begin`` to ``end``, in order, in few parts to read."""
        spans: list[Span] = []
        short: list[tuple[int, int]] = []

        def copy_short() -> None:
            if len(short) == 1:
                spans.append(slice(*short[0]))
            elif short:
                slots = torch.cat([torch.arange(a, b) for a, b in short]).to(self.k.device)
                spans.extend(slots.split(_COPIED))
            short.clear()

        for a, b in self.extents(table, begin, end):
            if b - a < _LONG_RUN:
                short.append((a, b))
            else:
                copy_short()
                spans.append(slice(a, b))
        copy_short()
        return spans

    def segments(self, rows: slice, spans: Sequence[Span]) -> Segments:
        return Segments(self, rows, spans)


def _read(store: Tensor, scale: Tensor | None, rows: slice, span: Span) -> KeysOrValues:
    found = store[rows, span]
    return found if scale is None else Codes(found, scale[rows, span])


class Segments(Sequence[tuple[KeysOrValues, KeysOrValues]]):
    """Pairs ``(k, v)``, each ``[K, n, D]``: views, or copies that are made when they are read."""

    def __init__(self, pool: PagePool, rows: slice, spans: Sequence[Span]) -> None:
        self._pool, self._rows, self._spans = pool, rows, spans

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        return self._pool.at(self._rows, self._spans[index])
