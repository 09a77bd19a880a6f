"""One rank's share of the model's work: executes step plans."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence as Seq
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.attention.context import PassContext
from razor_dist.attention.decode import DecodeContext
from razor_dist.attention.prefill import PrefillContext
from razor_dist.attention.replicated import ReplicatedContext
from razor_dist.attention.sources import (
    QueryHeads,
    SourceHeads,
    Sources,
    SourceTracer,
    TracedContext,
)
from razor_dist.attention.step import BlockTables, Pass, Step, StepInputs
from razor_dist.cache.caches import CacheConfig, new_caches
from razor_dist.config.cores import usable_cores
from razor_dist.engine.commit import commit, commit_run
from razor_dist.engine.decode_mode import DecodeMode, postpones_rotations
from razor_dist.engine.decode_threads import DecodeThreads
from razor_dist.engine.device import wait_for_device
from razor_dist.engine.graph import DecodeGraphs, Recorder
from razor_dist.engine.prepare import Preparation
from razor_dist.engine.prompt_logprobs import split_logprobs
from razor_dist.engine.rank_stats import RankStats
from razor_dist.engine.sampler import likeliest
from razor_dist.engine.sequences import Sequences
from razor_dist.kernels.fused import postponed_rotations
from razor_dist.kernels.linear import ALIKE, choose_ways
from razor_dist.models.bridge import AttentionContext
from razor_dist.models.dual_chunk import dual_chunk_of
from razor_dist.models.longrope import position_mark
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.ring import RingAttention, ring_attention
from razor_dist.prefix.transfer import Transfers, load_job
from razor_dist.protocol.step_plan import (
    BatchEntry,
    Cache,
    Close,
    Compute,
    Fork,
    Load,
    Open,
    Report,
    Save,
    StepPlan,
    Stop,
)

log = logging.getLogger(__name__)

# Drafts lengthen a step to this many tokens of answers at most, on CPU to `ALIKE`: beyond that,
# arithmetic takes the time.
_MOST_DECODED = 64


class ModelRunner:
    """Runs the model over this rank's tokens and keeps its caches.

    ``model`` is loaded with our attention implementation. ``recorder`` records decode steps for
    replay; without it they run one operation at a time. Steps that ask ``source_heads`` for an
    answer's sources are never replayed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mode: DecodeMode,
        cache: CacheConfig,
        comm: Communicator,
        ring: RingAttention = ring_attention,
        recorder: Recorder | None = None,
        source_heads: QueryHeads = (),
    ) -> None:
        self.shape = shape = ModelShape.from_config(model.config)
        self.model, self.comm, self.config = model, comm, cache
        layout, tensor, _ = mode
        self._ring, self._tensor = ring, tensor
        self.decode = "replicated" if tensor is None else "tensor"
        self.device = next(model.parameters()).device
        # True if decode steps leave rotary embeddings to attention. Plans, on the meta device, have
        # no such step, and make a runner for each length that they look at.
        decodes = self.device.type != "meta"
        self._postpones = decodes and postpones_rotations(model, comm)
        self.caches = new_caches(layout, shape, cache, self.device)
        if shape.dual_chunk is not None:
            self.caches.dual = dual_chunk_of(model.base_model)
        self._preparation = Preparation(comm, self.caches, tensor_parallel=tensor is not None)
        self._nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        if self.device.type == "cpu":
            choose_ways()
        threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        crowded = local * threads > usable_cores()
        self._threads = DecodeThreads(threads, chooses=comm.size == 1, crowded=crowded)
        self.graphs: DecodeGraphs | None = None
        if recorder is not None:
            forward, dtype = self.decode_logits, model.dtype
            self.graphs = DecodeGraphs(comm, self.caches, forward, recorder, dtype=dtype)
        self.sequences = Sequences(comm, self.caches, self.position_mark)
        self.patience = math.inf  # seconds, for the device
        self.source_heads = SourceHeads(layout, source_heads, shape.query_heads // shape.kv_heads)
        # Of the last step's tokens that asked, by sequence and in order; on rank 0.
        self.sources: dict[int, list[Sources]] = {}
        self._runs: list[int] = []  # sequences with a run in the last step: `StepPlan.kept`
        # Of the last step's logits, if it was one of answers alone: int64 [n], `likeliest`.
        self.likeliest: Tensor | None = None
        # Of the last step's chunks, by sequence: `split_logprobs`.
        self.prompt_logprobs: dict[int, Tensor] = {}
        self.transfers: Transfers | None = None  # to host memory and disk, if that is wanted

    @property
    def slowdown(self) -> float:
        """Factor by which other programs on this host slow down this rank's steps, at least 1."""
        return self._threads.slowdown

    @property
    def most_decoded(self) -> int:
        """Tokens of answers in a step, at most, that drafts may bring it to."""
        # Where blocks are chosen, longer steps are faster, and last bits may differ.
        alike = self.device.type == "cpu" and self.caches.choice is None
        return ALIKE if alike else _MOST_DECODED

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor | None:
        """Carry out one step.

        Return, on rank 0, float32 logits ``[n, V]`` after a step's entries that have any, in their
        order (`BatchEntry.samples`), or the gathered counters after `Report`. After `Save` and
        `Load`, on all ranks, how far each is. Otherwise None.
        """
        for key, tokens in zip(self._runs, plan.kept, strict=True):
            commit_run(self.comm.rank, self.caches, self.sequences[key], tokens)
        self._runs = []
        match plan:
            case Open():
                self.sequences.open(plan)
            case Fork():
                self.sequences.fork(plan)
            case Close():
                self._threads.use_all()
                self.sequences.close(plan.sequence)
            case Cache():
                self._threads.use_all()
                self.sequences.cache(plan.sequence)
            case Compute():
                decoded = all(entry.decoded for entry in plan.entries)
                tokens = sum(len(entry.tokens) for entry in plan.entries) * decoded
                for entry in plan.entries:
                    if entry.sharded:
                        self.sequences.begin_chunks(entry.sequence)
                with self._threads.step(tokens):
                    return self._step(plan.entries)
            case Report():
                return self._stats()
            case Save():
                assert self.transfers is not None
                return self.transfers.save(self.sequences.get(plan.sequence), plan.payload)
            case Load():
                return self._load(plan)
            case Stop():
                pass
        return None

    def synchronize(self) -> None:
        wait_for_device(self.device, self.patience)

    def position_mark(self, max_read: int) -> int:
        """The mark of a sequence's positions (`razor_dist.models.longrope`)."""
        return position_mark(self.model.base_model, max_read)

    def close(self) -> None:
        """Let go of what the end of the process group would wait for (`DecodeGraphs.close`)."""
        if self.graphs is not None:
            self.graphs.close()

    def _load(self, plan: Load) -> Tensor:
        """Begin to load a stored sequence, or go on with it."""
        assert self.transfers is not None
        if plan.payload:
            job = load_job(plan.payload)
            self.sequences.restore(plan.sequence, job.end, job.chunks, job.mark)
        return self.transfers.load(self.sequences[plan.sequence], plan.payload)

    def _step(self, entries: Seq[BatchEntry]) -> Tensor | None:
        """Prepare, run, commit."""
        step = self.prepare(entries)
        self.prompt_logprobs, self.sources, self.likeliest = {}, {}, None
        found = [self._run(part) for part in step.passes]
        if len(found) > 1:
            self.likeliest = None  # only the first pass's
        logits = found[0] if len(found) == 1 else torch.cat(found)
        if any(entry.prompt_logprobs >= 0 for entry in entries):
            self.prompt_logprobs, logits = split_logprobs(self.comm, entries, step, logits)
        commit(self.comm.rank, self.caches, step, self.sequences)
        self._runs = [key for key, tokens in step.runs if tokens > 1]
        self.sequences.note_peak()
        return logits if self.comm.rank == 0 else None

    def prepare(self, entries: Seq[BatchEntry]) -> Step:
        """The step of ``entries`` as data, without a word to other ranks."""
        return self._preparation.step(entries, self.sequences)

    def decode_logits(
        self, inputs: StepInputs, tables: BlockTables, *, beyond_chunk: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[n, V]`` after n tokens of answers, and `likeliest`; on rank 0, which samples.

        The other ranks have none of the rows. ``beyond_chunk`` is as `DecodeContext` has it.
        """
        context = DecodeContext(self.comm, self.caches, inputs, tables, beyond_chunk=beyond_chunk)
        keep = None if self._tensor is not None or self.comm.rank == 0 else self._nothing
        shares = self._tensor is not None
        with postponed_rotations(self._postpones):
            logits = self._forward(inputs.token, inputs.model_position, context, keep, shares)
        return logits, likeliest(logits)

    def _run(self, part: Pass) -> Tensor:
        """float32 logits ``[n, V]`` of one pass."""
        beyond = part.decode is not None and self.caches.beyond_chunk(part.decode.end)
        if part.recordable:
            assert part.decode is not None
            if self.graphs is not None and not beyond:
                logits, self.likeliest = self.graphs.run(part.decode)
            else:
                inputs, tables = part.decode.on(self.device, len(part.decode))
                found = self.decode_logits(inputs, tables, beyond_chunk=beyond)
                logits, self.likeliest = found
            return logits
        contexts: list[DecodeContext | ReplicatedContext | PrefillContext] = []
        ids, positions = [], []
        if part.decode is not None:
            inputs, tables = part.decode.on(self.device, len(part.decode))
            of, readers = (self.comm, self.caches, inputs, tables), part.decode.readers
            contexts.append(DecodeContext(*of, beyond_chunk=beyond, readers=readers))
            ids, positions = [inputs.token], [inputs.model_position]
        if part.replicated:
            contexts.append(ReplicatedContext(self.comm, self.caches, part.replicated))
        chunks = [PrefillContext(self.comm, self.caches, of, self._ring) for of in part.chunks]
        context: AttentionContext = PassContext(*contexts, *chunks)
        tracer = None
        if part.sources:
            tracer = SourceTracer(self.comm, self.caches, self.source_heads, part.sources)
            context = TracedContext(context, tracer)
        logits = self._forward(
            torch.cat([*ids, part.ids]),
            torch.cat([*positions, part.model_positions]),
            context,
            part.logits,
            part.tensor_parallel,
        )
        if tracer is not None:
            # Rank 0 alone has any.
            for token, sources in zip(part.sources, tracer.gather(), strict=False):
                self.sources.setdefault(token.sequence, []).append(sources)
        return logits

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        keep: Tensor | None,
        tensor_parallel: bool,
    ) -> Tensor:
        """float32 logits ``[n, V]`` of the tokens at indices ``keep``; None keeps all."""
        tensor = self._tensor if tensor_parallel else None
        with nullcontext() if tensor is None else tensor.sharing():
            output = self.model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                attention_context=context,
            )
        logits = output.logits[0].float()
        return logits if tensor is None else tensor.gather_logits(logits)

    def _stats(self) -> Tensor | None:
        """Every rank's `RankStats.row`, int64 ``[P, n]``."""
        row = RankStats.now(self.comm, self.caches, self.sequences).row
        gathered = self.comm.all_gather(torch.tensor(row, device=self.device), "control")
        return gathered.cpu() if self.comm.rank == 0 else None
