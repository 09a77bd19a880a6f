"""One rank's share of the model's work: executes step plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.attention.prefill import PrefillContext
from razor_dist.attention.short import PromptPiece, ShortContext
from razor_dist.attention.short_inputs import (
    ReadExtent,
    StepInputs,
    advance_lengths,
    drop_outdated,
    exact_extent,
    step_inputs,
)
from razor_dist.cache.sequence import Sequence, shard_sizes
from razor_dist.config.memory import resident_bytes
from razor_dist.engine.capacity import CacheConfig, new_caches
from razor_dist.engine.graph import DecodeGraphs, Recorder
from razor_dist.engine.step import Op, StepPlan
from razor_dist.heads.layout import HeadLayout
from razor_dist.models.bridge import AttentionContext
from razor_dist.models.longrope import position_mark
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import PURPOSES, Communicator
from razor_dist.parallel.ring import RingAttention, positions_of, ring_attention
from razor_dist.parallel.zigzag import Chunk

log = logging.getLogger(__name__)


class ModelRunner:
    """Runs the model over this rank's tokens and keeps its caches.

    ``model`` is loaded with our attention implementation. ``recorder`` records decode steps for
    replay; without it they run one operation at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        layout: HeadLayout,
        cache: CacheConfig,
        comm: Communicator,
        ring: RingAttention = ring_attention,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.shape, self.comm, self.config = model, shape, comm, cache
        self._ring = ring
        self.device = next(model.parameters()).device
        self.caches = new_caches(layout, shape, cache, self.device, clear=recorder is not None)
        self._nothing = self._integers([])
        self.graphs: DecodeGraphs | None = None
        if recorder is not None:
            self.graphs = DecodeGraphs(comm, self.caches, self.short_logits, recorder, model.dtype)
        self.sequences: dict[int, Sequence] = {}
        self.peak_kv_bytes = 0
        self.prompt_logprobs: Tensor | None = None  # of the last chunk: `_gather_logprobs`

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor | None:
        """Carry out one step.

        Return, on rank 0, float32 logits ``[1, V]`` after a prompt's last chunk and ``[n, V]``
        after a short step of n sequences, or the gathered counters after STATS. Otherwise None.
        """
        match plan.op:
            case Op.OPEN:
                self._open(plan)
            case Op.FORK:
                self._fork(plan)
            case Op.CLOSE:
                self._close(plan.sequence)
            case Op.LONG:
                return self._long(plan)
            case Op.SHORT:
                return self._short(plan)
            case Op.STATS:
                return self._stats()
            case Op.STOP:
                pass
        return None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Let go of what the end of the process group would wait for (`DecodeGraphs.close`)."""
        if self.graphs is not None:
            self.graphs.close()

    def _open(self, plan: StepPlan) -> None:
        sizes = shard_sizes(0, plan.end, plan.total, self.comm.size)
        scratch = None
        if self.caches.scratch is not None and plan.end:
            prompt = shard_sizes(0, plan.end, plan.end, self.comm.size)
            scratch = self.caches.scratch.allocate(prompt[self.comm.rank])
        self.sequences[plan.sequence] = Sequence(
            total=plan.total,
            table=self.caches.pages.allocate(sizes[self.comm.rank]),
            shard_tokens=[0] * self.comm.size,
            streaming=tuple(cache.allocate(plan.total) for cache in self.caches.streaming),
            scratch=scratch,
            position_mark=position_mark(self.model.base_model, plan.max_read),
        )
        self._note_peak()

    def _fork(self, plan: StepPlan) -> None:
        source = self.sequences[plan.source]
        assert source.window is None and source.scratch is None, "fork finished prompts only"
        new = shard_sizes(source.length, plan.end, plan.total, self.comm.size)[self.comm.rank]
        table = self.caches.pages.fork(source.table, source.table.tokens + new)
        self.sequences[plan.sequence] = Sequence(
            total=plan.total,
            table=table,
            shard_tokens=list(source.shard_tokens),
            streaming=tuple(
                cache.fork(slot, source.length, plan.total)
                for cache, slot in zip(self.caches.streaming, source.streaming, strict=True)
            ),
            length=source.length,
            position_mark=source.position_mark,
            chunks=list(source.chunks),
        )
        self._note_peak()

    def _close(self, key: int) -> None:
        sequence = self.sequences.pop(key)
        self.caches.pages.release(sequence.table)
        for cache, slot in zip(self.caches.streaming, sequence.streaming, strict=True):
            cache.release(slot)
        if sequence.scratch is not None:
            assert self.caches.scratch is not None
            self.caches.scratch.release(sequence.scratch)

    def _forward(
        self, ids: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor | int
    ) -> Tensor:
        """float32 logits ``[n, V]`` of the tokens at indices ``keep``; 0 keeps all."""
        output = self.model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep,
            attention_context=context,
        )
        return output.logits[0].float()

    def _integers(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _long(self, plan: StepPlan) -> Tensor | None:
        chunk = Chunk(plan.begin, plan.end, self.comm.size)
        sequence = self.sequences[plan.sequence]
        context = PrefillContext(
            self.comm, self.caches, sequence, chunk, last=plan.last, ring=self._ring
        )
        payload = plan.payload.to(self.device)
        positions = positions_of(chunk.ranges(self.comm.rank), self.device)
        at = positions - chunk.begin
        samples = plan.last and self.comm.rank == 0  # it holds the last token of every chunk
        if plan.prompt_logprobs >= 0:
            keep = torch.arange(len(at), device=self.device)
        else:
            keep = self._integers([len(at) - 1] if samples else [])
        # A model may not take an empty sequence: a rank without tokens runs one dummy token.
        dummy = self._integers([] if len(at) else [0])
        logits = self._forward(
            torch.cat([payload[at], dummy]),
            torch.cat([positions, dummy]) + sequence.position_mark,
            context,
            keep,
        )
        context.finish()
        self._note_peak()
        self.prompt_logprobs = None
        if plan.prompt_logprobs >= 0:
            # The prompt's last token has no next token: any id does, its row is cut off below.
            padded = torch.cat([payload[1:], self._integers([0])])
            self.prompt_logprobs = self._gather_logprobs(plan, chunk, padded[at], logits)
        return logits[-1:] if samples else None

    def _gather_logprobs(
        self, plan: StepPlan, chunk: Chunk, following: Tensor, logits: Tensor
    ) -> Tensor:
        """Log-probabilities of the tokens ``following`` each of the chunk's, from all ranks.

        A row of the float64 table ``[n, 2 + 2 k]`` has the token's log-probability, its place, 1
        for the likeliest, and the k likeliest tokens' log-probabilities and ids.
        """
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(-1, following.unsqueeze(-1))
        rank = (logprobs > chosen).sum(-1, keepdim=True) + 1
        top = logprobs.topk(plan.prompt_logprobs, dim=-1)
        # Ids and ranks are exact in float64, so one tensor carries all.
        table = torch.cat([chosen, rank, top.values, top.indices], dim=-1).double()
        most = max(chunk.tokens(r) for r in range(self.comm.size))
        padded = torch.zeros(most, table.shape[1], dtype=torch.float64, device=self.device)
        padded[: len(following)] = table
        gathered = self.comm.all_gather(padded, "control").cpu()
        rows = torch.empty(chunk.end - chunk.begin, table.shape[1], dtype=torch.float64)
        for r in range(self.comm.size):
            at = positions_of(chunk.ranges(r), rows.device) - chunk.begin
            rows[at] = gathered[r, : len(at)]
        return rows[: len(plan.payload) - 1]

    def _short(self, plan: StepPlan) -> Tensor | None:
        found = [(self.sequences[key], tokens) for key, tokens in plan.by_sequence()]
        single = [(sequence, tokens[0]) for sequence, tokens in found if len(tokens) == 1]
        sequences, offset = [sequence for sequence, _ in single], len(single)
        pieces = []
        for sequence, tokens in found[offset:]:
            ids = self._integers(tokens)
            pieces.append(PromptPiece(self.comm, self.caches, sequence, ids, offset))
            offset += len(tokens)
        drop_outdated(self.caches, sequences)
        inputs = step_inputs(self.comm, self.caches, single)
        if self.graphs is not None and not pieces:
            logits = self.graphs.run(sequences, inputs)
        else:
            extents = [exact_extent(self.comm, self.caches, s) for s in sequences]
            logits = self.short_logits(extents, StepInputs.of(inputs.to(self.device)), pieces)
        advance_lengths(self.comm, sequences)
        for piece in pieces:
            piece.finish()
        self._note_peak()
        return logits if self.comm.rank == 0 else None

    def short_logits(
        self, extents: Seq[ReadExtent], inputs: StepInputs, pieces: Seq[PromptPiece] = ()
    ) -> Tensor:
        """Logits ``[n, V]`` of a short step; only rank 0, which samples, computes any."""
        context = ShortContext(self.comm, self.caches, extents, inputs, pieces)
        keep: Tensor | int = 0 if self.comm.rank == 0 else self._nothing
        ids, positions = inputs.token, inputs.model_position
        if pieces:
            ids = torch.cat([ids, *(piece.tokens for piece in pieces)])
            positions = torch.cat([positions, *(piece.model_positions for piece in pieces)])
            if self.comm.rank == 0:
                keep = self._integers([*range(len(extents)), *(p.at.stop - 1 for p in pieces)])
        return self._forward(ids, positions, context, keep)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that sequences hold on this rank now."""
        held = sum(store.used_bytes for store in self.caches.stores)
        for sequence in self.sequences.values():
            for by_layer in sequence.window or ():
                for pieces in by_layer.values():
                    held += sum(p.k.nbytes + p.v.nbytes for p in pieces)
        return held

    def _note_peak(self) -> None:
        self.peak_kv_bytes = max(self.peak_kv_bytes, self.kv_bytes)

    def _stats(self) -> Tensor | None:
        """``[P, 6 + purposes]`` int64.

        KV bytes, their peak, those of retrieval heads; RSS, its peak; CPU; bytes by purpose.
        """
        sent = [self.comm.bytes_sent[p] for p in PURPOSES]
        cpu_us = time.process_time_ns() // 1000
        kv = [self.kv_bytes, self.peak_kv_bytes, self.caches.pages.used_bytes]
        numbers = [*kv, *resident_bytes(), cpu_us, *sent]
        row = torch.tensor(numbers, device=self.device)
        gathered = self.comm.all_gather(row, "control")
        return gathered.cpu() if self.comm.rank == 0 else None
