"""Costs of retrieval heads that choose blocks of keys (``retrieval_share``).

The number of blocks that they choose depends on the text, so operations and reads are the least:
estimates of all keys before a query, and the blocks that it always reads. Bytes between ranks and
memory do not depend on the text (`razor_dist.attention.chosen`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from razor_dist.kernels.chosen import BLOCK, RECENT, blocks_of, chooses
from razor_dist.kernels.quantized import INT8, row_bytes
from razor_dist.parallel.zigzag import Chunk
from razor_dist.plan.deployment import Deployment

_FLOAT = 4
# Tokens that a query always reads, on average.
_ALWAYS = BLOCK + RECENT + BLOCK // 2


def chosen_from(d: Deployment, end: int) -> bool:
    """True if retrieval heads choose blocks of a text of ``end`` tokens."""
    return d.config.retrieval_share > 0 and chooses(end)


def least_keys(d: Deployment, prompt: int) -> int:
    """The fewest keys that a prompt's queries read, summed over queries.

    An estimate counts as a quarter of a key: half of its dimensions, and not its value.
    """
    causal = prompt * (prompt + 1) // 2
    if not chosen_from(d, prompt):
        return causal
    read = prompt * _ALWAYS - _ALWAYS * (_ALWAYS - 1) // 2
    return min(causal, read + (causal - read) // 4)


def least_read(d: Deployment, context: int, held: int) -> int:
    """The fewest tokens that a query reads of a shard of ``held``; an estimate is a quarter."""
    return held if not chosen_from(d, context) else min(held, _ALWAYS + held // 4)


def chunk_bytes(d: Deployment, chunk: Chunk, held: Sequence[int], rank: int) -> int:
    """Bytes that a rank sends for one KV head in a chunk; ``held`` are tokens by rank after it."""
    own = [chunk.tokens(r) for r in range(d.world_size)]
    others, visitors = d.world_size - 1, sum(own) - own[rank]
    group, dim, itemsize = d.shape.group, d.shape.head_dim, d.dtype.itemsize
    to_all = own[rank] * (group * dim * itemsize + blocks_of(chunk.end))
    to_all += held[rank] * row_bytes(dim // 2, INT8)
    return others * to_all + visitors * group * (1 + dim + 1) * _FLOAT


def token_bytes(d: Deployment, context: int) -> int:
    """Bytes that a rank sends for one KV head and an answer's token, beside the merge's."""
    return (d.world_size - 1) * d.shape.group * (1 + blocks_of(context)) * _FLOAT


def add_chunks(
    d: Deployment, chunks: Sequence[Chunk], rows: int, sent: Sequence[Counter[str]]
) -> None:
    """Add to ``sent`` the bytes of ``rows`` heads in chunks in which they choose blocks."""
    held = [0] * d.world_size
    for chunk in chunks:
        held = [n + chunk.tokens(rank) for rank, n in enumerate(held)]
        if chosen_from(d, chunk.end):
            for rank, of in enumerate(sent):
                of["ring"] += rows * chunk_bytes(d, chunk, held, rank)
