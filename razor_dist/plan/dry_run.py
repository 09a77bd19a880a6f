"""A chunk's memory: the engine's own prefill, run on tensors without numbers.

Formulas for what prefill allocates would repeat the model's and the engine's code line by line, and
drift from it. So the planner runs that code itself, on torch's meta device: a model of the real
sizes with one layer of each kind that matters, `ModelRunner`, the real `PrefillContext`, and a
communicator that sends nothing. `Allocations` counts the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.attention.prefill import Caches
from razor_dist.config.errors import ConfigError, EngineError
from razor_dist.engine.runner import CacheConfig, ModelRunner
from razor_dist.engine.step import Op, StepPlan
from razor_dist.heads.layout import HeadLayout
from razor_dist.heads.policy import StreamingPolicy, WindowRun
from razor_dist.models.loader import model_from_config
from razor_dist.parallel.comm import Communicator, Pending, Purpose
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.ring import ring_attention
from razor_dist.parallel.zigzag import Chunk, Interval, holdings
from razor_dist.plan.allocations import Allocations
from razor_dist.plan.deployment import META, Deployment, HeadChoice
from razor_dist.plan.traffic import keys_travel_until

_MOST_RUNS = 16


class SilentCommunicator(Communicator):
    """One of several ranks, alone: what it would receive is there at once, and holds nothing.

    Parameters
    ----------
    rank, size : int
    allocations : Allocations
        Told which tensors are buffers of an exchange.
    """

    def __init__(self, rank: int, size: int, allocations: Allocations) -> None:
        super().__init__(None)
        self.rank, self.size, self._allocations = rank, size, allocations

    def exchange(
        self, sends: Seq[tuple[int, Tensor]], receives: Seq[tuple[int, Tensor]], purpose: Purpose
    ) -> Pending:
        """See `Communicator`."""
        for _, tensor in [*sends, *receives]:
            self._allocations.relabel(tensor, purpose)
        return Pending([b for _, b in receives], sent=[t for _, t in sends])

    def all_gather(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        """See `Communicator`."""
        return tensor.new_empty((self.size, *tensor.shape))

    def all_reduce(self, tensor: Tensor, purpose: Purpose) -> Pending:
        """See `Communicator`."""
        self._allocations.relabel(tensor, purpose)
        return Pending([tensor])


class _FewRuns(StreamingPolicy):
    """A policy whose adjacent runs are joined, so that a long chunk is few operations.

    Their results are as large as before; what is made for one run and freed is larger, by a few
    hundredths of the streaming heads' results.
    """

    def runs(self, begin: int, end: int) -> list[WindowRun]:
        """See `StreamingPolicy`."""
        runs = super().runs(begin, end)
        step = -(-len(runs) // _MOST_RUNS) or 1
        groups = [runs[i : i + step] for i in range(0, len(runs), step)]
        return [WindowRun(group[0].begin, group[-1].end, group[0].start) for group in groups]


class DryRun:
    """Chunks of one deployment, on the meta device.

    Parameters
    ----------
    deployment : Deployment
    """

    def __init__(self, deployment: Deployment) -> None:
        self._d = deployment
        chosen = _kinds_of_layers(deployment.decision)
        self._model = _short_model(deployment, len(chosen.retrieval))
        self._layout = HeadLayout.from_decision(chosen.retrieval, META, chosen.windows)

    def reserved(self, max_model_len: int) -> dict[str, int]:
        """Bytes of the caches that a rank makes at start, by their names in `Memory`."""
        return _reserved(self._whole(max_model_len, 0).caches)

    def caches(self, max_model_len: int, context: int) -> dict[str, int]:
        """The same, and what a sequence of ``context`` tokens takes on the fullest rank.

        Raises
        ------
        ConfigError
            If ``kv_tokens`` has no room for it.
        """
        used: Counter[str] = Counter()
        for rank in range(self._d.world_size):
            runner = self._whole(max_model_len, rank)
            try:
                self._open(runner, context)
            except EngineError:
                raise ConfigError(
                    f"kv_tokens is {self._d.config.kv_tokens}, too few for a sequence of {context}"
                ) from None
            used |= Counter(
                sequence_retrieval_kv=runner.caches.pages.used_bytes,
                sequence_streaming_cache=sum(cache.used_bytes for cache in runner.caches.streaming),
            )
        # A Counter's union drops zeros.
        names = ("sequence_retrieval_kv", "sequence_streaming_cache")
        return _reserved(runner.caches) | {name: used[name] for name in names}

    def _whole(self, max_model_len: int, rank: int) -> ModelRunner:
        """A runner with the caches of all layers."""
        cache = self._d.cache(max_model_len)
        return self._runner(cache, rank, Allocations(), self._d.layout)

    def activations(self, prompt: int) -> Counter[str]:
        """Bytes by label at the highest peak of any chunk, on the rank where it is.

        What outlives a chunk (the window between chunks, the caches) is not part of it. The chunks
        looked at are the first one, the last one, the last full one and the last in which earlier
        keys travel, on the last rank, which attends to every block in full; the last also on rank
        0, which computes the logits.
        """
        chunks = self._d.chunks(prompt)
        last, far = len(chunks) - 1, self._d.world_size - 1
        places = {(0, far), (last, 0), (last, far), (keys_travel_until(self._d, chunks), far)}
        if chunks[last].end - chunks[last].begin < self._d.chunked_prefill_size:
            places.add((max(0, last - 1), far))
        found = [self.chunk(chunks, *place) for place in sorted(places)]
        return max(found, key=lambda sizes: sum(sizes.values()))

    def chunk(self, chunks: Seq[Chunk], index: int, rank: int) -> Counter[str]:
        """Bytes by label at the peak of one chunk on one rank."""
        allocations = Allocations()
        chunk, prompt = chunks[index], chunks[-1].end
        cache = self._d.cache(prompt, bounded=False)
        runner = self._runner(cache, rank, allocations, self._layout)
        self._open(runner, prompt, max_read=prompt)
        self._skip(runner, chunks[:index])
        plan = StepPlan(
            Op.PREFILL,
            0,
            begin=chunk.begin,
            end=chunk.end,
            last=chunk.end == prompt,
            payload=torch.zeros(chunk.end - chunk.begin, dtype=torch.int64),
        )
        with allocations:
            runner.execute(plan)
        sizes = allocations.transient()
        halo = sizes["halo"] + sizes["sinks"] + sizes["compensation"]
        return Counter(ring=sizes["ring"], halo=halo, chunk=sizes["model"])

    def _open(self, runner: ModelRunner, prompt: int, max_read: int = 0) -> None:
        size = self._d.chunked_prefill_size
        step = StepPlan(
            Op.OPEN, 0, end=prompt, total=prompt, chunked_prefill_size=size, max_read=max_read
        )
        runner.execute(step)

    def _runner(
        self, cache: CacheConfig, rank: int, allocations: Allocations, layout: HeadLayout
    ) -> ModelRunner:
        def ring(*arguments: Any) -> Tensor:
            with allocations.labelled("ring"):
                return ring_attention(*arguments)

        return ModelRunner(
            self._model,
            self._d.shape,
            layout,
            replace(cache, policy=_FewRuns(**vars(cache.policy))),
            SilentCommunicator(rank, self._d.world_size, allocations),
            ring,
        )

    def _skip(self, runner: ModelRunner, done: Seq[Chunk]) -> None:
        """Leave a sequence as if the chunks ``done`` had been prefilled."""
        sequence, rank = runner.sequences[0], runner.comm.rank
        if not done:
            return
        sequence.done, sequence.length = list(done), done[-1].end
        for r in range(runner.comm.size):
            sequence.shard_tokens[r] = sum(chunk.tokens(r) for chunk in done)
        sequence.table.tokens = sequence.shard_tokens[rank]
        if sequence.scratch is not None:
            sequence.scratch.tokens = sequence.shard_tokens[rank]
            return
        sequence.window = []
        for index, (cache, slot) in enumerate(
            zip(runner.caches.streaming, sequence.streaming, strict=True)
        ):
            slot.start = max(cache.policy.sinks, cache.policy.start(sequence.length))
            kept = Interval(slot.start, sequence.length)
            mine = [at for at, holder in holdings(done, kept) if holder == rank]
            sequence.window.append(
                {
                    layer: [self._piece(at, group.rows.stop - group.rows.start) for at in mine]
                    for layer, heads in enumerate(runner.caches.layout.layers)
                    for group in heads.groups
                    if group.index == index
                }
            )

    def _piece(self, at: Interval, rows: int) -> KVPiece:
        shape = (rows, len(at), self._d.shape.head_dim)
        k, v = (torch.empty(shape, dtype=self._d.kv_dtype, device=META) for _ in "kv")
        return KVPiece(at, k, v)


def _reserved(caches: Caches) -> dict[str, int]:
    return {
        "retrieval_kv": caches.pages.reserved_bytes,
        "streaming_cache": sum(cache.reserved_bytes for cache in caches.streaming),
        "scratch": 0 if caches.scratch is None else caches.scratch.reserved_bytes,
    }


def _kinds_of_layers(decision: HeadChoice) -> HeadChoice:
    """Return the choice for a few layers: most streaming heads, most retrieval heads, most even.

    One of them comes first once more, since a model's first layer has less in memory than the
    others: its input is the embedding itself.
    """
    kept = [sum(row) for row in decision.retrieval]
    order = sorted(range(len(kept)), key=lambda layer: kept[layer])
    half = len(decision.retrieval[0]) / 2
    even = min(order, key=lambda layer: abs(kept[layer] - half))
    kinds = {kept[layer]: layer for layer in (order[0], even, order[-1])}
    layers = [order[-1], *kinds.values()]
    windows = decision.windows
    return HeadChoice(
        [decision.retrieval[layer] for layer in layers],
        decision.source,
        windows=None if windows is None else tuple(windows[layer] for layer in layers),
    )


def _short_model(d: Deployment, layers: int) -> PreTrainedModel:
    """The model on the meta device with so many layers."""
    fields: dict[str, Any] = d.model.to_dict()
    fields["num_hidden_layers"] = layers
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][:layers]
    config: PretrainedConfig = type(d.model).from_dict(fields)
    remote = d.config.trust_remote_code
    return model_from_config(config, device=META, dtype=d.dtype, trust_remote_code=remote)
