"""Attention over a short chunk, whose keys, or queries too, are sent to all ranks at once.

The ring of `razor_dist.parallel.ring` hides transfers behind attention, for which chunks must be
long. With a short one ranks would wait for 2 (P - 1) transfers in a layer, and each would read its
shard of the earlier keys once for every rank's queries. Here each rank sends its tensors to all
others, at most twice in a layer, and reads its shard once for all queries. The bytes sent are the
same, but every rank holds the whole chunk's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.kernels import Partial, joined, merge, merge_stacked
from razor_dist.kernels.alibi import Places
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator, Pending
from razor_dist.parallel.earlier import Earlier, positions_of
from razor_dist.parallel.zigzag import Chunk


def gathered_attention(
    comm: Communicator,
    chunk: Chunk,
    query: Query,
    k: Tensor,
    v: Tensor,
    earlier: Earlier,
    *,
    pass_q: bool,
) -> Tensor:
    """`razor_dist.parallel.ring.ring_attention` of a short chunk.

    With ``pass_q`` queries travel to the earlier keys; without, earlier keys travel, too.
    """
    rank, size = comm.rank, comm.size
    keys = torch.stack([k, v])
    visitors: FromAll | None = None
    if pass_q:
        rows = [(*query.q.shape[:2], chunk.tokens(r), query.q.shape[3]) for r in range(size)]
        visitors = sent_to_all(comm, query.q, rows)
        earlier_tokens = [0] * size
    else:
        keys = earlier.block(k, v)
        earlier_tokens = list(earlier.tokens)
    heads, dim = k.shape[0], k.shape[2]
    tokens = [n + chunk.tokens(r) for r, n in enumerate(earlier_tokens)]
    blocks = sent_to_all(comm, keys, [(2, heads, n, dim) for n in tokens])
    found: list[Partial] = []
    if visitors is not None:
        found = _visit(comm, chunk, query, visitors.wait(), earlier)
    found.append(_own(chunk, rank, query, blocks.wait(), earlier, earlier_tokens))
    return merge(found).out


class FromAll(NamedTuple):
    """Tensors under way from the other ranks, and this rank's own."""

    pending: Pending
    own: Tensor
    rank: int

    def wait(self) -> list[Tensor]:
        """All tensors, by rank."""
        found = self.pending.wait()
        found.insert(self.rank, self.own)
        return found


def sent_to_all(comm: Communicator, own: Tensor, shapes: Sequence[Sequence[int]]) -> FromAll:
    """Start sending ``own`` to all other ranks and receiving theirs; ``shapes`` are by rank."""
    receives = [(rank, own.new_empty(tuple(shapes[rank]))) for rank in comm.others]
    sent = own.contiguous()  # if this is a copy, it is freed once it is sent
    pending = comm.exchange([(rank, sent) for rank in comm.others], receives, "ring")
    return FromAll(pending, own, comm.rank)


def exchanged(comm: Communicator, parts: Sequence[Tensor]) -> list[Tensor]:
    """Send each rank its part; return, by rank, all ranks' parts for this one, of one shape."""
    own = [part.contiguous() for part in parts]
    receives = [(rank, torch.empty_like(own[comm.rank])) for rank in comm.others]
    pending = comm.exchange([(rank, own[rank]) for rank in comm.others], receives, "ring")
    return FromAll(pending, own[comm.rank], comm.rank).wait()


def sent_back(comm: Communicator, found: Partial, sizes: Sequence[int]) -> list[Partial]:
    """Send each rank the results of its queries on this rank; return all ranks' results for ours.

    ``found`` is of all ranks' queries, rank by rank, ``sizes`` of each.
    """
    parts = exchanged(comm, found.packed().split(list(sizes), 2))
    return [Partial.unpacked(part) for part in parts]


def merged_over_ranks(comm: Communicator, found: Partial) -> Partial:
    """Merge all ranks' results for the same queries, by one all-gather."""
    if comm.size == 1:
        return found
    return merge_stacked(*Partial.unpacked(comm.all_gather(found.packed(), "merge")))


def _visit(
    comm: Communicator, chunk: Chunk, query: Query, queries: Sequence[Tensor], earlier: Earlier
) -> list[Partial]:
    """Attention of this rank's queries to every rank's shard of the earlier chunks.

    Each rank computes it for all ranks' ``queries`` and its own shard, and sends it to them.
    """
    rank, size = comm.rank, comm.size
    everybodys = query._replace(q=torch.cat(list(queries), 2))
    runs = [run for r in range(size) for run in chunk.ranges(r)]
    here = earlier.seen_by(everybodys, runs, rank)
    return sent_back(comm, here, [q.shape[2] for q in queries])


def _own(
    chunk: Chunk,
    rank: int,
    query: Query,
    blocks: Sequence[Tensor],
    earlier: Earlier,
    before: Sequence[int],
) -> Partial:
    """Attention to the chunk's keys, and to earlier keys, ``before`` of them in each rank's block.

    A block is ``[2, K, n, D]``: earlier keys, the early shard, the late one.
    """
    size = len(blocks)
    shards: list[Tensor] = [block[:, :, :n] for block, n in zip(blocks, before, strict=True)]
    early = [len(chunk.owned(r)[0]) for r in range(size)]
    shards += [blocks[r][:, :, before[r] : before[r] + early[r]] for r in range(size)]
    shards += [blocks[r][:, :, before[r] + early[r] :] for r in reversed(range(size))]
    # All earlier keys, in any order, and the chunk's in the order of their positions.
    keys, first = torch.cat(shards, 2), sum(before)
    places: Tensor | None = None
    if query.by_distance:
        positions = [p for p, n in zip(earlier.positions, before, strict=False) if n]
        places = torch.cat([*positions, positions_of([range(chunk.begin, chunk.end)], keys.device)])
    parts, done = [], 0
    for at in chunk.owned(rank):
        of = query.tokens(slice(done, done + len(at)))
        done += len(at)
        begin, end = first + at.begin - chunk.begin, first + at.end - chunk.begin
        found = []
        for span, causal in ((slice(0, begin), False), (slice(begin, end), True)):
            where = None if places is None else Places([range(at.begin, at.end)], places[span])
            found.append(of.attend(*keys[:, :, span], causal=causal, where=where))
        parts.append(merge(found))
    return joined(parts)
