"""Operations and times: what a deployment takes at least, and what to expect.

Operations are multiplications and additions, counted apart. One token costs ``2·w`` for w
parameters that multiply it, and ``4·D`` per query head and key that it sees (``q·k`` and ``p·v``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from razor_dist.cache.sequence import shard_sizes
from razor_dist.cache.streaming import compensation_entries
from razor_dist.heads.policy import StreamingPolicy
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.devices import Device
from razor_dist.plan.traffic import Traffic

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Operations:
    """Operations of a whole prompt, all ranks together.

    Attributes
    ----------
    linear : int
        Projections and MLPs, and the output head once.
    retrieval, streaming : int
        Attention of the retrieval and of the streaming heads.
    full : int
        Attention if every head were a retrieval head.
    """

    linear: int
    retrieval: int
    streaming: int
    full: int

    @property
    def total(self) -> int:
        """All but ``full``."""
        return self.linear + self.retrieval + self.streaming


@dataclass(frozen=True)
class Estimate:
    """Seconds by term, ``compute``, ``memory`` and ``links``.

    Attributes
    ----------
    floor : dict of str to float
        At the device's peaks.
    expected : dict of str to float
        At the efficiencies of its file.
    overlapped : bool
        Whether links work while computing does (prefill) or in turn with it (decode). Computing
        and reading memory always overlap.
    """

    floor: Mapping[str, float]
    expected: Mapping[str, float]
    overlapped: bool

    def _seconds(self, terms: Mapping[str, float]) -> float:
        if self.overlapped:
            return max(terms.values())
        return max(terms["compute"], terms["memory"]) + terms["links"]

    @property
    def at_peak(self) -> float:
        """Seconds at least."""
        return self._seconds(self.floor)

    @property
    def seconds(self) -> float:
        """Seconds to expect."""
        return self._seconds(self.expected)

    def as_json(self) -> dict[str, Any]:
        """Return the terms and what follows from them."""
        sums = {"seconds_at_peak": self.at_peak, "seconds": self.seconds, "limit": self.limit}
        return dataclasses.asdict(self) | sums

    @property
    def limit(self) -> str:
        """The term that is the largest to expect."""
        return max(self.expected, key=lambda term: self.expected[term])


def visible(policy: StreamingPolicy, prompt: int) -> int:
    """Count the keys that a streaming head's queries of a prompt see, summed over queries."""
    seen = 0
    for begin in range(0, prompt, _CHUNK):
        end = min(begin + _CHUNK, prompt)
        starts = policy.starts(begin, end)
        hidden = (starts - policy.sinks - policy.compensation).clip(min=0)
        queries = end - begin
        seen += queries * (begin + end + 1) // 2 - int(hidden.sum())
    return seen


def operations(d: Deployment, prompt: int) -> Operations:
    """Count the operations of the prefill of a prompt of so many tokens."""
    shape = d.shape
    per_key = 4 * shape.head_dim * shape.group
    causal = prompt * (prompt + 1) // 2
    seen = {heads: causal if d.exact else visible(heads.policy, prompt) for heads in d.streaming}
    return Operations(
        linear=2 * (d.weights.matmul * prompt + d.weights.head),
        retrieval=per_key * sum(d.retrieval_per_layer) * causal,
        streaming=per_key * sum(heads.rows * keys for heads, keys in seen.items()),
        full=per_key * shape.kv_heads * shape.layers * causal,
    )


def prefill_time(d: Deployment, device: Device, prompt: int, traffic: Traffic) -> Estimate:
    """Estimate the prefill; work and bytes are even over the ranks, links are the busiest's.

    Memory is the weights, read once in every chunk; keys and values are read by attention kernels
    that compute far longer on them.
    """
    size, efficiency = d.world_size, device.efficiency
    peak = device.flops(d.dtype, size) * size
    work = operations(d, prompt)
    reads = len(d.chunks(prompt)) * d.weights.nbytes / device.bandwidth(size)
    sends = Traffic.most(traffic.prefill) / device.link
    linear, attention = work.linear / peak, (work.retrieval + work.streaming) / peak
    floor = {"compute": linear + attention, "memory": reads, "links": sends}
    expected = {
        "compute": linear / efficiency.matmul + attention / efficiency.attention,
        "memory": reads / efficiency.bandwidth,
        "links": sends / efficiency.link,
    }
    return Estimate(floor, expected, overlapped=True)


def decode_reads(d: Deployment, context: int) -> int:
    """Bytes that the fullest rank reads for one token of one sequence of ``context`` tokens.

    Weights (`Weights.step_bytes`); the shard of the retrieval heads; the slots of the streaming
    heads.
    """
    shard = max(shard_sizes(0, context, context, d.chunked_prefill_size, d.world_size))
    kept = sum(d.retrieval_per_layer) * shard
    for heads in d.streaming:
        policy = heads.policy
        entries = compensation_entries(policy, d.dtype)
        kept += heads.rows * (entries + policy.sinks + min(context, policy.capacity(context)))
    return d.weights.step_bytes + kept * d.kv_bytes


def decode_time(d: Deployment, device: Device, context: int, traffic: Traffic) -> Estimate:
    """Estimate the decoding of one token of one sequence of ``context`` tokens.

    Links cost their bytes, and a latency for each layer with retrieval heads.
    """
    size, efficiency, shape = d.world_size, device.efficiency, d.shape
    per_key = 4 * shape.head_dim * shape.group
    shard = max(shard_sizes(0, context, context, d.chunked_prefill_size, size))
    keys = sum(d.retrieval_per_layer) * shard
    keys += sum(heads.rows * heads.policy.capacity(context) for heads in d.streaming)
    work = 2 * (d.weights.matmul + d.weights.head) + per_key * keys
    compute = work / device.flops(d.dtype, size)
    reads = decode_reads(d, context) / device.bandwidth(size)
    sends = Traffic.most(traffic.decode) / device.link
    collectives = sum(count > 0 for count in d.retrieval_per_layer) if size > 1 else 0
    latency = collectives * device.link_latency
    floor = {"compute": compute, "memory": reads, "links": sends + latency}
    expected = {
        "compute": compute / efficiency.matmul,
        "memory": reads / efficiency.bandwidth,
        "links": sends / efficiency.link + latency,
    }
    return Estimate(floor, expected, overlapped=False)
