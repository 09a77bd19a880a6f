"""Ring attention over one zigzag chunk and over the shards that earlier chunks left.

Every rank starts with the keys of its own two shards. P-1 times it hands its current block to the
next rank and receives the previous rank's, computing on one block while the next is under way.
With three ranks, where rank r holds shards r and 5 - r::

    positions   | 0 | 1 | 2 | 3 | 4 | 5 |       step 0   step 1   step 2
    rank 0        E                   L         own      from 2   from 1
    rank 1            E           L             own      from 0   from 2
    rank 2                E   L                 own      from 1   from 0

The picture shows what part of a block each query sees: no mask is needed but the causal one of a
rank's own block.

* own block: causal, since its two shards are in order;
* a lower rank's: its early shard (E) precedes all our queries, its late shard (L) follows them;
* a higher rank's: both its shards lie between our early queries and our late ones.

So results of early and of late queries are merged separately. Every rank computes about two shards'
worth of scores in each step, and none waits for a busier one.

Keys of earlier chunks precede every query. They travel with the block (pass-KV), or stay while the
queries travel (pass-Q): the choice that moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from razor_dist.kernels import Partial, joined, merge
from razor_dist.kernels.alibi import Places
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator, Pending
from razor_dist.parallel.earlier import Earlier, positions_of, queries_travel
from razor_dist.parallel.gather import gathered_attention
from razor_dist.parallel.zigzag import Chunk

# The signature of `ring_attention`.
RingAttention = Callable[[Communicator, Chunk, Query, Tensor, Tensor, Earlier], Tensor]
# Up to this many tokens per rank, all-gather instead of ring (docs/LOG.md).
_SHORT = 256


def is_short(chunk: Chunk) -> bool:
    """True if a chunk's keys and queries are gathered (`razor_dist.parallel.gather`)."""
    return chunk.world_size > 1 and chunk.end - chunk.begin <= _SHORT * chunk.world_size


def ring_attention(
    comm: Communicator, chunk: Chunk, query: Query, k: Tensor, v: Tensor, earlier: Earlier
) -> Tensor:
    """Causal attention of a chunk's queries to the chunk's keys and to all earlier ones.

    ``query`` (``[K, G, T, D]``) has this rank's tokens, the early shard then the late one; ``k``
    and ``v`` (``[K, T, D]``) have the same tokens, perhaps in another dtype, or packed
    (`razor_dist.kernels.quantized`). The result is float32 and has the queries' shape.
    """
    _, group, _, dim = query.q.shape
    if comm.size == 1:
        where = _Positions(chunk, earlier, query.by_distance, k.device)
        own = query.attend(k, v, causal=True, where=where.of(0, where.new(0)))
        return merge(chain([own], earlier.partials(query, chunk.ranges(0), 0))).out
    pass_q = earlier.total > 0 and queries_travel(
        chunk, earlier.total, group, dim, query.q.element_size(), 2 * k.shape[2] * k.element_size()
    )
    if is_short(chunk):
        return gathered_attention(comm, chunk, query, k, v, earlier, pass_q=pass_q)
    if pass_q:
        here, elsewhere = _start_pass_q(comm, chunk, query, earlier)
        own = _pass_kv(comm, chunk, query, k, v, Earlier((), [0] * comm.size))
        found = [packed for transfer in elsewhere for packed in transfer.wait()]
        return merge([own, here, *map(Partial.unpacked, found)]).out
    return _pass_kv(comm, chunk, query, k, v, earlier).out


@dataclass(frozen=True)
class _Positions:
    """Positions of every rank's queries and keys, for queries that score by distance."""

    chunk: Chunk
    earlier: Earlier
    matter: bool
    device: torch.device

    def new(self, rank: int) -> Tensor | None:
        return positions_of(self.chunk.ranges(rank), self.device) if self.matter else None

    def block(self, rank: int) -> Tensor | None:
        """The keys of a rank's block: its shard of earlier chunks, then its tokens of this one."""
        new = self.new(rank)
        if new is None or not self.earlier.positions:
            return new
        return torch.cat([self.earlier.positions[rank], new])

    def of(
        self, rank: int, keys: Tensor | None, at: slice = slice(None), shards: slice = slice(None)
    ) -> Places | None:
        """The positions of a rank's queries and of the keys ``at``, for `Query.attend`."""
        return None if keys is None else Places(self.chunk.ranges(rank)[shards], keys[at])


def _pass_kv(
    comm: Communicator, chunk: Chunk, query: Query, k: Tensor, v: Tensor, earlier: Earlier
) -> Partial:
    """Pass keys and values round; queries attend to what precedes them, block by block.

    A block is ``[2, K, n, D]``: ``before`` tokens of earlier chunks, the early shard, the late one.
    """
    rank, size = comm.rank, comm.size
    heads, dim = k.shape[0], k.shape[2]
    block = earlier.block(k, v)
    where = _Positions(chunk, earlier, query.by_distance, k.device)
    split = len(chunk.owned(rank)[0])
    of_early, of_late = slice(0, split), slice(split, None)

    pending: Pending | None = None
    for step in range(size):
        owner = (rank - step) % size
        if pending is not None:
            (block,) = pending.wait()
        if step + 1 < size:
            # Post the next transfer before computing on this block.
            source = (owner - 1) % size
            tokens = earlier.tokens[source] + chunk.tokens(source)
            pending = comm.shift(block, k.new_empty(2, heads, tokens, dim), 1, "ring")
        before, places = earlier.tokens[owner], where.block(owner)
        if owner == rank:
            at = where.of(rank, places, slice(before, None))
            own = query.attend(*block[:, :, before:], causal=True, where=at)
            old = earlier.partials(query, chunk.ranges(rank), rank)
            found = merge(chain([own], old))
            early, late = found.tokens(of_early), found.tokens(of_late)
        elif owner < rank:
            seen = before + len(chunk.owned(owner)[0])  # all but its late shard
            at = where.of(rank, places, slice(0, seen))
            got = query.attend(*block[:, :, :seen], where=at)
            early = merge([early, got.tokens(of_early)])
            late = merge([late, got.tokens(of_late)])
        else:
            at = where.of(rank, places, shards=slice(1, None))
            late = merge([late, query.tokens(of_late).attend(*block, where=at)])
            if before:
                at = where.of(rank, places, slice(0, before), slice(0, 1))
                got = query.tokens(of_early).attend(*block[:, :, :before], where=at)
                early = merge([early, got])
    return joined([early, late])


def _start_pass_q(
    comm: Communicator, chunk: Chunk, query: Query, earlier: Earlier
) -> tuple[Partial, list[Pending]]:
    """Pass queries round the earlier keys, which stay; each rank sends partial results back.

    Return this rank's result for its own queries, and the transfers of the other ranks' results for
    them (`Partial.packed`).

    In step s this rank has the queries of rank - s and sends their owner a partial result, while
    rank + s has this rank's and sends one back. The last transfers are still under way when this
    returns, so that the chunk's own keys can go round meanwhile.
    """
    rank, size = comm.rank, comm.size
    heads, group, tokens, dim = query.q.shape
    block = query.q.contiguous()

    def receive_next(owner: int) -> Pending:
        shape = (heads, group, chunk.tokens((owner - 1) % size), dim)
        return comm.shift(block, block.new_empty(shape), 1, "ring")

    arriving = receive_next(rank)
    own = earlier.seen_by(query, chunk.ranges(rank), rank)
    returning: list[Pending] = []
    for step in range(1, size):
        owner, holder = (rank - step) % size, (rank + step) % size
        (block,) = arriving.wait()
        if step + 1 < size:
            arriving = receive_next(owner)
        visitor = query._replace(q=block)
        partial = earlier.seen_by(visitor, chunk.ranges(owner), rank)
        buffer = block.new_empty((heads, group, tokens, dim + 1), dtype=torch.float32)
        returning.append(comm.exchange([(owner, partial.packed())], [(holder, buffer)], "ring"))
    return own, returning
