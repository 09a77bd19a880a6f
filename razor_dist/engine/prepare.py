"""From a plan and the sequences to a step as data; see `razor_dist.attention.step`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.attention.step import (
    BlockReader,
    ChunkTokens,
    DecodeBatch,
    Pass,
    ReplicatedTokens,
    ShardPart,
    SourceToken,
    Step,
    WindowPart,
)
from razor_dist.attention.window_plan import Storage, WindowPlan, plan_compression, plan_window
from razor_dist.cache.caches import Caches
from razor_dist.cache.pages import PagePool, PageTable
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.cache.sequence import Sequence
from razor_dist.cache.slots import StreamingSlot
from razor_dist.cache.streaming import ChunkedWindow, StreamingCache
from razor_dist.kernels.chosen import Shard
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import positions_of
from razor_dist.parallel.sharding import owned_tokens, owner_of, shard_positions, shard_sizes
from razor_dist.parallel.zigzag import Chunk, Interval, holdings
from razor_dist.protocol.step_plan import BatchEntry


class Preparation:
    """Prepares the steps of one rank; ``tensor_parallel`` is that of short steps."""

    def __init__(self, comm: Communicator, caches: Caches, *, tensor_parallel: bool) -> None:
        self._comm, self._caches, self._tensor_parallel = comm, caches, tensor_parallel
        self._device = caches.pages.k.device

    def step(self, entries: Seq[BatchEntry], sequences: Mapping[int, Sequence]) -> Step:
        """Prepare a step of ``entries``, in their order (`Compute.of`)."""
        decoded = [entry for entry in entries if entry.decoded]
        whole = [entry for entry in entries if not (entry.decoded or entry.sharded)]
        sharded = [entry for entry in entries if entry.sharded]
        runs = [(entry.sequence, len(entry.tokens)) for entry in decoded]
        decode, sources = None, []
        if decoded:
            decode = self._decode([(sequences[e.sequence], e.tokens.tolist()) for e in decoded])
            sources = self._sources(decoded, sequences)
        offsets = itertools.accumulate((len(entry.tokens) for entry in whole), initial=0)
        replicated = [
            self._replicated(entry, sequences[entry.sequence], offset)
            for entry, offset in zip(whole, offsets, strict=False)
        ]
        chunks = [self._chunk(entry, sequences[entry.sequence]) for entry in sharded]
        prompts = [*whole, *sharded]
        computed: list[ReplicatedTokens | ChunkTokens] = [*replicated, *chunks]
        parts = [
            (
                entry,
                entry.tokens.to(self._device)[tokens.positions - tokens.chunk.begin],
                tokens.positions + sequences[tokens.sequence].position_mark,
            )
            for entry, tokens in zip(prompts, computed, strict=True)
        ]
        short = (decode, tuple(replicated), tuple(sources))
        lengths = [length for _, length in runs]
        if self._tensor_parallel and (decoded or whole):
            at = len(whole)
            passes = [self._pass(lengths, parts[:at], *short, (), tensor_parallel=True)]
            if chunks:
                passes.append(self._pass([], parts[at:], None, (), (), tuple(chunks)))
        else:
            passes = [self._pass(lengths, parts, *short, tuple(chunks))]
        growth = []
        for entry in prompts:
            begin = sequences[entry.sequence].length
            end = begin + len(entry.tokens)
            sizes = shard_sizes(begin, end if entry.sharded else begin, end, self._comm.size)
            growth.append((entry.sequence, sizes))
        return Step(tuple(passes), runs, growth)

    def _pass(
        self,
        runs: list[int],
        parts: Seq[tuple[BatchEntry, Tensor, Tensor]],
        decode: DecodeBatch | None,
        replicated: tuple[ReplicatedTokens, ...],
        sources: tuple[SourceToken, ...],
        chunks: tuple[ChunkTokens, ...],
        *,
        tensor_parallel: bool = False,
    ) -> Pass:
        """Put parts of a pass together: entries with this rank's tokens and their positions.

        Before them come runs of these lengths.
        """
        # Rank 0 samples, and holds the last token of every chunk; all compute parts of its logits.
        samples = tensor_parallel or self._comm.rank == 0
        end = sum(runs)
        rows, logits = [n * samples for n in runs], list(range(end * samples))
        ids, positions = [], []
        for entry, tokens, at in parts:
            n = len(tokens)
            begin = n - samples * entry.samples
            if entry.prompt_logprobs >= 0:
                begin = 0
            rows.append(n - begin)
            logits += range(end + begin, end + n)
            ids.append(tokens)
            positions.append(at)
            end += n
        # A model may not take an empty sequence: a rank without tokens runs one dummy token.
        dummy = torch.zeros(int(not end), dtype=torch.int64, device=self._device)
        keep = None
        if not len(logits) == end > 0:
            keep = torch.tensor(logits, dtype=torch.int64, device=self._device)
        return Pass(
            torch.cat([*ids, dummy]),
            torch.cat([*positions, dummy]),
            keep,
            rows,
            decode,
            replicated,
            chunks,
            sources,
            tensor_parallel,
        )

    def _decode(self, runs: Seq[tuple[Sequence, list[int]]]) -> DecodeBatch:
        """Next tokens of some sequences, none of which is in the midst of its prompt."""
        caches, rank, size = self._caches, self._comm.rank, self._comm.size
        pool, columns, longest = caches.pages, [], 0
        windows = [0] * len(caches.streaming)
        for sequence, tokens in runs:
            assert sequence.prefill is None
            table, slots, begin = sequence.table, sequence.streaming, sequence.length
            starts = [cache.policy.start(begin) for cache in caches.streaming]
            fixed = (*starts, *(s.offset for s in slots), *(s.capacity for s in slots))
            shards = list(sequence.shard_tokens)
            for position, token in enumerate(tokens, begin):
                owner = owner_of(position, size)
                mine = owner == rank
                at = pool.slot(table, shards[rank]) if mine else pool.dummy_slot
                shards[owner] += 1
                marked = position + sequence.position_mark
                columns.append((token, position, marked, at, shards[rank], *fixed))
            end = begin + len(tokens)
            assert starts == [cache.policy.start(end - 1) for cache in caches.streaming]
            longest = max(longest, *shards)
            held = (min(slot.capacity, end) for slot in slots)
            windows = [max(pair) for pair in zip(windows, held, strict=True)]
        return DecodeBatch(
            torch.tensor(columns, dtype=torch.int64).T.contiguous(),
            tuple(sequence.table.pages for sequence, tokens in runs for _ in tokens),
            longest,
            tuple(windows),
            pool.page_size,
            pool.dummy_slot,
            tuple(cache.arena.ring for cache in caches.streaming),
            self._readers(runs),
        )

    def _readers(self, runs: Seq[tuple[Sequence, list[int]]]) -> tuple[BlockReader, ...]:
        """Return a reader of chosen blocks for each sequence of a decode batch, or none at all."""
        if not any(self._caches.chooses(of.length + len(tokens)) for of, tokens in runs):
            return ()
        readers, begin = [], 0
        for sequence, tokens in runs:
            at = slice(begin, begin + len(tokens))
            begin = at.stop
            span = Interval(sequence.length, sequence.length + len(tokens))
            shard = sequence.shard(self._comm.rank, self._device)
            readers.append(self._reader(sequence, at, span, shard))
        return tuple(readers)

    def _reader(self, sequence: Sequence, at: slice, span: Interval, shard: Shard) -> BlockReader:
        """Tokens at ``span``, in places ``at``, that all ranks compute; ``shard`` may go on."""
        keys = sequence.table.tokens + len(owned_tokens(span, self._comm.rank, self._comm.size))
        spans = self._caches.pages.spans(sequence.table, 0, keys)
        positions = torch.arange(span.begin, span.end, device=self._device)
        return BlockReader(at, positions, positions, spans, shard.before(span.end, keys))

    def _sources(
        self, entries: Seq[BatchEntry], sequences: Mapping[int, Sequence]
    ) -> list[SourceToken]:
        """Return the tokens of a decode batch whose requests ask where the strongest heads look."""
        found, index, rank = [], 0, self._comm.rank
        for entry in entries:
            sequence = sequences[entry.sequence]
            stored = sequence.table.tokens
            for position in range(sequence.length, sequence.length + len(entry.tokens)):
                stored += owner_of(position, self._comm.size) == rank
                if entry.sources:
                    spans = self._caches.pages.spans(sequence.table, 0, stored)
                    places = sequence.shard(rank, self._device).places
                    of = entry.sequence, index, position, spans, places
                    found.append(SourceToken(*of))
                index += 1
        return found

    def _replicated(self, entry: BatchEntry, sequence: Sequence, offset: int) -> ReplicatedTokens:
        assert sequence.prefill is None, "its chunks are not done"
        caches, rank, size = self._caches, self._comm.rank, self._comm.size
        begin = sequence.length
        end = begin + len(entry.tokens)
        chunk, stored = Chunk(begin, end, 1), sequence.table.tokens
        owned = owned_tokens(chunk.span, rank, size)
        exact = caches.scratch is not None and begin == 0
        at, reader = slice(offset, offset + end - begin), None
        if caches.choice is not None:
            shard = Shard.of(shard_positions(sequence.chunks, end, rank, size), end, self._device)
            reader = self._reader(sequence, at, chunk.span, shard)
        return ReplicatedTokens(
            entry.sequence,
            at,
            chunk,
            torch.arange(begin, end, device=self._device),
            owned,
            caches.pages.extents(sequence.table, stored, stored + len(owned)),
            caches.pages.spans(sequence.table, 0, stored),
            _WindowParts([], chunk, 0, True, exact).each(caches, sequence),
            reader,
        )

    def _chunk(self, entry: BatchEntry, sequence: Sequence) -> ChunkTokens:
        prefill, caches, rank = sequence.prefill, self._caches, self._comm.rank
        assert prefill is not None
        begin, size = sequence.length, self._comm.size
        chunk = Chunk(begin, begin + len(entry.tokens), size)
        pages = self._shard(
            caches.pages, sequence.table, chunk, sequence.shard_tokens, sequence.chunks
        )
        scratch, stored = None, []
        if prefill.scratch is not None:
            assert caches.scratch is not None
            lengths = [sum(done.tokens(r) for done in prefill.done) for r in range(size)]
            scratch = self._shard(caches.scratch, prefill.scratch, chunk, lengths, prefill.done)
            if entry.last:
                stored = _stored(caches.scratch, prefill.scratch, prefill.done, rank)
        windows = _WindowParts(prefill.done, chunk, rank, entry.last, scratch is not None)
        positions = positions_of(chunk.ranges(rank), self._device)
        reader = None
        if caches.chooses(chunk.end):
            runs = [
                shard_positions([*sequence.chunks, chunk], chunk.end, r, size) for r in range(size)
            ]
            shards = tuple(Shard.of(of, chunk.end, self._device) for of in runs)
            spans = caches.pages.spans(sequence.table, 0, len(shards[rank].places))
            every = [of for r in range(size) for of in chunk.ranges(r)]
            queries = positions_of(every, self._device)
            reader = BlockReader(slice(None), positions, queries, spans, shards[rank], shards)
        return ChunkTokens(
            entry.sequence,
            chunk,
            entry.last,
            positions,
            pages,
            scratch,
            stored,
            windows.each(caches, sequence),
            reader,
        )

    def _shard(
        self,
        pool: PagePool,
        table: PageTable,
        chunk: Chunk,
        lengths: list[int],
        before: Seq[Chunk],
    ) -> ShardPart:
        old, size = table.tokens, self._comm.size
        positions: list[Tensor] = []
        if self._caches.by_distance(chunk.end):
            positions = [
                positions_of(shard_positions(before, chunk.begin, rank, size), self._device)
                for rank in range(size)
            ]
        new = pool.extents(table, old, old + chunk.tokens(self._comm.rank))
        return ShardPart(new, pool.spans(table, 0, old), lengths, positions)


def _stored(
    pool: PagePool, table: PageTable, done: Seq[Chunk], rank: int
) -> list[tuple[Interval, slice]]:
    """Positions and slots of what a rank's pool has of the chunks ``done``."""
    found, first = [], 0
    for chunk in done:
        for shard in chunk.owned(rank):
            at = shard.begin
            for a, b in pool.extents(table, first, first + len(shard)):
                found.append((Interval(at, at + b - a), slice(a, b)))
                at += b - a
            first += len(shard)
    return found


@dataclass(frozen=True)
class _WindowParts:
    """Plans the streaming heads of one chunk, window by window.

    ``done`` are the chunks of the prompt before; ``last`` says that the prompt ends with this one.
    """

    done: Seq[Chunk]
    chunk: Chunk
    rank: int
    last: bool
    exact: bool

    def each(self, caches: Caches, sequence: Sequence) -> tuple[WindowPart, ...]:
        pairs = zip(caches.streaming, sequence.streaming, strict=True)
        return tuple(self._of(cache, slot) for cache, slot in pairs)

    def _of(self, cache: StreamingCache, slot: StreamingSlot) -> WindowPart:
        sinks = cache.policy.sinks
        base = max(sinks, slot.start)
        window = cache.chunked.get(slot.index) or ChunkedWindow()
        shared = window.fixed is not None
        plan = self._plan(cache.policy, base, Storage(slot.tail_capacity, shared), window.held)
        # A prompt that continues a finished one finds the window replicated in the streaming cache.
        prompt_begin = self.done[0].begin if self.done else self.chunk.begin
        end = 0 if self.exact or shared else prompt_begin
        # Of the slot: what is seen, what goes to the ring, and what leaves the ring for the tail.
        first, new, tail, kept = base, Interval(0, 0), Interval(0, 0), Interval(0, 0)
        if plan is not None and plan.window is None:
            kept = Interval(plan.keep - slot.tail_capacity, self.chunk.end)
        elif plan is not None and plan.window is not None:
            begin = max(sinks, slot.ring_begin, plan.window.begin)
            tail = Interval(begin, max(begin, plan.keep))
            first = min(base, begin)
            begin = max(plan.keep, first, end)  # the ring has what was replicated already
            new = Interval(begin, max(begin, plan.window.end))
        replicated = Interval(first, max(first, end))
        return WindowPart(
            slot.at,
            plan,
            replicated,
            cache.places(slot, replicated.begin, replicated.end),
            new,
            cache.places(slot, new.begin, new.end),
            tail,
            cache.tail_places(slot, tail.begin, tail.end),
            kept,
        )

    def _plan(
        self, policy: StreamingPolicy, base: int, stored: Storage, shared: Seq[tuple[Interval, int]]
    ) -> WindowPlan | None:
        if self.exact:
            if not self.last:
                return None
            whole = [*self.done, self.chunk]
            return plan_compression(policy, whole, self.rank, stored)
        seen = Interval(base - stored.tail, self.chunk.begin)
        held = holdings(self.done, seen)
        held += [(at & seen, holder) for at, holder in shared if len(at & seen)]
        at_end = stored if self.last else None
        return plan_window(policy, self.chunk, self.rank, base=base, held=held, stored=at_end)
