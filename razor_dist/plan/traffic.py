"""Bytes between ranks, by purpose: the engine's own plans, summed instead of sent.

What `razor_dist.parallel.comm.Communicator` would count, to the byte: the two are compared in
``tests/plan/test_measured.py``. For chunk w, rank r, P ranks, K heads of D numbers, G query heads
each:

* ring, keys travel (`ring._pass_kv`): r hands on every rank's block but that of r+1, each of
  ``2·K·D·kv_itemsize`` bytes per token of the chunk and of the earlier shards;
* ring, queries travel (`ring._start_pass_q`, where `ring.queries_travel`): the chunk's own blocks
as
  above; every rank's queries but r+1's, ``K·G·D·itemsize`` per token; partial results back to every
  other rank, ``4·K·G·(D+1)`` per token;
* halo, sinks: the tokens of `window.plan_window`'s exchanges, ``2·K·D·kv_itemsize`` each;
* compensation: an all-reduce of ``[edges - 1, 2, K, D]`` float32 per layer;
* merge: per decode step and layer with retrieval heads, P-1 times ``4·K·G·(D+1)``;
* control: the frames of step plans (`razor_dist.engine.step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from razor_dist.attention.window_plan import WindowPlan, plan_compression, plan_window
from razor_dist.engine.step import FRAME, HEADER
from razor_dist.heads.policy import StreamingPolicy
from razor_dist.parallel.ring import queries_travel
from razor_dist.parallel.zigzag import Chunk, Interval, holdings
from razor_dist.plan.deployment import Deployment, HeadChoice, StreamingHeads

_INT64 = 8
_LAST_CHUNKS = 8


@dataclass(frozen=True)
class Traffic:
    """Bytes sent, by purpose, of every rank.

    Attributes
    ----------
    prefill : list of Counter
        For a whole prompt.
    decode : list of Counter
        For one step of one sequence.
    """

    prefill: list[Counter[str]]
    decode: list[Counter[str]]

    @staticmethod
    def total(per_rank: Sequence[Counter[str]]) -> Counter[str]:
        """All ranks together."""
        return sum(per_rank, Counter())

    @staticmethod
    def most(per_rank: Sequence[Counter[str]]) -> int:
        """Return what the busiest rank sends."""
        return max(sum(sent.values()) for sent in per_rank)


def traffic(d: Deployment, prompt: int) -> Traffic:
    """Count what a prompt of so many tokens and the decode steps after it send."""
    return Traffic(prefill_bytes(d, prompt), [decode_bytes(d, r) for r in range(d.world_size)])


def full_attention(d: Deployment) -> Deployment:
    """Return the same deployment with every head a retrieval head."""
    everything = ((True,) * d.shape.kv_heads,) * d.shape.layers
    return replace(d, decision=HeadChoice(everything, "attention: full"))


def prefill_bytes(d: Deployment, prompt: int) -> list[Counter[str]]:
    """Bytes that each rank sends while a prompt is prefilled."""
    sent: list[Counter[str]] = [Counter() for _ in range(d.world_size)]
    if d.world_size == 1:
        return sent
    chunks = d.chunks(prompt)
    _add_rings(d, chunks, sent)
    for heads in d.streaming:
        _add_windows(d, heads, chunks, sent)
    # OPEN, and PREFILL for every chunk, from rank 0.
    frames = _INT64 * FRAME * (1 + len(chunks))
    payloads = [chunk.end - chunk.begin for chunk in chunks]
    long = _INT64 * sum(n for n in payloads if n > FRAME - HEADER)
    sent[0]["control"] += (d.world_size - 1) * (frames + long)
    return [+counter for counter in sent]


def decode_bytes(d: Deployment, rank: int) -> Counter[str]:
    """Bytes that a rank sends for one decode step of one sequence."""
    if d.world_size == 1:
        return Counter()
    others, rows = d.world_size - 1, sum(d.retrieval_per_layer)
    sent = Counter({"merge": others * rows * d.shape.group * (d.shape.head_dim + 1) * 4})
    if rank == 0:
        sent["control"] = others * _INT64 * FRAME
    return +sent


def keys_travel_until(d: Deployment, chunks: Sequence[Chunk]) -> int:
    """Index of the last chunk in which the earlier chunks' keys travel."""
    shape, last = d.shape, 0
    for index, chunk in enumerate(chunks):
        if not _queries_travel(d, chunk, chunk.begin, shape.kv_heads):
            last = index
    return last


def _queries_travel(d: Deployment, chunk: Chunk, earlier: int, rows: int) -> bool:
    shape = d.shape
    itemsizes = d.dtype.itemsize, d.kv_dtype.itemsize
    return earlier > 0 and queries_travel(
        chunk, earlier, rows, shape.group, shape.head_dim, *itemsizes
    )


def _add_rings(d: Deployment, chunks: Sequence[Chunk], sent: list[Counter[str]]) -> None:
    shape, size = d.shape, d.world_size
    riding = [sum(d.retrieval_per_layer)]
    if d.exact:
        riding.append(sum(heads.rows for heads in d.streaming))
    rows = sum(riding)
    if rows == 0:
        return
    earlier = [0] * size
    for chunk in chunks:
        own = [chunk.tokens(r) for r in range(size)]
        queries = _queries_travel(d, chunk, sum(earlier), rows)
        blocks = own if queries else [a + b for a, b in zip(earlier, own, strict=True)]
        for rank in range(size):
            following = (rank + 1) % size
            nbytes = (sum(blocks) - blocks[following]) * rows * d.kv_bytes
            if queries:
                numbers = rows * shape.group
                nbytes += (sum(own) - own[following]) * numbers * shape.head_dim * d.dtype.itemsize
                nbytes += (sum(own) - own[rank]) * numbers * (shape.head_dim + 1) * 4
            sent[rank]["ring"] += nbytes
        earlier = [a + b for a, b in zip(earlier, own, strict=True)]


def _add_windows(
    d: Deployment, heads: StreamingHeads, chunks: Sequence[Chunk], sent: list[Counter[str]]
) -> None:
    size, per_token = d.world_size, heads.rows * d.kv_bytes
    seen: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for index, _chunk in enumerate(chunks):
        if d.exact and index + 1 < len(chunks):
            continue
        key = _chunk_key(heads.policy, chunks, index)
        if key not in seen:
            plans = [_plan(d, heads.policy, chunks, index, rank) for rank in range(size)]
            seen[key] = [(p.halo.sent_tokens, p.sinks.sent_tokens, _sums(p, heads)) for p in plans]
        for rank, (halo, sinks, steps) in enumerate(seen[key]):
            sent[rank]["halo"] += halo * per_token
            sent[rank]["sinks"] += sinks * per_token
            for count in heads.per_layer:
                sums = steps * 2 * count * d.shape.head_dim * 4
                sent[rank]["compensation"] += 2 * sums * (size - 1) // size


def _sums(plan: WindowPlan, heads: StreamingHeads) -> int:
    """Between how many edges the ranks sum up what is dropped."""
    return len(plan.edges) - 1 if plan.changes_sums and heads.policy.compensation else 0


def _chunk_key(policy: StreamingPolicy, chunks: Sequence[Chunk], index: int) -> tuple[int, ...]:
    """Return all that a chunk's plan depends on, seen from the chunk, to plan like ones once."""
    chunk = chunks[index]
    edges = [*(shard.begin for shard in chunk.shards), chunk.end]
    starts = [max(policy.sinks, policy.start(edge)) - chunk.begin for edge in edges]
    new_sinks = min(chunk.begin, policy.sinks)
    shards = [edge - chunk.begin for edge in edges]
    return (index + 1 == len(chunks), new_sinks, *starts, *shards)


def _plan(
    d: Deployment, policy: StreamingPolicy, chunks: Sequence[Chunk], index: int, rank: int
) -> WindowPlan:
    chunk, last = chunks[index], index + 1 == len(chunks)
    if d.exact:
        return plan_compression(policy, chunks, rank)
    base = max(policy.sinks, policy.start(chunk.begin) if index else 0)
    held = holdings(chunks[:index], Interval(base, chunk.begin))
    return plan_window(policy, chunk, rank, base=base, held=held, last=last)


def window_tokens_between_chunks(d: Deployment, policy: StreamingPolicy, prompt: int) -> int:
    """Tokens of window that the fullest rank holds in the midst of a chunk.

    Between two chunks each rank keeps its own part of the window (`Sequence.window`). While a chunk
    runs, layer after layer gets its new part beside the old one, so both count.
    """
    if d.exact:
        return 0
    chunks, most = d.chunks(prompt), 0
    before = [0] * d.world_size
    # Windows never shrink, so that of many chunks the last ones hold the most.
    for index in range(max(0, len(chunks) - _LAST_CHUNKS), len(chunks)):
        chunk, after = chunks[index], [0] * d.world_size
        if index + 1 < len(chunks):
            keep = max(policy.sinks, policy.start(chunk.end))
            for held, rank in holdings(chunks[: index + 1], Interval(keep, chunk.end)):
                after[rank] += len(held)
        most = max(most, *(a + b for a, b in zip(before, after, strict=True)))
        before = after
    return most
