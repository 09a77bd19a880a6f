"""Attention of retrieval heads that read the blocks of keys which their queries choose.

`razor_dist.kernels.chosen` has the rule; here are the tokens of a step, and the ranks. First every
rank attends to the blocks of its shard that are always read, and the ranks add up these masses.
Then a query chooses blocks by the slower half of every key before it, and every rank attends to the
chosen blocks of its shard. Keys and values stay where they are.

* Of a chunk each rank has queries of its own (`attend_chunk`). They travel to all ranks, and so do
  the slower halves of all keys, in 8 bits, and what the queries have chosen. Tables of what all
  queries of a long text choose are large: KV heads are taken a few at a time.
* Tokens that all ranks compute (`attend_together`) are few, so that what the ranks find in their
  shards is sent: the largest score of each block. A layer takes three all-gathers for any
  number of sequences.

The result is the same for any number of ranks and any cut of a prompt but for rounding. Letters are
those of `razor_dist.kernels.chosen`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.attention.step import BlockReader
from razor_dist.cache.pages import PagePool
from razor_dist.kernels import Partial, empty_partial, joined, merge
from razor_dist.kernels.chosen import (
    BlockChoice,
    Shard,
    attend_chosen,
    blocks_of,
    choose,
    index_of,
    largest,
)
from razor_dist.kernels.quantized import (
    INT8,
    KeysOrValues,
    packed,
    packed_width,
    row_bytes,
    unpacked,
)
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.gather import exchanged, merged_over_ranks, sent_back, sent_to_all
from razor_dist.parallel.zigzag import Chunk

# Estimates that are in memory at once, all ranks' together, for which queries are taken a part at
# a time.
ESTIMATES = 1 << 24
# Bytes of a chunk's attention (`head_bytes`), for which KV heads are taken a few at a time.
ROUND_BYTES = 1 << 28


class _Keys(NamedTuple):
    """Keys to compare with queries."""

    k: KeysOrValues
    slow: Tensor  # the dimensions of ``k`` that are compared
    shard: Shard  # where they stand


class HeldKeys(NamedTuple):
    """A rank's keys and values in some heads of a layer, and their reader."""

    pages: PagePool
    rows: slice
    reader: BlockReader

    def heads(self, of: slice) -> HeldKeys:
        rows = range(self.rows.start, self.rows.stop)[of]
        return self._replace(rows=slice(rows.start, rows.stop))

    def attend(self, query: Query, chosen: Tensor) -> Partial:
        """Attention to what is chosen of these keys, in float32."""
        q, at = query.q, self.reader.queries
        found = (
            attend_chosen(q, *self.pages.at(self.rows, span), chosen, shard, at, scale=query.scale)
            for span, shard in self.reader.parts
            # Reading scattered pages copies them: those without a chosen block are skipped.
            if isinstance(span, slice) or chosen[:, shard.blocks].any()
        )
        first = next(found, None)
        return empty_partial(q) if first is None else merge(chain([first], found))

    def attend_always(self, query: Query) -> Partial:
        """Attention to what these queries always read."""
        return self.attend(query, self.reader.always.expand(len(query.q), -1, -1))

    def keys(self, slow: Tensor) -> Iterator[_Keys]:
        """Yield all keys: views, and of scattered pages the slower half in 8 bits."""
        index = torch.arange(len(slow), device=slow.device)
        for span, shard in self.reader.parts:
            k = self.pages.keys(self.rows, span)
            scattered = not isinstance(span, slice)
            yield _Keys(index_of(k, slow), index, shard) if scattered else _Keys(k, slow, shard)


class _Search(NamedTuple):
    """Queries that are to choose from blocks of keys."""

    q: Tensor  # [K, G, T, W], scaled
    mass: Tensor  # [K, G, T]: log-sum-exp of scores, of the keys of all ranks that are always read
    positions: Tensor  # int64 [T]
    keys: Sequence[_Keys]
    blocks: int

    @classmethod
    def of(
        cls,
        query: Query,
        choice: BlockChoice,
        mass: Tensor,
        reader: BlockReader,
        keys: Sequence[_Keys],
    ) -> _Search:
        q = query.q[..., choice.slow].float() * query.scale
        return cls(q, mass, reader.positions, keys, reader.blocks)

    def estimates(self, part: slice) -> Tensor:
        """Estimate the blocks for some queries: see `razor_dist.kernels.chosen.largest`."""
        q, at = self.q[:, :, part], self.positions[part]
        found = q.new_full((len(q), self.blocks, *q.shape[1:3]), -torch.inf)
        for k, slow, shard in self.keys:
            torch.maximum(found, largest(q, k, slow, shard, at), out=found)
        return found


def attend_together(
    comm: Communicator, choice: BlockChoice, query: Query, readers: Sequence[HeldKeys]
) -> Tensor:
    """Attention of tokens that all ranks compute: float32 ``[K, G, T, D]``.

    The queries are those of the ``readers``, in their order.
    """
    queries = [query.tokens(held.reader.at) for held in readers]
    first = [held.attend_always(of) for held, of in zip(readers, queries, strict=True)]
    mass = comm.all_gather(torch.cat([found.lse for found in first], 2), "merge").logsumexp(0)
    masses = mass.split([of.q.shape[2] for of in queries], 2)
    searches = [
        _Search.of(of, choice, own, held.reader, list(held.keys(choice.slow)))
        for held, of, own in zip(readers, queries, masses, strict=True)
    ]
    chosen = _choose(comm, choice.share, searches)
    found = [
        merge([always, held.attend(of, blocks)])
        for held, of, always, blocks in zip(readers, queries, first, chosen, strict=True)
    ]
    return merged_over_ranks(comm, joined(found)).out


def attend_chunk(
    comm: Communicator, choice: BlockChoice, chunk: Chunk, query: Query, held: HeldKeys
) -> Tensor:
    """Attention of this rank's tokens of a chunk: float32 ``[K, G, T, D]``.

    ``held`` is its shard, these tokens included.
    """
    if comm.size == 1:
        return attend_together(comm, choice, query, [held])
    _, group, _, dim = query.q.shape
    count = heads_at_once(chunk, group, dim, query.q.dtype)
    out = torch.empty_like(query.q, dtype=torch.float32)
    for begin in range(0, len(out), count):
        of = slice(begin, begin + count)
        out[of] = _attend_heads(comm, choice, chunk, query.heads(of), held.heads(of))
    return out


def head_bytes(chunk: Chunk, group: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes that `attend_chunk` takes for each KV head, beside estimates.

    They are all ranks' queries, three times: sent, received and joined; their results, seven times
    as they are merged and sent; the index of all keys; and the table of chosen blocks, twice.
    """
    tokens, floats = chunk.end - chunk.begin, torch.float32.itemsize
    visitors = tokens * group * (3 * dtype.itemsize * dim + 7 * (dim + 1) * floats)
    index = chunk.end * row_bytes(dim // 2, INT8) if chunk.world_size > 1 else 0
    return visitors + index + 2 * tokens * blocks_of(chunk.end)


def heads_at_once(chunk: Chunk, group: int, dim: int, dtype: torch.dtype) -> int:
    """KV heads that `attend_chunk` takes at once, the same on all ranks."""
    return max(1, ROUND_BYTES // head_bytes(chunk, group, dim, dtype))


def activation_bytes(chunk: Chunk, rows: int, group: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a layer's attention at its peak, with ``rows`` retrieval heads.

    They are the table of blocks that are always read, which all layers share; `head_bytes` of the
    KV heads taken at once; the results of all heads; and the estimates of one part of the queries,
    three times. Not less than measured, and less than twice (``tests/plan/test_measured.py``).
    """
    of, blocks, floats = (chunk, group, dim, dtype), blocks_of(chunk.end), torch.float32.itemsize
    at_once = rows if chunk.world_size == 1 else min(rows, heads_at_once(*of))
    always = (chunk.end - chunk.begin) * blocks
    results = rows * group * chunk.tokens(0) * dim * floats
    estimates = min(ESTIMATES, at_once * group * chunk.tokens(0) * blocks)
    return always + at_once * head_bytes(*of) + results + 3 * floats * estimates


def _attend_heads(
    comm: Communicator, choice: BlockChoice, chunk: Chunk, query: Query, held: HeldKeys
) -> Tensor:
    """`attend_chunk` of a few heads."""
    reader = held.reader
    sizes = [chunk.tokens(r) for r in range(comm.size)]
    heads, group, _, dim = query.q.shape
    # What every rank has, to every rank.
    queries = sent_to_all(comm, query.q, [(heads, group, n, dim) for n in sizes])
    width = packed_width(len(choice.slow), INT8)
    codes = [packed(index_of(k, slow)) for k, slow, _ in held.keys(choice.slow)]
    index = sent_to_all(
        comm,
        torch.cat([query.q.new_empty(heads, 0, width, dtype=INT8), *codes], 1),
        [(heads, len(shard.places), width) for shard in reader.shards],
    )
    visitors = query._replace(q=torch.cat(queries.wait(), 2))
    first = held.attend_always(visitors)
    mass = torch.stack(exchanged(comm, first.lse.split(sizes, 2))).logsumexp(0)
    slow = torch.arange(len(choice.slow), device=choice.slow.device)
    keys = [
        _Keys(unpacked(k), slow, shard)
        for k, shard in zip(index.wait(), reader.shards, strict=True)
    ]
    search = _Search.of(query, choice, mass, reader, keys)
    [own] = _choose(Communicator(None), choice.share, [search])
    del queries, index, codes, keys, search  # before there is more
    chosen = torch.cat(sent_to_all(comm, own, [(heads, reader.blocks, n) for n in sizes]).wait(), 2)
    found = merge([first, held.attend(visitors, chosen)])
    return merge(sent_back(comm, found, sizes)).out


def _choose(comm: Communicator, share: float, searches: Sequence[_Search]) -> list[Tensor]:
    """Choose blocks of the keys of all ranks of ``comm``: bool ``[K, B, T]`` for each search."""
    chosen = [
        of.q.new_empty(len(of.q), of.blocks, of.q.shape[2], dtype=torch.bool) for of in searches
    ]
    for parts in _parts(searches, ESTIMATES // comm.size):
        found = [searches[i].estimates(part) for i, part in parts]
        if comm.size > 1:
            flat = comm.all_gather(torch.cat([x.flatten() for x in found]), "merge").amax(0)
            each = flat.split([x.numel() for x in found])
            found = [x.view_as(own) for x, own in zip(each, found, strict=True)]
        for (i, part), estimate in zip(parts, found, strict=True):
            chosen[i][:, :, part] = choose(share, estimate, searches[i].mass[:, :, part])
    return chosen


def _parts(searches: Sequence[_Search], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Yield parts of the searches' queries that make ``most`` estimates together."""
    parts: list[tuple[int, slice]] = []
    room = most
    for i, of in enumerate(searches):
        heads, group, tokens, _ = of.q.shape
        row = heads * group * of.blocks
        step = max(1, most // row)
        for begin in range(0, tokens, step):
            part = slice(begin, min(begin + step, tokens))
            size = row * (part.stop - begin)
            if parts and size > room:
                yield parts
                parts, room = [], most
            parts.append((i, part))
            room -= size
    if parts:
        yield parts
