"""Ring attention over one zigzag chunk and over the shards that earlier chunks left.

Every rank starts with the keys of its own two shards. P-1 times it hands its current block to
the next rank and receives the previous rank's, computing on one block while the next is under way.
Which queries see which part of a block follows from the zigzag (`parallel.zigzag`):

* a rank's own block: causal, for its two shards are in order;
* from a lower rank: its early shard precedes, and its late shard follows, all our queries;
* from a higher rank: both its shards lie between our early and our late shard.

Keys of earlier chunks precede every query. They either travel with the block (pass-KV) or stay
where they are while the queries travel (pass-Q), whichever moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.kernels import Alibi, Partial, attend, empty_partial, merge
from razor_dist.parallel.comm import Communicator, Pending
from razor_dist.parallel.zigzag import Chunk

Segments = Sequence[tuple[Tensor, Tensor]]
RingAttention = Callable[
    [Communicator, Chunk, Tensor, Tensor, Tensor, "Earlier", float, Tensor | None], Tensor
]  # the signature of `ring_attention`


@dataclass(frozen=True)
class Earlier:
    """Keys of earlier chunks.

    Attributes
    ----------
    segments : sequence of (k, v)
        This rank's shard, each ``[K, n, D]``.
    tokens : sequence of int
        Length of every rank's shard.
    positions : sequence of Tensor
        int64, positions of every rank's shard in its order; empty where nothing depends on them.
    """

    segments: Segments
    tokens: Sequence[int]
    positions: Sequence[Tensor] = ()

    @property
    def total(self) -> int:
        """Earlier tokens of all ranks."""
        return sum(self.tokens)


def queries_travel(
    chunk: Chunk,
    earlier_tokens: int,
    kv_heads: int,
    group: int,
    dim: int,
    itemsize: int,
    kv_itemsize: int,
) -> bool:
    """Whether pass-Q moves fewer bytes than pass-KV for the earlier chunks' keys.

    pass-KV moves every earlier key and value past P-1 ranks; pass-Q moves every query of the chunk
    the same way and brings back float32 partial results (``out`` and ``lse``). ``itemsize`` is the
    bytes of a query's number, ``kv_itemsize`` those of a key's or value's.
    """
    kv_bytes = earlier_tokens * kv_heads * 2 * dim * kv_itemsize
    q_bytes = (chunk.end - chunk.begin) * kv_heads * group * (dim * itemsize + 4 * (dim + 1))
    return q_bytes < kv_bytes


def ring_attention(
    comm: Communicator,
    chunk: Chunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    earlier: Earlier,
    scale: float,
    slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk's queries to the chunk's keys and to all earlier ones.

    Parameters
    ----------
    comm : Communicator
    chunk : Chunk
    q : Tensor
        ``[K, G, T, D]``: this rank's queries, early shard then late shard.
    k, v : Tensor
        ``[K, T, D]``: the same tokens' keys and values, perhaps of another dtype.
    earlier : Earlier
    scale : float
    slopes : Tensor, optional
        float32 ``[K, G]``, of heads biased by distance.

    Returns
    -------
    Tensor
        ``[K, G, T, D]`` float32.
    """
    kv_heads, group, _, dim = q.shape
    see = _BoundAttention(chunk, scale, slopes, earlier.positions)
    if comm.size == 1:
        own = see(q, see.queries(0), k, v, see.chunk_keys(0, k.device), causal=True)
        return merge([own, *see.earlier(q, see.queries(0), earlier.segments, 0)]).out
    if earlier.total and queries_travel(
        chunk, earlier.total, kv_heads, group, dim, q.element_size(), k.element_size()
    ):
        returning = _start_pass_q(comm, chunk, q, earlier, see)
        nothing = Earlier((), [0] * comm.size)
        see_chunk = _BoundAttention(chunk, scale, slopes, ())
        own = _pass_kv(comm, chunk, q, k, v, nothing, see_chunk)
        return merge([own, *returning.finish()]).out
    return _pass_kv(comm, chunk, q, k, v, earlier, see).out


@dataclass(frozen=True)
class _BoundAttention:
    """`attend`, told of positions where heads are biased by distance."""

    chunk: Chunk
    scale: float
    slopes: Tensor | None
    positions: Sequence[Tensor]

    def __call__(
        self,
        q: Tensor,
        queries: Sequence[range],
        k: Tensor,
        v: Tensor,
        keys: Tensor | None,
        *,
        causal: bool = False,
    ) -> Partial:
        alibi = None
        if self.slopes is not None:
            assert keys is not None
            alibi = Alibi(self.slopes, queries, keys)
        return attend(q, k, v, scale=self.scale, causal=causal, alibi=alibi)

    def part(
        self,
        q: Tensor,
        queries: Sequence[range],
        block: Tensor,
        places: Tensor | None,
        at: slice,
        *,
        causal: bool = False,
    ) -> Partial:
        """Attention to the tokens ``at`` of a block ``[2, K, n, D]`` whose positions are given."""
        keys = None if places is None else places[at]
        return self(q, queries, block[0, :, at], block[1, :, at], keys, causal=causal)

    def queries(self, rank: int) -> list[range]:
        """Positions of a rank's tokens of the chunk: the early shard's, the late shard's."""
        return [range(shard.begin, shard.end) for shard in self.chunk.owned(rank)]

    def chunk_keys(self, rank: int, device: torch.device) -> Tensor | None:
        """The same positions, where they matter."""
        if self.slopes is None:
            return None
        return positions_of(self.queries(rank), device)

    def block_keys(self, rank: int, device: torch.device) -> Tensor | None:
        """Positions of a rank's block: its shard of earlier chunks, then its tokens of this one."""
        keys = self.chunk_keys(rank, device)
        if keys is None or not self.positions:
            return keys
        return torch.cat([self.positions[rank], keys])

    def earlier(
        self, q: Tensor, queries: Sequence[range], segments: Segments, rank: int
    ) -> list[Partial]:
        """Attention to each segment of a rank's shard."""
        partials, done = [], 0
        for k, v in segments:
            here = slice(done, done + k.shape[1])
            keys = self.positions[rank][here] if self.slopes is not None else None
            partials.append(self(q, queries, k, v, keys))
            done = here.stop
        return partials


def positions_of(runs: Sequence[range], device: torch.device) -> Tensor:
    """The positions in all runs, int64 ``[n]``."""
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in runs]
    return torch.cat(parts or [torch.arange(0, device=device)])


def _merged(partials: Sequence[Partial], q: Tensor) -> Partial:
    return merge(partials) if partials else empty_partial(q)


def _pass_kv(
    comm: Communicator,
    chunk: Chunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    earlier: Earlier,
    see: _BoundAttention,
) -> Partial:
    rank, size = comm.rank, comm.size
    heads, dim = k.shape[0], k.shape[2]
    keys = torch.cat([*(s[0] for s in earlier.segments), k], dim=1)
    values = torch.cat([*(s[1] for s in earlier.segments), v], dim=1)
    block = torch.stack([keys, values])
    queries = see.queries(rank)
    split = len(queries[0])
    q_early, q_late = q[:, :, :split], q[:, :, split:]

    pending: Pending | None = None
    partial: Partial | None = None
    for step in range(size):
        owner = (rank - step) % size
        if pending is not None:
            (block,) = pending.wait()
        if step + 1 < size:
            # Post the next transfer before computing on this block.
            source = (owner - 1) % size
            tokens = earlier.tokens[source] + chunk.tokens(source)
            buffer = torch.empty(2, heads, tokens, dim, dtype=k.dtype, device=k.device)
            pending = comm.shift(block, buffer, 1, "ring")
        before = earlier.tokens[owner]
        places = see.block_keys(owner, k.device)
        if owner == rank:
            own = see.part(q, queries, block, places, slice(before, None), causal=True)
            old = _merged(see.earlier(q, queries, earlier.segments, rank), q)
            partial = merge([own, old]) if before else merge([own])
            early, late = _split(partial, split)
        elif owner < rank:
            seen = before + len(chunk.owned(owner)[0])
            got = see.part(q, queries, block, places, slice(0, seen))
            got_early, got_late = _split(got, split)
            early, late = merge([early, got_early]), merge([late, got_late])
        else:
            got = see.part(q_late, queries[1:], block, places, slice(None))
            late = merge([late, got])
            if before:
                got = see.part(q_early, queries[:1], block, places, slice(0, before))
                early = merge([early, got])
    return Partial(torch.cat([early.out, late.out], 2), torch.cat([early.lse, late.lse], 2))


def _split(partial: Partial, at: int) -> tuple[Partial, Partial]:
    return (
        Partial(partial.out[:, :, :at], partial.lse[:, :, :at]),
        Partial(partial.out[:, :, at:], partial.lse[:, :, at:]),
    )


@dataclass
class _Returning:
    """Partial results on their way back to the rank whose queries travelled."""

    own: Partial
    pending: list[Pending]

    def finish(self) -> list[Partial]:
        partials = [self.own]
        for transfer in self.pending:
            for packed in transfer.wait():
                partials.append(Partial(packed[..., :-1], packed[..., -1]))
        return partials


def _start_pass_q(
    comm: Communicator, chunk: Chunk, q: Tensor, earlier: Earlier, see: _BoundAttention
) -> _Returning:
    rank, size = comm.rank, comm.size
    heads, group, tokens, dim = q.shape
    block = q.contiguous()

    def receive_next(owner: int) -> Pending:
        shape = (heads, group, chunk.tokens((owner - 1) % size), dim)
        return comm.shift(block, torch.empty(shape, dtype=q.dtype, device=q.device), 1, "ring")

    arriving = receive_next(rank)
    own = _merged(see.earlier(q, see.queries(rank), earlier.segments, rank), q)
    returning: list[Pending] = []
    for step in range(1, size):
        owner, holder = (rank - step) % size, (rank + step) % size
        (block,) = arriving.wait()
        if step + 1 < size:
            arriving = receive_next(owner)
        partial = _merged(see.earlier(block, see.queries(owner), earlier.segments, rank), block)
        packed = torch.cat([partial.out.float(), partial.lse.unsqueeze(-1)], dim=-1)
        buffer = torch.empty(heads, group, tokens, dim + 1, dtype=torch.float32, device=q.device)
        sends = [(owner, packed)] if packed.numel() else []
        receives = [(holder, buffer)] if buffer.numel() else []
        returning.append(comm.exchange(sends, receives, "ring"))
    return _Returning(own, returning)
