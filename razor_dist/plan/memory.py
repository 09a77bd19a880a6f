"""Memory of one rank, and the longest context that fits.

Formulas for what prefill allocates would repeat the model's and the engine's code line by line, and
drift from it. So the planner runs that code itself, on torch's meta device: a model of the real
sizes with one layer of each kind that matters, `ModelRunner`, the real `PrefillContext`, and a
communicator that sends nothing. `Allocations` counts the tensors.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from razor_dist.attention.chosen import activation_bytes
from razor_dist.cache.caches import CacheConfig
from razor_dist.cache.policy import StreamingPolicy, WindowRun
from razor_dist.config.errors import ConfigError, EngineError
from razor_dist.engine.capacity import prefix_bytes
from razor_dist.engine.decode_mode import DecodeMode
from razor_dist.engine.runner import ModelRunner
from razor_dist.heads.layout import HeadLayout
from razor_dist.parallel.comm import Pending, Purpose
from razor_dist.parallel.ring import ring_attention
from razor_dist.parallel.silent import SilentCommunicator
from razor_dist.parallel.zigzag import Chunk
from razor_dist.plan.allocations import Allocations
from razor_dist.plan.chosen import chosen_from
from razor_dist.plan.compute import pass_q
from razor_dist.plan.deployment import META, Deployment, keep_layers, layers_of
from razor_dist.plan.devices import Device
from razor_dist.plan.one_rank import chunk_reader
from razor_dist.protocol.step_plan import Op, StepPlan

# Contexts beyond this multiple of what the model was made for are not tried: the plan of windows
# that grow with millions of tokens alone takes a minute.
_FAR = 16
_PARTS = 32  # the longest context is found to such a part of it, or exactly
_MOST_RUNS = 16


class _Labelling(SilentCommunicator):
    """``allocations`` learns which tensors are buffers of an exchange."""

    def __init__(self, rank: int, size: int, allocations: Allocations) -> None:
        super().__init__(rank, size)
        self._allocations = allocations

    def exchange(
        self, sends: Seq[tuple[int, Tensor]], receives: Seq[tuple[int, Tensor]], purpose: Purpose
    ) -> Pending:
        for _, tensor in [*sends, *receives]:
            self._allocations.relabel(tensor, purpose)
        return super().exchange(sends, receives, purpose)

    def all_reduce(self, tensor: Tensor, purpose: Purpose) -> Pending:
        self._allocations.relabel(tensor, purpose)
        return super().all_reduce(tensor, purpose)


class _FewRuns(StreamingPolicy):
    """A policy whose adjacent runs are joined, so that a long chunk is few operations.

    Their results are as large as before; what is made for one run and freed is larger, by a few
    hundredths of the streaming heads' results.
    """

    def runs(self, begin: int, end: int) -> list[WindowRun]:
        runs = super().runs(begin, end)
        step = -(-len(runs) // _MOST_RUNS) or 1
        groups = [runs[i : i + step] for i in range(0, len(runs), step)]
        return [WindowRun(group[0].begin, group[-1].end, group[0].start) for group in groups]


class DryRun:
    """Chunks and caches of one deployment, on the meta device.

    ``free`` counts the bytes that a rank has beside the weights.
    """

    def __init__(self, deployment: Deployment, free: float = math.inf) -> None:
        self._d, self._free = deployment, free
        self._reserved: dict[int, dict[str, int]] = {}  # by ``max_model_len``
        kept, windows = deployment.head_map.retrieval, deployment.head_map.windows
        whole = deployment.meta_model()
        parts = [frozenset(map(type, layer.modules())) for layer in layers_of(whole)]
        heads = deployment.retrieval_per_layer, deployment.shape.kv_heads
        layers = _kinds_of_layers(*heads, parts)
        self._model = keep_layers(whole, layers)
        self._layouts = [
            HeadLayout.from_decision(
                [kept[layer] for layer in layers],
                META,
                windows and tuple(windows[layer] for layer in layers),
                deployment.share(rank),
            )
            for rank in range(len(deployment.layouts))
        ]

    def reserved(self, max_model_len: int) -> dict[str, int]:
        """Bytes of the caches that a rank makes at start, by their names in `Memory`."""
        if max_model_len in self._reserved:  # lengths are looked for more than once
            return self._reserved[max_model_len]
        share = self._d.layout.share
        caches = self._whole(max_model_len, 0 if share is None else share.rank).caches
        found = self._reserved[max_model_len] = {
            "retrieval_kv": caches.pages.reserved_bytes,
            "streaming_cache": sum(cache.reserved_bytes for cache in caches.streaming),
            "scratch": 0 if caches.scratch is None else caches.scratch.reserved_bytes,
        }
        return found

    def caches(self, max_model_len: int, context: int) -> dict[str, int]:
        """The same, and what a sequence of ``context`` tokens takes on the fullest rank.

        Raise `ConfigError` if ``kv_tokens`` has no room for it.
        """
        retrieval = streaming = 0
        for rank in range(self._d.world_size):
            runner = self._whole(max_model_len, rank)
            try:
                runner.execute(StepPlan(Op.OPEN, end=context, total=context))
            except EngineError:
                raise ConfigError(
                    f"kv_tokens is {self._d.config.kv_tokens}, too few for a sequence of {context}"
                ) from None
            retrieval = max(retrieval, runner.caches.pages.used_bytes)
            streaming = max(streaming, sum(c.used_bytes for c in runner.caches.streaming))
        return self.reserved(max_model_len) | {
            "sequence_retrieval_kv": retrieval,
            "sequence_streaming_cache": streaming,
        }

    def activations(self, prompt: int) -> Counter[str]:
        """Bytes by label at the highest peak of any chunk, on the rank where it is.

        What outlives a chunk (the window between chunks, the caches) is not part of it. The chunks
        looked at are the first one, the last one, the last full one and the last in which earlier
        keys travel, on the last rank, which attends to every block in full; the last also on rank
        0, which computes the logits.
        """
        chunks = self._d.chunks(prompt)
        last, far = len(chunks) - 1, self._d.world_size - 1
        kv_bytes = self._d.kv_bytes
        keys_travel = (i for i, chunk in enumerate(chunks) if not pass_q(self._d, chunk, kv_bytes))
        places = {(0, far), (last, 0), (last, far), (max(keys_travel), far)}
        if chunks[last].end - chunks[last].begin < self._d.chunked_prefill_size:
            places.add((max(0, last - 1), far))
        found = [self.chunk(chunks, *place) for place in sorted(places)]
        return max(found, key=lambda sizes: sum(sizes.values()))

    def chunk(self, chunks: Seq[Chunk], index: int, rank: int) -> Counter[str]:
        allocations, layout = Allocations(), _of_rank(self._layouts, rank)
        cache = self._d.one_cache(layout, chunks[-1].end)
        read = chunk_reader(self._runner(cache, rank, allocations, layout), chunks, index)
        with allocations:
            read()
        sizes = allocations.transient()
        halo = sizes["halo"] + sizes["sinks"] + sizes["compensation"]
        ring = sizes["ring"]
        if chosen_from(self._d, chunks[index].end):
            rows, shape = max(self._d.retrieval_per_layer), self._d.shape
            sizes_of_heads = rows, shape.group, shape.head_dim, self._d.dtype
            ring = max(ring, activation_bytes(chunks[index], *sizes_of_heads))
        return Counter(ring=ring, halo=halo, chunk=sizes["model"])

    def _whole(self, max_model_len: int, rank: int) -> ModelRunner:
        cache = self._d.cache(max_model_len, self._free)
        return self._runner(cache, rank, Allocations(), _of_rank(self._d.layouts, rank))

    def _runner(
        self, cache: CacheConfig, rank: int, allocations: Allocations, layout: HeadLayout
    ) -> ModelRunner:
        def ring(*arguments: Any) -> Tensor:
            with allocations.labelled("ring"):
                return ring_attention(*arguments)

        few = [replace(a, policy=_FewRuns(**vars(a.policy))) for a in cache.arenas]
        cache = replace(cache, arenas=tuple(few))
        comm = _Labelling(rank, self._d.world_size, allocations)
        return ModelRunner(self._model, DecodeMode(layout), cache, comm, ring)


def _of_rank(layouts: Seq[HeadLayout], rank: int) -> HeadLayout:
    return layouts[rank if len(layouts) > 1 else 0]


def _kinds_of_layers(retrieval: Seq[int], kv_heads: int, parts: Seq[object]) -> list[int]:
    """Choose the first layer, and of the others: most streaming heads, most retrieval, most even.

    The first has less in memory than the others, since its input is the embedding itself; so a kind
    that only the first layer has must not stand for a later one. Layers of other ``parts`` than
    those (a mixture of experts, or none) are added.
    """
    order = sorted(range(1, len(retrieval)), key=lambda layer: retrieval[layer])
    if not order:
        return [0]
    even = min(order, key=lambda layer: abs(retrieval[layer] - kv_heads / 2))
    kinds = {retrieval[layer]: layer for layer in (order[0], even, order[-1])}
    found = list(kinds.values())
    for layer in order:
        if all(parts[layer] != parts[other] for other in found):
            found.append(layer)
    return [0, *found]


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    weights: int  # parameters and buffers
    weight_copies: int  # tensor-parallel decode: a rank's parts of weights whose rows lie apart
    prefixes: int  # in host memory, which the caches are in, too
    recordings: int  # of decode steps on CPU
    # Reserved at start: the page pool, the slots of streaming heads, exact prefill's pool.
    retrieval_kv: int
    streaming_cache: int
    scratch: int
    # The streaming heads' window while a prompt is being prefilled; taken when it is needed.
    window_between_chunks: int
    # At a chunk's peak: "ring" (blocks in flight, partial results), "halo" (with sinks and sums),
    # "chunk" (hidden states, projections, streaming attention, MLP).
    activations: dict[str, int]
    # Of a decode step of max_num_seqs sequences, in the model's dtype and in float32.
    logits: int
    # One sequence of the planned length takes this much of the first two caches.
    sequence_retrieval_kv: int
    sequence_streaming_cache: int

    @property
    def working(self) -> int:
        return max(sum(self.activations.values()), self.logits)

    @property
    def total(self) -> int:
        caches = self.retrieval_kv + self.streaming_cache + self.scratch
        weights = self.weights + self.weight_copies
        held = weights + self.prefixes + self.recordings + caches
        return held + self.window_between_chunks + self.working


class MemoryPlanner:
    def __init__(self, deployment: Deployment, device: Device) -> None:
        d, self._d = deployment, deployment
        self._logits = d.config.max_num_seqs * d.shape.vocab_size * (d.dtype.itemsize + 4)
        # Ranks of one host map the same pages of their files, if these are of their dtype.
        mapped = d.weights.mapped if device.shared and d.stored == d.dtype else 0
        self._weights = d.weights.nbytes - mapped + mapped // d.world_size
        self.budget = device.memory(d.world_size)  # bytes that a rank may use
        self._prefixes = prefix_bytes(d.config, d.kind)
        self._recordings = d.weights.recorded if d.kind == "cpu" and d.config.cuda_graphs else 0
        self._fixed = self._weights + d.shares.copied + self._prefixes + self._recordings
        self._dry_run = DryRun(d, self.budget - self._fixed)
        self._activations = functools.cache(self._dry_run.activations)
        self.limit = _FAR * d.shape.max_positions  # of the contexts that are asked about

    def at(self, max_model_len: int, context: int) -> Memory:
        held = self._held(max_model_len, context)
        return replace(held, activations=dict(self._activations(context)))

    def fits(self, max_model_len: int, context: int) -> bool:
        """Return whether everything fits; faster than `at` where weights and caches do not."""
        held = self._held(max_model_len, context)
        return held.total <= self.budget and self.at(max_model_len, context).total <= self.budget

    def _held(self, max_model_len: int, context: int) -> Memory:
        """Memory without the activations, which take seconds to look up."""
        return Memory(
            weights=self._weights,
            weight_copies=self._d.shares.copied,
            prefixes=self._prefixes,
            recordings=self._recordings,
            window_between_chunks=self._window(context),
            activations={},
            logits=self._logits,
            **self._dry_run.caches(max_model_len, context),
        )

    def _window(self, context: int) -> int:
        return self._d.sizes.window_bytes(context, self._d.chunked_prefill_size)

    def _working(self, context: int) -> int:
        return max(sum(self._activations(context).values()), self._logits)

    def longest_context(self, guess: int) -> int:
        """The longest ``max_model_len`` for which everything fits, at most `limit`; 0 if none.

        Activations take seconds to look up, but beyond some length they hardly change. So the
        caches are bisected with those of ``guess``, then with those of what was found. Where that
        leads nowhere, lengths between are halved, down to the last 32nd.
        """
        # `fits` does, or is 0. Longer ones have no smaller activations: beyond `most` none fits.
        fits, most = 0, self._bisect(self._logits)
        context = min(guess, most)
        while most - fits > fits // _PARTS:
            found = self._bisect(self._working(context))
            if found < context:
                most = context - 1
            else:
                fits, most = context, min(most, found)
            context = found if fits < found <= most else (fits + most + 1) // 2
        return fits

    def _bisect(self, working: int) -> int:
        """Return the longest ``max_model_len`` if all lengths took ``working`` bytes to work."""

        def too_long(context: int) -> bool:
            reserved = sum(self._dry_run.reserved(context).values())
            return self._fixed + reserved + self._window(context) + working > self.budget

        most, high = min(self.limit, self._d.config.kv_tokens or self.limit), 1
        while high <= most and not too_long(high):
            high *= 2
        # high // 2 tokens fit, as no tokens do; high do not, or are more than wanted.
        lengths = range(min(high, most + 1))
        return bisect.bisect_left(lengths, True, lo=high // 2 + 1, key=too_long) - 1
