"""One rank's share of the model's work: executes step plans."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.attention.decode import DecodeContext
from razor_dist.attention.prefill import PrefillContext
from razor_dist.attention.shared_window import share_windows
from razor_dist.attention.short import PromptPiece, ShortContext
from razor_dist.attention.short_inputs import (
    BlockTables,
    StepInputs,
    advance_lengths,
    drop_outdated,
    exact_extent,
    exact_tables,
    step_inputs,
)
from razor_dist.attention.sources import (
    QueryHeads,
    SourceHeads,
    Sources,
    SourceTracer,
    TracedContext,
)
from razor_dist.attention.step import StepContext
from razor_dist.cache.caches import CacheConfig, new_caches
from razor_dist.cache.sequence import Sequence
from razor_dist.config.cores import usable_cores
from razor_dist.config.memory import resident_bytes
from razor_dist.engine.decode_threads import DecodeThreads
from razor_dist.engine.device import wait_for_device
from razor_dist.engine.graph import DecodeGraphs, Recorder
from razor_dist.engine.tensor_parallel import TensorParallel
from razor_dist.heads.layout import HeadLayout
from razor_dist.kernels.decode import available
from razor_dist.kernels.linear import choose_ways
from razor_dist.models.bridge import AttentionContext
from razor_dist.models.longrope import position_mark
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import PURPOSES, Communicator
from razor_dist.parallel.earlier import positions_of
from razor_dist.parallel.ring import RingAttention, ring_attention
from razor_dist.parallel.sharding import cut_chunks, shard_lengths, shard_sizes
from razor_dist.parallel.zigzag import Chunk
from razor_dist.prefix.transfer import Transfers, of_payload
from razor_dist.protocol.step_plan import Op, Piece, StepPlan

log = logging.getLogger(__name__)


class ModelRunner:
    """Runs the model over this rank's tokens and keeps its caches.

    ``model`` is loaded with our attention implementation. ``recorder`` records decode steps for
    replay; without it they run one operation at a time. ``source_heads`` are asked where answers
    come from; steps in which they are, are never replayed. With ``tensor``, whose layout it is, the
    ranks share short steps.
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
        source_heads: QueryHeads = (),
        tensor: TensorParallel | None = None,
    ) -> None:
        self.model, self.shape, self.comm, self.config = model, shape, comm, cache
        self._ring, self._tensor = ring, tensor
        self.decode = "replicated" if tensor is None else "tensor"
        self.device = next(model.parameters()).device
        self.caches = new_caches(layout, shape, cache, self.device)
        self._nothing = self._integers([])
        # Answers' tokens are computed all at once, or sequence by sequence: by all ranks alike, as
        # they gather otherwise.
        at_once = available(self.device)
        if self.device.type == "cpu":  # each host may have a compiler or none
            choose_ways()
            at_once = bool(comm.all_gather(self._integers([at_once]), "control").all())
            recorder = recorder if at_once else None
        threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        crowded = local * threads > usable_cores()
        self._threads = DecodeThreads(threads, chooses=comm.size == 1, crowded=crowded)
        self._batched = recorder is not None or at_once
        self.graphs: DecodeGraphs | None = None
        if recorder is not None:
            self.graphs = DecodeGraphs(comm, self.caches, self.step_logits, recorder, model.dtype)
        self.sequences: dict[int, Sequence] = {}
        self.peak_kv_bytes = 0
        self.patience = math.inf  # seconds, for the device
        self.source_heads = SourceHeads(layout, source_heads, shape.query_heads // shape.kv_heads)
        # Of the last step's tokens that asked, by sequence; on rank 0.
        self.sources: dict[int, Sources] = {}
        self._tracer: SourceTracer | None = None  # of the running step
        # Of the last step's chunks, by sequence: `_gather_logprobs`.
        self.prompt_logprobs: dict[int, Tensor] = {}
        self.transfers: Transfers | None = None  # to host memory and disk, if that is wanted

    @property
    def slowdown(self) -> float:
        """Factor by which other programs on this host slow down this rank's steps, at least 1."""
        return self._threads.slowdown

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor | None:
        """Carry out one step.

        Return, on rank 0, float32 logits ``[n, V]`` after a step's pieces that have any, in their
        order (`Piece.samples`), or the gathered counters after STATS. After SAVE and LOAD, on all,
        how far all ranks are. Otherwise None.
        """
        match plan.op:
            case Op.OPEN:
                self._open(plan)
            case Op.FORK:
                self._fork(plan)
            case Op.CLOSE:
                self._threads.use_all()
                self._close(plan.sequence)
            case Op.KEEP:
                self._threads.use_all()
                self._keep(plan.sequence)
            case Op.STEP:
                decoded = all(piece.single for piece in plan.pieces)
                with self._threads.step(len(plan.pieces) * decoded):
                    return self._step(plan.pieces)
            case Op.STATS:
                return self._stats()
            case Op.SAVE:
                assert self.transfers is not None
                return self.transfers.save(self.sequences.get(plan.sequence), plan.payload)
            case Op.LOAD:
                return self._load(plan)
            case Op.STOP:
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
            position_mark=self.position_mark(plan.max_read),
        )
        self._note_peak()

    def _fork(self, plan: StepPlan) -> None:
        source, cut, size = self.sequences[plan.source], plan.begin, self.comm.size
        assert source.window is None and source.scratch is None, "fork finished prompts only"
        stored = shard_lengths(source.chunks, cut, size)
        mine = stored[self.comm.rank]
        new = shard_sizes(cut, plan.end, plan.total, size)[self.comm.rank]
        self.sequences[plan.sequence] = Sequence(
            total=plan.total,
            table=self.caches.pages.fork(source.table, mine, mine + new),
            shard_tokens=stored,
            streaming=tuple(
                cache.fork(slot, cut, plan.total, instead=plan.instead)
                for cache, slot in zip(self.caches.streaming, source.streaming, strict=True)
            ),
            length=cut,
            position_mark=source.position_mark,
            chunks=cut_chunks(source.chunks, cut),
        )
        if plan.instead:
            self.caches.pages.release(self.sequences.pop(plan.source).table)
        self._note_peak()

    def _keep(self, key: int) -> None:
        sequence = self.sequences[key]
        assert sequence.window is None and sequence.scratch is None, "keep finished prompts only"
        self.caches.pages.cache(sequence.table)
        for cache, slot in zip(self.caches.streaming, sequence.streaming, strict=True):
            cache.cache(slot, sequence.length, sequence.total)

    def _load(self, plan: StepPlan) -> Tensor:
        """Make a sequence of what is stored of one, or go on with that."""
        assert self.transfers is not None
        if len(plan.payload):
            job, rank = of_payload(plan.payload), self.comm.rank
            chunks = [Chunk(a, b, self.comm.size, (c, d)) for a, b, c, d in job["chunks"]]
            sizes = shard_lengths(chunks, plan.total, self.comm.size)
            table = self.caches.pages.allocate(sizes[rank])
            table.tokens = sizes[rank]
            self.sequences[plan.sequence] = Sequence(
                total=plan.total,
                table=table,
                shard_tokens=sizes,
                streaming=tuple(cache.allocate(plan.total) for cache in self.caches.streaming),
                length=plan.total,
                position_mark=job["mark"],
                chunks=chunks,
            )
            self._note_peak()
        return self.transfers.load(self.sequences[plan.sequence], plan.payload)

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
        if self._tracer is not None:
            context = TracedContext(context, self._tracer)
        output = self.model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep,
            attention_context=context,
        )
        return output.logits[0].float()

    def _short_forward(
        self, ids: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor | int
    ) -> Tensor:
        """`_forward` of a short step: logits on rank 0, none on the others."""
        if self._tensor is None:
            keep = keep if self.comm.rank == 0 else self._nothing
            return self._forward(ids, positions, context, keep)
        with self._tensor.sharing():
            logits = self._forward(ids, positions, context, keep)
        return self._tensor.gather_logits(logits)

    def _integers(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _step(self, pieces: Seq[Piece]) -> Tensor | None:
        found = [(self.sequences[piece.sequence], piece) for piece in pieces]
        single = [(sequence, int(piece.tokens[0])) for sequence, piece in found if piece.single]
        sequences = [sequence for sequence, _ in single]
        offset = 0 if self._batched else len(single)  # of whole pieces, in their context's tokens
        wholes: list[PromptPiece] = []
        chunks: list[tuple[Piece, PrefillContext]] = []
        for sequence, piece in found[len(single) :]:
            tokens = piece.tokens.to(self.device)
            if piece.sharded:
                share_windows(self.comm, self.caches, sequence)
                at = Chunk(sequence.length, sequence.length + len(tokens), self.comm.size)
                prefill = PrefillContext(
                    self.comm, self.caches, sequence, at, last=piece.last, ring=self._ring
                )
                chunks.append((piece, prefill))
            else:
                wholes.append(PromptPiece(self.comm, self.caches, sequence, tokens, offset))
                offset += len(tokens)
        drop_outdated(self.caches, sequences)
        inputs = step_inputs(self.comm, self.caches, single)
        self.prompt_logprobs, self.sources = {}, {}
        asking = [(t, piece.sequence) for t, piece in enumerate(pieces) if piece.sources]
        self._tracer = None
        if asking:
            of = [(t, self.sequences[key]) for t, key in asking]
            self._tracer = SourceTracer(self.comm, self.caches, self.source_heads, of)
        if self.graphs is not None and len(single) == len(pieces) and not asking:
            logits = self.graphs.run(sequences, inputs)
        else:
            on_device = StepInputs.of(inputs.to(self.device))
            if self._tensor is not None:
                logits = self._shared_logits(sequences, on_device, wholes, chunks)
            elif self._batched and not (wholes or chunks):
                tables = exact_tables(self.comm, self.caches, sequences, len(sequences))
                logits = self.step_logits(on_device, tables)
            else:
                logits = self._mixed_logits(sequences, on_device, wholes, chunks)
        if self._tracer is not None:
            gathered = self._tracer.gather()
            self.sources = dict(zip([key for _, key in asking], gathered, strict=False))
        advance_lengths(self.comm, sequences)
        for whole in wholes:
            whole.finish()
        for _, prefill in chunks:
            prefill.finish()
        self._note_peak()
        return logits if self.comm.rank == 0 else None

    def step_logits(self, inputs: StepInputs, tables: BlockTables) -> Tensor:
        """Logits ``[n, V]`` after one token of n sequences; only rank 0, which samples, has any."""
        context = DecodeContext(self.comm, self.caches, inputs, tables)
        return self._short_forward(inputs.token, inputs.model_position, context, 0)

    def _shared_logits(
        self,
        sequences: Seq[Sequence],
        inputs: StepInputs,
        wholes: Seq[PromptPiece],
        chunks: Seq[tuple[Piece, PrefillContext]],
    ) -> Tensor:
        """`_mixed_logits` in tensor mode: what is read in chunks is a pass of its own."""
        found = []
        if sequences or wholes:
            lengths = [1] * len(sequences) + [len(whole.tokens) for whole in wholes]
            ends = list(itertools.accumulate(lengths))
            logits = self._short_forward(
                torch.cat([inputs.token, *(whole.tokens for whole in wholes)]),
                torch.cat([inputs.model_position, *(whole.model_positions for whole in wholes)]),
                StepContext(self._short_contexts(sequences, inputs, wholes), []),
                self._integers([end - 1 for end in ends]),
            )
            found.append(logits)
        if chunks:
            none = step_inputs(self.comm, self.caches, []).to(self.device)
            tracer, self._tracer = self._tracer, None  # it has seen the tokens that ask
            found.append(self._mixed_logits([], StepInputs.of(none), [], chunks))
            self._tracer = tracer
        return torch.cat(found)

    def _mixed_logits(
        self,
        sequences: Seq[Sequence],
        inputs: StepInputs,
        wholes: Seq[PromptPiece],
        chunks: Seq[tuple[Piece, PrefillContext]],
    ) -> Tensor:
        """Logits of a step that reads prompts as well, whole ones and chunks, in this order.

        Note log-probabilities of the prompts' tokens where they are asked for.
        """
        first = self.comm.rank == 0  # it samples, and holds the last token of every chunk
        # This rank's tokens, their positions, and those of which logits are wanted.
        parts = [(inputs.token, inputs.model_position, range(first * len(sequences)))]
        for whole in wholes:
            n = len(whole.tokens)
            parts.append((whole.tokens, whole.model_positions, range(n - first, n)))
        for piece, prefill in chunks:
            at, n = prefill.positions, prefill.tokens
            own = piece.tokens.to(self.device)[at - prefill.chunk.begin]
            begin = 0 if piece.prompt_logprobs >= 0 else n - (first and piece.last)
            parts.append((own, at + prefill.sequence.position_mark, range(begin, n)))
        ids, positions, wanted = zip(*parts, strict=True)
        keep, end = [], 0
        for own, of in zip(ids, wanted, strict=True):
            keep += [end + index for index in of]
            end += len(own)
        # A model may not take an empty sequence: a rank without tokens runs one dummy token.
        dummy = self._integers([] if end else [0])
        contexts = self._short_contexts(sequences, inputs, wholes)
        logits = self._forward(
            torch.cat([*ids, dummy]),
            torch.cat([*positions, dummy]),
            StepContext(contexts, [prefill for _, prefill in chunks]),
            self._integers(keep),
        )
        rows = list(logits.split([len(of) for of in wanted]))
        for index, (piece, prefill) in enumerate(chunks, 1 + len(wholes)):
            if piece.prompt_logprobs >= 0:
                found = self._gather_logprobs(piece, prefill, rows[index])
                self.prompt_logprobs[piece.sequence] = found
                rows[index] = rows[index][len(rows[index]) - piece.last :]
        return torch.cat(rows)

    def _short_contexts(
        self, sequences: Seq[Sequence], inputs: StepInputs, wholes: Seq[PromptPiece]
    ) -> list[DecodeContext | ShortContext]:
        if not self._batched:
            extents = [exact_extent(self.comm, self.caches, s) for s in sequences]
            return [ShortContext(self.comm, self.caches, extents, inputs, wholes)]
        tables = exact_tables(self.comm, self.caches, sequences, len(sequences))
        return [
            DecodeContext(self.comm, self.caches, inputs, tables),
            ShortContext(self.comm, self.caches, (), inputs.tokens(0), wholes),
        ]

    def _gather_logprobs(self, piece: Piece, prefill: PrefillContext, logits: Tensor) -> Tensor:
        """Log-probabilities of the tokens that follow each of a chunk's, from all ranks.

        A row of the float64 table ``[n, 2 + 2 k]`` has the token's log-probability, its place, 1
        for the likeliest, and the k likeliest tokens' log-probabilities and ids. ``logits`` are of
        this rank's tokens.
        """
        chunk, known = prefill.chunk, len(piece.tokens) - (piece.following < 0)
        # The prompt's last token has no next token: any id does, its row is cut off below.
        after = torch.cat([piece.tokens[1:], torch.tensor([max(0, piece.following)])])
        following = after.to(self.device)[prefill.positions - chunk.begin]
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(-1, following.unsqueeze(-1))
        rank = (logprobs > chosen).sum(-1, keepdim=True) + 1
        top = logprobs.topk(piece.prompt_logprobs, dim=-1)
        # Ids and ranks are exact in float64, so one tensor carries all.
        table = torch.cat([chosen, rank, top.values, top.indices], dim=-1).double()
        most = max(chunk.tokens(r) for r in range(self.comm.size))
        padded = torch.zeros(most, table.shape[1], dtype=torch.float64, device=self.device)
        padded[: len(following)] = table
        gathered = self.comm.all_gather(padded, "control").cpu()
        rows = torch.empty(len(piece.tokens), table.shape[1], dtype=torch.float64)
        for r in range(self.comm.size):
            at = positions_of(chunk.ranges(r), rows.device) - chunk.begin
            rows[at] = gathered[r, : len(at)]
        return rows[:known]

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that sequences in use hold on this rank now."""
        held = sum(store.used_bytes for store in self.caches.stores)
        for sequence in self.sequences.values():
            for by_layer in sequence.window or ():
                for pieces in by_layer.values():
                    held += sum(p.k.nbytes + p.v.nbytes for p in pieces)
        return held

    @property
    def cached_bytes(self) -> int:
        """Bytes of keys and values that may be evicted on this rank."""
        return self.caches.pages.cached_bytes + sum(c.cached_bytes for c in self.caches.streaming)

    def _note_peak(self) -> None:
        self.peak_kv_bytes = max(self.peak_kv_bytes, self.kv_bytes)

    def _stats(self) -> Tensor | None:
        """``[P, 7 + purposes]`` int64.

        KV bytes in use, their peak, those of retrieval heads; bytes that are cached; RSS, its peak;
        CPU; bytes by purpose.
        """
        sent = [self.comm.bytes_sent[p] for p in PURPOSES]
        cpu_us = time.process_time_ns() // 1000
        kv = [self.kv_bytes, self.peak_kv_bytes, self.caches.pages.used_bytes, self.cached_bytes]
        numbers = [*kv, *resident_bytes(), cpu_us, *sent]
        row = torch.tensor(numbers, device=self.device)
        gathered = self.comm.all_gather(row, "control")
        return gathered.cpu() if self.comm.rank == 0 else None
