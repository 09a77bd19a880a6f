"""Costs of retrieval heads that choose blocks of keys (``retrieval_share``).

How many blocks a text makes them choose is not known before it is read, so operations and reads are
the least: the estimates of all keys before a query, and what it always reads. Bytes between ranks
and memory do not depend on the text (`razor_dist.attention.chosen`).
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
    """Tell if retrieval heads choose blocks of a text of ``end`` tokens."""
    return d.config.retrieval_share > 0 and chooses(end)


def least_keys(d: Deployment, prompt: int) -> int:
    """Keys that a prompt's queries read at least, in keys read whole, summed over queries.

    An estimate is half of the dimensions' products, and no values: a quarter.
    """
    causal = prompt * (prompt + 1) // 2
    if not chosen_from(d, prompt):
        return causal
    read = prompt * _ALWAYS - _ALWAYS * (_ALWAYS - 1) // 2
    return min(causal, read + (causal - read) // 4)


def least_read(d: Deployment, context: int, held: int) -> int:
    """Tokens that one query reads at least of a shard of ``held``; an estimate is a quarter."""
    return held if not chosen_from(d, context) else min(held, _ALWAYS + held // 4)


def chunk_bytes(d: Deployment, chunk: Chunk, held: Sequence[int], rank: int) -> int:
    """Bytes that a rank sends of one KV head in a chunk, with which ranks have ``held`` tokens."""
    own = [chunk.tokens(r) for r in range(d.world_size)]
    others, visitors = d.world_size - 1, sum(own) - own[rank]
    group, dim, itemsize = d.shape.group, d.shape.head_dim, d.dtype.itemsize
    to_all = own[rank] * (group * dim * itemsize + blocks_of(chunk.end))
    to_all += held[rank] * row_bytes(dim // 2, INT8)
    return others * to_all + visitors * group * (1 + dim + 1) * _FLOAT


def token_bytes(d: Deployment, context: int) -> int:
    """Bytes that a rank sends of one KV head for a token of an answer, beside the merge's."""
    return (d.world_size - 1) * d.shape.group * (1 + blocks_of(context)) * _FLOAT


def add_chunks(
    d: Deployment, chunks: Sequence[Chunk], rows: int, sent: Sequence[Counter[str]]
) -> None:
    """Add what ``rows`` heads send in chunks of which blocks are chosen."""
    held = [0] * d.world_size
    for chunk in chunks:
        held = [n + chunk.tokens(rank) for rank, n in enumerate(held)]
        if chosen_from(d, chunk.end):
            for rank, of in enumerate(sent):
                of["ring"] += rows * chunk_bytes(d, chunk, held, rank)
