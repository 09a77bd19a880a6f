"""Memory of one rank, and the longest context that fits.

Formulas for what a prefill allocates would repeat the model's and the engine's code, and drift from
it. So the planner runs that code on torch's meta device: a model of the real sizes with one layer
of each kind that matters, the real `ModelRunner` and `PrefillContext`, and a communicator that
sends nothing. `Allocations` counts the tensors.
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
from razor_dist.plan.deployment import Deployment, keep_layers, layers_of
from razor_dist.plan.devices import Device
from razor_dist.plan.one_rank import chunk_reader
from razor_dist.protocol.step_plan import Open

# Contexts up to this multiple of the model's own are tried: beyond it, a plan of windows that grow
# with millions of tokens takes a minute.
_FAR = 16
_PARTS = 32  # the longest context is found to 1/32 of it, or exactly
_MOST_RUNS = 16  # of a chunk in `_FewRuns`


class _Labelling(SilentCommunicator):
    """Labels buffers of exchanges by their purpose in ``allocations``."""

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
    """A policy with adjacent runs joined, so that a long chunk takes few operations.

    Results are as large as without. Temporary tensors of a run are larger, by a few hundredths of
    the streaming heads' results.
    """

    def runs(self, begin: int, end: int) -> list[WindowRun]:
        runs = super().runs(begin, end)
        step = -(-len(runs) // _MOST_RUNS) or 1
        groups = [runs[i : i + step] for i in range(0, len(runs), step)]
        return [WindowRun(group[0].begin, group[-1].end, group[0].start) for group in groups]


class DryRun:
    """Runs one deployment's chunks and caches on the meta device.

    ``free`` are a rank's bytes beside the weights.
    """

    def __init__(self, deployment: Deployment, free: float = math.inf) -> None:
        self._d, self._free = deployment, free
        self._reserved: dict[int, dict[str, int]] = {}  # by ``max_model_len``
        whole = deployment.meta_model()
        parts = [frozenset(map(type, layer.modules())) for layer in layers_of(whole)]
        heads = deployment.retrieval_per_layer, deployment.shape.kv_heads
        layers = _kinds_of_layers(*heads, parts)
        self._model = keep_layers(whole, layers)
        self._layouts = deployment.layouts_of(layers)

    def reserved(self, max_model_len: int) -> dict[str, int]:
        """Bytes of the caches that a rank makes at start, by their names in `Memory`."""
        if max_model_len in self._reserved:
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
        """`reserved`, and bytes of a sequence of ``context`` tokens on the fullest rank.

        Raise `ConfigError` if ``kv_tokens`` has no room for the sequence.
        """
        retrieval = streaming = 0
        for rank in range(self._d.world_size):
            runner = self._whole(max_model_len, rank)
            try:
                runner.execute(Open(0, end=context, total=context, max_read=0))
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
        """Bytes by label at the highest peak of any chunk and rank.

        Caches and the window between chunks, which outlive a chunk, are left out. Four chunks are
        run on the last rank, which attends to every block in full: the first one, the last one, the
        last full one, and the last in which earlier keys travel. The last one is also run on rank
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
        """Bytes by label at the peak of a chunk on a rank."""
        allocations, layout = Allocations(), self._layouts[rank % len(self._layouts)]
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
        cache, layouts = self._d.cache(max_model_len, self._free), self._d.layouts
        return self._runner(cache, rank, Allocations(), layouts[rank % len(layouts)])

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


def _kinds_of_layers(retrieval: Seq[int], kv_heads: int, parts: Seq[object]) -> list[int]:
    """Choose the first layer, and those with most streaming, most retrieval, and most even heads.

    The first takes less memory than the others, since its input is the embedding itself, so it must
    not stand for a later layer. Layers of other ``parts``, such as a mixture of experts, are added.
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
    weight_copies: int  # tensor-parallel decode: copies of a rank's parts of weights
    prefixes: int  # on CPU, prefixes in host memory, which is the caches' as well
    recordings: int  # recorded decode steps on CPU
    # Reserved at start: the page pool, the slots of streaming heads, exact prefill's pool.
    retrieval_kv: int
    streaming_cache: int
    scratch: int
    # The streaming heads' window during a prefill.
    window_between_chunks: int
    # At a chunk's peak: "ring" (blocks in flight, partial results), "halo" (with sinks and sums),
    # "chunk" (hidden states, projections, streaming attention, MLP).
    activations: dict[str, int]
    # Of a decode step of max_num_seqs sequences, in the model's dtype and in float32.
    logits: int
    # Bytes of the first two caches for one sequence of the planned length.
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
        # Ranks of one host share the mapped pages of files that are stored in their dtype.
        mapped = d.weights.mapped if device.shared and d.stored == d.dtype else 0
        self._weights = d.weights.nbytes - mapped + mapped // d.world_size
        self.budget = device.memory(d.world_size)  # bytes that a rank may use
        self._prefixes = prefix_bytes(d.config, d.kind)
        self._recordings = d.weights.recorded if d.kind == "cpu" and d.config.cuda_graphs else 0
        self._fixed = self._weights + d.shares.copied + self._prefixes + self._recordings
        self._dry_run = DryRun(d, self.budget - self._fixed)
        self._activations = functools.cache(self._dry_run.activations)
        self.limit = _FAR * d.shape.max_positions  # the longest context that is tried

    def at(self, max_model_len: int, context: int) -> Memory:
        held = self._held(max_model_len, context)
        return replace(held, activations=dict(self._activations(context)))

    def fits(self, max_model_len: int, context: int) -> bool:
        """True if everything fits; faster than `at` if weights and caches alone do not."""
        held = self._held(max_model_len, context)
        return held.total <= self.budget and self.at(max_model_len, context).total <= self.budget

    def _held(self, max_model_len: int, context: int) -> Memory:
        """Memory without the activations, which take seconds to count."""
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

    def longest_context(self, guess: int) -> int:
        """The longest ``max_model_len`` for which everything fits, at most `limit`; 0 if none.

        Activations take seconds to count, but beyond some length they hardly change. So caches are
        bisected with the activations of ``guess``, then with those of the length that was found. If
        that gives no new length, the one half-way is tried, until 1/32 of a length is left.
        """
        # Length `fits` fits, or is 0. Activations grow with length, so that none above `most` fits.
        fits, most = 0, self._bisect(self._logits)
        context = min(guess, most)
        while most - fits > fits // _PARTS:
            working = max(sum(self._activations(context).values()), self._logits)
            found = self._bisect(working)
            if found < context:
                most = context - 1
            else:
                fits, most = context, min(most, found)
            context = found if fits < found <= most else (fits + most + 1) // 2
        return fits

    def _bisect(self, working: int) -> int:
        """The longest ``max_model_len`` that fits if all lengths have ``working`` bytes."""

        def too_long(context: int) -> bool:
            reserved = sum(self._dry_run.reserved(context).values())
            return self._fixed + reserved + self._window(context) + working > self.budget

        most, high = min(self.limit, self._d.config.kv_tokens or self.limit), 1
        while high <= most and not too_long(high):
            high *= 2
        # A length of high // 2 fits, or is 0; a length of high does not, or is above `most`.
        lengths = range(min(high, most + 1))
        return bisect.bisect_left(lengths, True, lo=high // 2 + 1, key=too_long) - 1
