"""Attention of retrieval heads that read the blocks of keys which their queries choose.

`razor_dist.kernels.chosen` has the rule; here are the tokens of a step, and the ranks. First every
rank attends to what is always read of its shard, and the ranks add up these masses. Then what is
chosen follows from every key before a query, by its slower half; and every rank attends to what is
chosen of its shard. Keys and values stay where they are.

* Of a chunk each rank has queries of its own (`attend_chunk`). They travel to all ranks, and so do
  the slower halves of all keys, in 8 bits, and what the queries have chosen.
* Tokens that all ranks compute (`attend_together`) are few, so that what the ranks find in their
  shards is sent: the largest score of each block.

The result is the same for any number of ranks and any cut of a prompt but for rounding. Letters are
those of `razor_dist.kernels.chosen`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.attention.step import BlockReader
from razor_dist.kernels import Partial, empty_partial, merge, merge_stacked
from razor_dist.kernels.chosen import (
    Choice,
    Shard,
    attend_chosen,
    blocks_of,
    choose,
    fixed,
    index_of,
    largest,
)
from razor_dist.kernels.quantized import (
    INT8,
    Codes,
    KeysOrValues,
    packed,
    packed_width,
    unpacked,
)
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.gather import exchanged, sent_to_all
from razor_dist.parallel.zigzag import Chunk

# Estimates that are in memory at once, for which queries are taken a part at a time.
ESTIMATES = 1 << 24


class Segments(NamedTuple):
    """The keys and values of a rank's shard, in parts, and where they stand."""

    parts: Sequence[tuple[KeysOrValues, KeysOrValues]]
    shard: Shard

    def cut(self) -> Iterator[tuple[KeysOrValues, KeysOrValues, Shard]]:
        done = 0
        for k, v in self.parts:
            end = done + k.shape[1]
            yield k, v, self.shard.cut(done, end)
            done = end

    def attend(self, query: Query, chosen: Tensor, positions: Tensor) -> Partial:
        """Attention to what is chosen of these keys, in float32."""
        q = query.q.float()
        found = [
            attend_chosen(q, k, v, chosen, shard, positions, scale=query.scale)
            for k, v, shard in self.cut()
        ]
        return merge(found) if found else empty_partial(q)

    def largest(self, q: Tensor, slow: Tensor, positions: Tensor) -> Tensor:
        """The estimates of these keys: see `razor_dist.kernels.chosen.largest`."""
        blocks = len(self.shard.edges) - 1
        found = q.new_full((q.shape[0], blocks, *q.shape[1:3]), -torch.inf)
        for k, _, shard in self.cut():
            torch.maximum(found, largest(q, k, slow, shard, positions), out=found)
        return found


def attend_together(
    comm: Communicator,
    choice: Choice,
    query: Query,
    readers: Sequence[tuple[BlockReader, Segments]],
) -> Tensor:
    """Attention of tokens that all ranks compute: float32 ``[K, G, T, D]``.

    The queries are those of the ``readers``, in their order.
    """
    found = []
    for reader, segments in readers:
        own, at = query.tokens(reader.at), reader.positions
        blocks = len(segments.shard.edges) - 1
        always = fixed(at, blocks).expand(len(own.q), -1, -1)
        first = segments.attend(own, always, at)
        mass = first.lse if comm.size == 1 else comm.all_gather(first.lse, "merge").logsumexp(0)
        slower = _slower(own, choice)
        chosen = torch.empty_like(always, memory_format=torch.contiguous_format)
        for part in _parts(own, blocks):
            estimate = segments.largest(slower[:, :, part], choice.slow, at[part])
            if comm.size > 1:
                estimate = comm.all_gather(estimate, "merge").amax(0)
            chosen[:, :, part] = choose(choice.share, estimate, mass[:, :, part])
        found.append(merge([first, segments.attend(own, chosen, at)]))
    out, lse = (torch.cat(x, 2) for x in zip(*found, strict=True))
    if comm.size == 1:
        return out
    gathered = comm.all_gather(torch.cat([out, lse.unsqueeze(-1)], -1), "merge")
    return merge_stacked(gathered[..., :-1], gathered[..., -1]).out


def attend_chunk(
    comm: Communicator,
    choice: Choice,
    chunk: Chunk,
    query: Query,
    reader: BlockReader,
    segments: Segments,
) -> Tensor:
    """Attention of this rank's tokens of a chunk: float32 ``[K, G, T, D]``.

    ``segments`` are of its shard, these tokens included.
    """
    if comm.size == 1:
        return attend_together(comm, choice, query, [(reader, segments)])
    rank, blocks = comm.rank, blocks_of(chunk.end)
    sizes = [chunk.tokens(r) for r in range(comm.size)]
    heads, group, _, dim = query.q.shape
    # What every rank has, to every rank.
    queries = sent_to_all(comm, query.q, [(heads, group, n, dim) for n in sizes])
    width = packed_width(len(choice.slow), INT8)
    codes = [packed(index_of(k, choice.slow)) for k, _ in segments.parts]
    index = sent_to_all(
        comm,
        torch.cat([torch.empty(heads, 0, width, dtype=INT8), *codes], 1),
        [(heads, len(shard.places), width) for shard in reader.shards],
    )
    visitors = query._replace(q=torch.cat(queries.wait(), 2))
    positions = torch.cat([_positions(chunk, r) for r in range(comm.size)])
    always = fixed(positions, blocks).expand(heads, -1, -1)
    first = segments.attend(visitors, always, positions)
    mass = torch.stack(exchanged(comm, first.lse.split(sizes, 2))).logsumexp(0)
    own, slow = _slower(query, choice), torch.arange(len(choice.slow))
    chosen = torch.empty(heads, blocks, sizes[rank], dtype=torch.bool)
    indexes = [unpacked(x) for x in index.wait()]
    for part in _parts(query, blocks):
        at = reader.positions[part]
        estimate = torch.full((heads, blocks, group, len(at)), -torch.inf)
        for k, shard in zip(indexes, reader.shards, strict=True):
            assert isinstance(k, Codes)
            found = largest(own[:, :, part], k, slow, shard, at)
            torch.maximum(estimate, found, out=estimate)
        chosen[:, :, part] = choose(choice.share, estimate, mass[:, :, part])
    everybodys = sent_to_all(comm, chosen, [(heads, blocks, n) for n in sizes]).wait()
    second = segments.attend(visitors, torch.cat(everybodys, 2), positions)
    out, lse = merge([first, second])
    returned = exchanged(comm, torch.cat([out, lse.unsqueeze(-1)], -1).split(sizes, 2))
    return merge([Partial(x[..., :-1], x[..., -1]) for x in returned]).out


def _positions(chunk: Chunk, rank: int) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in chunk.ranges(rank)])


def _slower(query: Query, choice: Choice) -> Tensor:
    return query.q[..., choice.slow].float() * query.scale


def _parts(query: Query, blocks: int) -> list[slice]:
    """Cut queries so that the estimates of a part are in memory at once."""
    heads, group, tokens, _ = query.q.shape
    most = max(1, ESTIMATES // (heads * group * blocks))
    return [slice(begin, begin + most) for begin in range(0, tokens, most)]
