"""Attention to the chunks before the current one, whose keys are spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.kernels import Partial, empty_partial, merge
from razor_dist.kernels.alibi import Places
from razor_dist.kernels.quantized import KeysOrValues, packed
from razor_dist.kernels.query import Query
from razor_dist.parallel.zigzag import Chunk

Segments = Sequence[tuple[KeysOrValues, KeysOrValues]]


@dataclass(frozen=True)
class Earlier:
    """The keys and values of earlier chunks: all of them precede every query."""

    segments: Segments  # (k, v) of this rank's shard, each [K, n, D]
    tokens: Sequence[int]  # length of every rank's shard
    # Of the tokens of every rank's shard, int64; empty if attention does not depend on them.
    positions: Sequence[Tensor] = ()

    @property
    def total(self) -> int:
        return sum(self.tokens)

    def block(self, k: Tensor, v: Tensor) -> Tensor:
        """Join the shard with new keys and values, to be sent: ``[2, K, n, D]``, or packed."""
        old = [(packed(x), packed(y)) for x, y in self.segments]
        return torch.stack([torch.cat(x, 1) for x in zip(*old, (k, v), strict=True)])

    def partials(self, query: Query, runs: Sequence[range], rank: int) -> Iterator[Partial]:
        """Yield attention to each segment of this rank's shard; ``runs`` are queries' positions."""
        keys = self.positions[rank] if query.by_distance and self.segments else None
        done = 0
        for k, v in self.segments:
            at = slice(done, done + k.shape[1])
            where = None if keys is None else Places(runs, keys[at])
            yield query.attend(k, v, where=where)
            done = at.stop

    def seen_by(self, query: Query, runs: Sequence[range], rank: int) -> Partial:
        """`partials`, merged."""
        if not self.segments:
            return empty_partial(query.q)
        return merge(self.partials(query, runs, rank))


def queries_travel(
    chunk: Chunk, earlier_tokens: int, group: int, dim: int, itemsize: int, kv_bytes: int
) -> bool:
    """True if pass-Q moves fewer bytes than pass-KV for the earlier chunks' keys.

    pass-KV moves every earlier key and value to the P-1 other ranks; pass-Q moves every query of
    the chunk there and brings back float32 partial results (``out`` and ``lse``). ``itemsize`` is a
    query's, in bytes, ``kv_bytes`` are the bytes of a key and its value. The bytes of both ways are
    counted for one KV head: they are in proportion to the heads.
    """
    q_bytes = (chunk.end - chunk.begin) * group * (dim * itemsize + 4 * (dim + 1))
    return q_bytes < earlier_tokens * kv_bytes


def positions_of(runs: Sequence[range], device: torch.device) -> Tensor:
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in runs]
    return torch.cat(parts or [torch.arange(0, device=device)])
