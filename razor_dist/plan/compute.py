"""Operations, bytes between ranks, and times of a deployment, at the least and as expected.

Operations are multiplications plus additions. One token costs ``2·w`` for w parameters that
multiply it, and ``4·D`` per query head and key that it sees (``q·k`` and ``p·v``).

Bytes are what `razor_dist.parallel.comm.Communicator` would count, to the byte: the engine's own
plans, summed instead of sent (``tests/plan/test_measured.py`` compares them). For a chunk, rank r,
P ranks, K heads of D numbers, G query heads each:

* ring, keys travel (`ring._pass_kv`): r hands on every rank's block but that of r+1, each of
  ``2·K·row`` bytes per token of the chunk and of the earlier shards, where ``row`` is
  `kernels.quantized.row_bytes`;
* ring, queries travel (`ring._start_pass_q`, if `queries_travel`): the chunk's own blocks as above;
  every rank's queries but r+1's, ``K·G·D·itemsize`` per token; partial results back to every other
  rank, ``4·K·G·(D+1)`` per token;
* short chunk (`razor_dist.parallel.gather`): the same, but r sends its own block and queries to
  every other rank;
* halo, sinks: the tokens of `window.plan_window`'s exchanges, ``2·K·row`` each;
* compensation: an all-reduce of ``[edges - 1, 2, K, D]`` float32 per layer;
* merge: per decode step and layer with retrieval heads, P-1 times ``4·K·G·(D+1)``;
* tensor: with tensor-parallel decode, per decode step two all-reduces of the hidden state in every
  layer, and a rank's part of the logits to rank 0;
* control: the frames of step plans (`razor_dist.protocol.step_plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from razor_dist.attention.window_plan import Storage, WindowPlan, plan_compression, plan_window
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.engine.tensor_parallel import part_of
from razor_dist.heads.head_map import HeadMap
from razor_dist.kernels.quantized import has_scale
from razor_dist.parallel.earlier import queries_travel
from razor_dist.parallel.ring import is_short
from razor_dist.parallel.sharding import shard_sizes
from razor_dist.parallel.zigzag import Chunk, Interval, holdings
from razor_dist.plan.chosen import add_chunks, chosen_from, least_keys, least_read, token_bytes
from razor_dist.plan.deployment import Deployment, StreamingHeads
from razor_dist.plan.devices import Device, Efficiency
from razor_dist.protocol.step_plan import FRAME_BYTES, BatchEntry, Compute, Open, StepPlan

# Queries whose windows are counted at once, which bounds memory.
_CHUNK = 1 << 20
# Kernels of a recorded decode step on CUDA, without those that only several ranks launch: of each
# layer (counted in tests/test_launches.py), and of the rest (counted by reading the code).
KERNELS_OF_LAYER, KERNELS_OF_STEP = 10, 12
# Keys of the blocks that `razor_dist.kernels.torch_cuda` gives to cuDNN.
LONG_KEYS = 32768
_PEAK = Efficiency(matmul=1, attention=1, bandwidth=1, link=1)


@dataclass(frozen=True)
class Operations:
    """Operations of a whole prompt on all ranks together."""

    linear: int  # projections and MLPs, and the output head once
    retrieval: int  # attention of the retrieval heads
    streaming: int  # attention of the streaming heads
    full: int  # attention if every head were a retrieval head

    @property
    def total(self) -> int:
        return self.linear + self.retrieval + self.streaming


def visible(policy: StreamingPolicy, prompt: int) -> int:
    """Keys that a streaming head's queries see in a prompt, summed over queries."""
    seen = prompt * (prompt + 1) // 2
    for begin in range(0, prompt, _CHUNK):
        starts = policy.starts(begin, min(begin + _CHUNK, prompt))
        seen -= int((starts - policy.sinks - policy.compensation).clip(min=0).sum())
    return seen


def operations(d: Deployment, prompt: int) -> Operations:
    shape = d.shape
    per_key = 4 * shape.head_dim * shape.group
    causal = prompt * (prompt + 1) // 2
    seen = {heads: causal if d.exact else visible(heads.policy, prompt) for heads in d.streaming}
    return Operations(
        linear=2 * (d.weights.matmul * prompt + d.weights.head),
        retrieval=per_key * sum(d.retrieval_per_layer) * least_keys(d, prompt),
        streaming=per_key * sum(heads.rows * keys for heads, keys in seen.items()),
        full=per_key * shape.kv_heads * shape.layers * causal,
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes sent, by purpose, of every rank."""

    prefill: list[Counter[str]]  # for a whole prompt
    decode: list[Counter[str]]  # for one step of one sequence


def busiest(per_rank: Sequence[Counter[str]]) -> int:
    return max(sent.total() for sent in per_rank)


def traffic(d: Deployment, prompt: int) -> Traffic:
    prefill = [Counter[str]() for _ in range(d.world_size)]
    decode = [Counter[str]() for _ in range(d.world_size)]
    if d.world_size > 1:
        others, rows = d.world_size - 1, sum(d.retrieval_per_layer)
        chunks = d.chunks(prompt)
        _add_rings(d, chunks, rows, d.kv_bytes, prefill, chosen=True)
        add_chunks(d, chunks, rows, prefill)
        if d.exact:
            streaming = sum(heads.rows for heads in d.streaming)
            _add_rings(d, chunks, streaming, d.streaming_kv_bytes, prefill)
        for index, heads in enumerate(d.streaming):
            kept = [len(rows) for rows in d.layout.kept[index]]
            _add_windows(d, heads, kept, chunks, prefill)
        # `Open`, and a step for every chunk, from rank 0.
        plans: list[StepPlan] = [Open(0, end=prompt, total=prompt, max_read=prompt)]
        for chunk in chunks:
            tokens = torch.zeros(chunk.end - chunk.begin, dtype=torch.int64)
            plans.append(Compute.of([BatchEntry(0, tokens, sharded=True)]))
        frames = (frame for plan in plans for frame in plan.frames())
        prefill[0]["control"] = others * sum(frame.nbytes for frame in frames)
        for sent in decode:
            sent["merge"] = others * rows * d.shape.group * (d.shape.head_dim + 1) * 4
            if chosen_from(d, prompt):
                sent["merge"] += rows * token_bytes(d, prompt)
            if d.shared:
                sizes = [part_of(d.shape.vocab_size, r, d.world_size) for r in range(others + 1)]
                logits = others * 4 * max(end - begin for begin, end in sizes)
                # Bytes that each rank sends to sum one token's hidden state over all ranks.
                reduced = 2 * d.model.hidden_size * d.dtype.itemsize * others // d.world_size
                sent["tensor"] = d.shares.sums * reduced + logits
        decode[0]["control"] = others * FRAME_BYTES
    # Unary plus drops zero counts.
    return Traffic([+sent for sent in prefill], [+sent for sent in decode])


def full_attention(d: Deployment) -> Deployment:
    config = d.config.model_copy(update={"retrieval_share": 0.0})
    heads = HeadMap.uniform("full", d.shape)
    return replace(d, config=config, head_map=heads, source="attention: full", missing=None)


def pass_q(d: Deployment, chunk: Chunk, kv_bytes: int) -> bool:
    """True if queries travel, for heads with ``kv_bytes`` per token's key and value."""
    shape, own = d.shape, d.dtype.itemsize
    return queries_travel(chunk, chunk.begin, shape.group, shape.head_dim, own, kv_bytes)


def _handed_on(chunk: Chunk, tokens: Sequence[int], rank: int) -> int:
    """Tokens that a rank sends until all ranks have all ``tokens``, listed by rank."""
    if is_short(chunk):
        return (len(tokens) - 1) * tokens[rank]
    return sum(tokens) - tokens[(rank + 1) % len(tokens)]


def _add_rings(
    d: Deployment,
    chunks: Sequence[Chunk],
    rows: int,
    kv_bytes: int,
    sent: list[Counter[str]],
    *,
    chosen: bool = False,
) -> None:
    """Add to ``sent`` the bytes of ``rows`` heads with ``kv_bytes`` per token's key and value.

    With ``chosen``, leave out chunks in which heads choose blocks (`add_chunks`).
    """
    size, dim = d.world_size, d.shape.head_dim
    earlier = [0] * size
    for chunk in chunks:
        own = [chunk.tokens(r) for r in range(size)]
        through = [a + b for a, b in zip(earlier, own, strict=True)]
        queries = pass_q(d, chunk, kv_bytes)
        blocks = own if queries else through
        for rank in range(size) if not (chosen and chosen_from(d, chunk.end)) else ():
            nbytes = _handed_on(chunk, blocks, rank) * kv_bytes
            if queries:
                nbytes += _handed_on(chunk, own, rank) * d.shape.group * dim * d.dtype.itemsize
                nbytes += (sum(own) - own[rank]) * d.shape.group * (dim + 1) * 4
            sent[rank]["ring"] += rows * nbytes
        earlier = through


def _add_windows(
    d: Deployment,
    heads: StreamingHeads,
    kept: Sequence[int],
    chunks: Sequence[Chunk],
    sent: list[Counter[str]],
) -> None:
    size, per_token, policy = d.world_size, heads.rows * d.streaming_kv_bytes, heads.policy
    seen: dict[tuple[int, ...], list[WindowPlan]] = {}
    for index in range(len(chunks) - 1 if d.exact else 0, len(chunks)):
        key = _chunk_key(policy, chunks, index)
        if key not in seen:
            seen[key] = [_plan(d, policy, chunks, index, rank) for rank in range(size)]
        for rank, plan in enumerate(seen[key]):
            sent[rank]["halo"] += plan.halo.sent_tokens * per_token
            if plan.handover is not None:
                for receiver, tokens in plan.handover.tokens_to.items():
                    sent[rank]["halo"] += tokens * kept[receiver] * d.streaming_kv_bytes
            sent[rank]["sinks"] += plan.sinks.sent_tokens * per_token
            if plan.changes_sums and policy.compensation:
                for count in heads.per_layer:
                    sums = (len(plan.edges) - 1) * 2 * count * d.shape.head_dim * 4
                    sent[rank]["compensation"] += 2 * sums * (size - 1) // size


def _chunk_key(policy: StreamingPolicy, chunks: Sequence[Chunk], index: int) -> tuple[int, ...]:
    """All that a chunk's plan depends on, relative to the chunk: equal chunks are planned once."""
    chunk = chunks[index]
    edges = [*(shard.begin for shard in chunk.shards), chunk.end]
    starts = [max(policy.sinks, policy.start(edge)) - chunk.begin for edge in edges]
    shards = [edge - chunk.begin for edge in edges]
    return (index + 1 == len(chunks), min(chunk.begin, policy.sinks), *starts, *shards)


def _plan(
    d: Deployment, policy: StreamingPolicy, chunks: Sequence[Chunk], index: int, rank: int
) -> WindowPlan:
    stored = Storage(d.tail, d.shared)
    if d.exact:
        return plan_compression(policy, chunks, rank, stored)
    chunk, at_end = chunks[index], stored if index + 1 == len(chunks) else None
    base = max(policy.sinks, policy.start(chunk.begin) if index else 0)
    held = holdings(chunks[:index], Interval(base - d.tail, chunk.begin))
    return plan_window(policy, chunk, rank, base=base, held=held, stored=at_end)


@dataclass(frozen=True)
class Estimate:
    """Seconds by term, and in sum.

    ``compute`` and ``memory`` always overlap, ``links`` overlap with them in a prefill. Launches of
    a step's kernels and the ``host`` between two steps come on top.
    """

    floor: Mapping[str, float]  # at the device's peaks; launches and host are 0
    expected: Mapping[str, float]  # at the efficiencies of the device's file
    worst: Mapping[str, float]  # at the ends of the file's ranges
    best: Mapping[str, float]
    overlapped: bool  # links overlap with compute and memory (prefill), or follow them (decode)
    seconds_at_peak: float
    seconds: float
    seconds_worst: float
    seconds_best: float
    limit: str  # the largest term of `expected`


@dataclass(frozen=True)
class _Load:
    """A rank's work for a prompt or a step."""

    matmul: float  # operations, as are attention and long_attention
    attention: float
    reads: int  # bytes, as are sends
    sends: int
    long_attention: float = 0.0  # to whole blocks of earlier keys
    collectives: int = 0
    kernels: int = 0
    steps: int = 0  # after each of which the device waits for the host

    def estimate(self, d: Deployment, device: Device, *, overlapped: bool) -> Estimate:
        peak = self._terms(d, device)
        expected, worst, best = (
            self._terms(d, of, of.efficiency)
            for of in (device, device.at("worst"), device.at("best"))
        )

        def seconds(terms: Mapping[str, float]) -> float:
            both = max(terms["compute"], terms["memory"])
            links, rest = terms["links"], terms["launches"] + terms["host"]
            return (max(both, links) if overlapped else both + links) + rest

        limit = max(expected, key=lambda term: expected[term])
        return Estimate(
            floor=peak,
            expected=expected,
            worst=worst,
            best=best,
            overlapped=overlapped,
            seconds_at_peak=seconds(peak),
            seconds=seconds(expected),
            seconds_worst=seconds(worst),
            seconds_best=seconds(best),
            limit=limit,
        )

    def _terms(
        self, d: Deployment, device: Device, of: Efficiency | None = None
    ) -> dict[str, float]:
        """Seconds by term; at the peaks if no efficiencies are given."""
        part = _PEAK if of is None else of
        operations = self.matmul / part.matmul + self.attention / part.attention
        operations += self.long_attention / part.long
        return {
            "compute": operations / device.flops(d.dtype, d.world_size),
            "memory": self.reads / (device.bandwidth(d.world_size) * part.bandwidth),
            "links": self.sends / (device.link_gb_s * 1e9 * part.link)
            + self.collectives * device.link_latency_us * 1e-6,
            "launches": 0.0 if of is None else self.kernels * device.kernel_us * 1e-6,
            "host": 0.0 if of is None else self.steps * device.host_us * 1e-6,
        }


def prefill_time(d: Deployment, device: Device, prompt: int, sent: Traffic) -> Estimate:
    """Estimate the prefill; ranks share work evenly, and links are the busiest rank's.

    Memory is the weights, read once in every chunk. Reads of keys and values are left out, since
    attention kernels compute on them far longer than they read.
    """
    work, size = operations(d, prompt), d.world_size
    long = work.retrieval * _long_share(d, prompt) / size
    return _Load(
        matmul=work.linear / size,
        attention=(work.retrieval + work.streaming) / size - long,
        long_attention=long,
        reads=len(d.chunks(prompt)) * d.weights.chunk_bytes,
        sends=busiest(sent.prefill),
    ).estimate(d, device, overlapped=True)


def _long_share(d: Deployment, prompt: int) -> float:
    """The part of retrieval heads' attention that is to whole blocks of `LONG_KEYS` keys."""
    long = 0
    for chunk in d.chunks(prompt):
        shard = chunk.begin // d.world_size
        long += (chunk.end - chunk.begin) * d.world_size * (shard // LONG_KEYS * LONG_KEYS)
    return long / (prompt * (prompt + 1) / 2)


def decode_reads(d: Deployment, context: int, sequences: int = 1) -> int:
    """Bytes that the fullest rank reads in a step of ``sequences`` of ``context`` tokens each."""
    nbytes = sum(d.retrieval_per_layer) * least_read(d, context, _shard(d, context)) * d.kv_bytes
    for index, heads in enumerate(d.streaming):
        nbytes += _waited_for(d, index) * heads.policy.seen(context - 1) * d.streaming_kv_bytes
    weights = d.weights.step_bytes - d.shares.spared * d.dtype.itemsize
    return weights + sequences * nbytes


def _waited_for(d: Deployment, window: int) -> int:
    """Streaming heads of a window, in each layer those of the rank with most, summed up."""
    if not d.shared:
        return d.streaming[window].rows
    return sum(
        max(share.stop - share.start for share in group.shares)
        for heads in d.layout.layers
        for group in heads.groups
        if group.index == window
    )


def collectives(d: Deployment, context: int) -> int:
    """Count a decode step's collectives: merges, and with tensor-parallel decode sums and logits.

    Heads that choose blocks gather masses and estimates before they merge results.
    """
    if d.world_size == 1:
        return 0
    merges = sum(count > 0 for count in d.retrieval_per_layer)
    return merges * (3 if chosen_from(d, context) else 1) + (d.shares.sums + 1) * d.shared


def kernels(d: Deployment) -> int:
    """Count a decode step's kernels beside its collectives, for any number of sequences."""
    apart = has_scale(d.kv_dtype)  # retrieval heads of codes are a launch of their own
    merges = sum(count > 0 for count in d.retrieval_per_layer) * (d.world_size > 1)
    return d.shape.layers * (KERNELS_OF_LAYER + apart) + merges + KERNELS_OF_STEP


def decode_time(
    d: Deployment, device: Device, context: int, sent: Traffic, sequences: int = 1
) -> Estimate:
    """Estimate one step of ``sequences``; links cost bytes, and a latency for each collective."""
    keys = sum(d.retrieval_per_layer) * least_read(d, context, _shard(d, context))
    keys += sum(
        _waited_for(d, index) * heads.policy.capacity(context)
        for index, heads in enumerate(d.streaming)
    )
    parameters = d.weights.matmul + d.weights.head - d.shares.spared
    return _Load(
        matmul=sequences * (2 * parameters + 4 * d.shape.head_dim * d.shape.group * keys),
        attention=0,
        reads=decode_reads(d, context, sequences),
        sends=sequences * busiest(sent.decode),
        collectives=collectives(d, context),
        kernels=kernels(d),
        steps=1,
    ).estimate(d, device, overlapped=False)


def _shard(d: Deployment, context: int) -> int:
    return max(shard_sizes(0, context, context, d.world_size))
