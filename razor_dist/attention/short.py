"""Attention on one rank to what all ranks compute: a few tokens of each of several sequences.

All ranks compute all of a step's tokens. Most are the one token that an answer has grown by; a
`PromptPiece` is several tokens of a prompt: a short prompt as a whole, a question that continues a
prefix, or a part of a long prompt. Where there are kernels for all sequences at once,
`razor_dist.attention.decode` has the part that is one token a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.attention.short_inputs import ReadExtent, StepInputs
from razor_dist.attention.streaming_prefill import StreamingChunk
from razor_dist.cache.caches import Caches
from razor_dist.cache.pages import Segments
from razor_dist.cache.sequence import Sequence
from razor_dist.cache.streaming import StreamingCache
from razor_dist.heads.layout import ShortHeads, StreamingGroup
from razor_dist.kernels import Partial, merge, merge_stacked
from razor_dist.kernels.alibi import Distance, Places
from razor_dist.kernels.query import Keys, Query
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import positions_of
from razor_dist.parallel.sharding import owned_tokens, shard_sizes
from razor_dist.parallel.zigzag import Chunk


class PromptPiece:
    """Several consecutive tokens of one prompt that all ranks compute.

    Every rank has all of them, and all of the window before them. So the streaming heads do what
    they do for a chunk on one rank, without transfers. The retrieval heads see the piece's own
    tokens under the causal mask, and the rank's shard of those before it; only what the ranks find
    there has to be merged. Each rank keeps the keys and values of the tokens that it would own had
    they been decoded.

    With exact prefill, a piece at the beginning of its sequence is seen in full by all heads.
    """

    def __init__(
        self, comm: Communicator, caches: Caches, sequence: Sequence, tokens: Tensor, offset: int
    ) -> None:
        assert sequence.window is None and sequence.scratch is None, "a prompt is being prefilled"
        begin = sequence.length
        self.sequence, self.tokens = sequence, tokens
        self.at = slice(offset, offset + len(tokens))  # of the step's tokens
        self.chunk = Chunk(begin, begin + len(tokens), 1)
        exact = caches.scratch is not None and begin == 0
        self._rank, self._caches = comm.rank, caches
        table, self._owned = sequence.table, owned_tokens(self.chunk.span, comm.rank, comm.size)
        stored = table.tokens
        self.seen = caches.pages.spans(table, 0, stored)
        self._slots = caches.pages.extents(table, stored, stored + len(self._owned))
        alone = Communicator(None)
        self._streaming = [
            StreamingChunk(alone, cache, slot, sequence, {}, self.chunk, exact=exact, last=True)
            for cache, slot in zip(caches.streaming, sequence.streaming, strict=True)
        ]

    def places(self, keys: Tensor) -> Places:
        return Places(self.chunk.ranges(0), keys)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.chunk.begin, self.chunk.end, device=self.tokens.device)

    @property
    def model_positions(self) -> Tensor:
        return self.positions + self.sequence.position_mark

    def own(self, query: Query, k: Tensor, v: Tensor) -> Partial:
        where = self.places(self.positions) if query.by_distance else None
        return query.attend(k, v, causal=True, where=where)

    def keep(self, rows: slice, k: Tensor, v: Tensor) -> None:
        """Store the retrieval keys and values of the tokens that this rank owns."""
        step = slice(self._owned.start - self.chunk.begin, None, self._owned.step)
        self._caches.pages.write(rows, self._slots, k[:, step], v[:, step])

    def stream(
        self, layer: int, group: StreamingGroup, query: Query, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention of the streaming heads of one window: float32 ``[K, G, T, D]``."""
        chunk = self._streaming[group.index]
        found = chunk.finish(layer, group, query, chunk.start(layer, group, [], k, v))
        return self.own(query, k, v).out.float() if found is None else found

    def finish(self) -> None:
        """Account for the piece in its sequence; call once, after the forward pass."""
        sequence, pages = self.sequence, self._caches.pages
        if pages.positions is not None:
            pages.place(self._slots, positions_of([self._owned], pages.k.device))
        begin, end = self.chunk.begin, self.chunk.end
        sequence.grow(shard_sizes(begin, begin, end, len(sequence.shard_tokens)), self._rank)
        for heads in self._streaming:
            heads.close()


class ShortContext:
    """`AttentionContext` of what all ranks compute in one step.

    Streaming heads are computed from the rank's cache, without traffic: all of them on every rank,
    or in tensor mode those that the rank keeps. Retrieval heads attend to each rank's shard; one
    all-gather per layer carries ``out`` and ``lse``, packed together. A layer without retrieval
    heads makes no such collective, nor does a step that only begins prompts.

    The step's first tokens are one of a sequence each, with its extent in ``extents`` and its
    numbers in ``inputs``, which is on the caches' device; those of ``pieces`` follow.
    """

    def __init__(
        self,
        comm: Communicator,
        caches: Caches,
        extents: Seq[ReadExtent],
        inputs: StepInputs,
        pieces: Seq[PromptPiece] = (),
    ) -> None:
        self.comm, self.caches, self._extents = comm, caches, extents
        self._inputs, self._pieces = inputs, pieces
        self.tokens = len(extents) + sum(len(piece.tokens) for piece in pieces)
        # By streaming cache: where the new tokens are written.
        self._places = [
            cache.places_of([e.streaming[index][0] for e in extents], inputs.position)
            for index, cache in enumerate(caches.streaming)
        ]
        self._biases = self._by_slot(StreamingCache.visibility)
        self._distances: _Distances | None = None

    def _by_slot(self, of: Callable[..., Tensor]) -> list[list[Tensor]]:
        """Call a method of `StreamingCache` for what is read of it, by token and cache."""
        inputs = self._inputs
        return [
            [
                of(cache, slot, width, position, start)
                for cache, (slot, width), start in zip(
                    self.caches.streaming, extent.streaming, starts, strict=True
                )
            ]
            for extent, position, starts in zip(
                self._extents, inputs.position, inputs.start.T, strict=True
            )
        ]

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        heads = self.caches.layout.short[layer]
        if query.by_distance and self._distances is None:
            self._distances = self._measure(query.q.dtype)
        parts = []
        if heads.retrieval:
            of = heads.retrieval_index
            own = self.caches.pages.stored(k[of], v[of])
            found = self._retrieval(heads, query.heads(of), *own)
            parts.append(found if heads.taken is None else found.flatten(0, 1)[heads.taken])
        if heads.streaming:
            of = heads.streaming_index
            found = self._streaming(layer, heads, query.heads(of), k[of], v[of])
            parts.append(found if heads.taken is None else found.flatten(0, 1))
        if not parts:  # of this layer the rank has no head
            return query.q.new_empty(query.q.shape[2], 0, query.q.shape[3])
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if heads.inverse is not None:
            out = out[heads.inverse]
        if heads.taken is None:
            out = out.flatten(0, 1)
        return out.transpose(0, 1).to(query.q.dtype)

    def _measure(self, dtype: torch.dtype) -> _Distances:
        """Note where the new tokens stand; return how far from them is all that is read."""
        pages, inputs = self.caches.pages, self._inputs
        assert pages.positions is not None
        pages.positions.index_copy_(0, inputs.at, inputs.position)
        segments = [
            [(pages.positions[span] - position).float() for span in extent.segments]
            for extent, position in zip(self._extents, inputs.position, strict=True)
        ]

        def measured(found: list[list[Tensor]]) -> list[list[Distance]]:
            return [[Distance.of(number, dtype) for number in row] for row in found]

        return _Distances(measured(self._by_slot(StreamingCache.distance)), measured(segments))

    def _streaming(
        self, layer: int, heads: ShortHeads, query: Query, k: Tensor, v: Tensor
    ) -> Tensor:
        outs = []
        for group in heads.groups:
            part = group.part
            of = query.heads(part)
            k_of, v_of = self.caches.streaming[group.index].stored(k[part], v[part])
            found = [self._windows(group, of, k_of, v_of)] if self._extents else []
            for piece in self._pieces:
                at = piece.at
                found.append(piece.stream(layer, group, of.tokens(at), k_of[:, at], v_of[:, at]))
            outs.append(found[0] if len(found) == 1 else torch.cat(found, dim=2))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _windows(self, group: StreamingGroup, query: Query, k: Tensor, v: Tensor) -> Tensor:
        """One token's attention for each sequence, in one window: ``[K, G, n, D]`` float32."""
        cache, batch, count = self.caches.streaming[group.index], [], len(self._extents)
        cache.put(group.rows, self._places[group.index], k[:, :count], v[:, :count])
        for t, extent in enumerate(self._extents):
            seen = cache.view(group.rows, *extent.streaming[group.index])
            where = self._distances and self._distances.streaming[t][group.index]
            batch.append((slice(t, t + 1), [Keys(*seen, self._biases[t][group.index], where)]))
        return query.attend_each(batch).out.float()

    def _retrieval(self, heads: ShortHeads, query: Query, k: Tensor, v: Tensor) -> Tensor:
        pages, rows, first = self.caches.pages, heads.retrieval_rows, len(self._extents)
        batch: list[tuple[slice, Iterator[Keys]]] = []
        if first:
            pages.put(rows, self._inputs.at, k[:, :first], v[:, :first])
        for t, extent in enumerate(self._extents):
            batch.append((slice(t, t + 1), self._shard(t, pages.segments(rows, extent.segments))))
        own = []
        for piece in self._pieces:
            of, k_of, v_of = query.tokens(piece.at), k[:, piece.at], v[:, piece.at]
            own.append(piece.own(of, k_of, v_of))
            piece.keep(rows, k_of, v_of)
            if piece.chunk.begin:
                batch.append((piece.at, self._before(piece, rows, query.by_distance)))
        outs = []
        if batch:
            found = self._merged(query.attend_each(batch))
            outs.append(found.out[:, :, :first])
        for piece, partial in zip(self._pieces, own, strict=True):
            if piece.chunk.begin:
                at = slice(first, first + len(piece.tokens))
                first = at.stop
                before = Partial(found.out[:, :, at], found.lse[:, :, at])
                partial = merge([partial, before])
            outs.append(partial.out.float())
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _shard(self, t: int, segments: Segments) -> Iterator[Keys]:
        """Yield what this rank holds of the sequence of the step's token ``t``."""
        for index, (k, v) in enumerate(segments):
            where = self._distances and self._distances.segments[t][index]
            yield Keys(k, v, None, where)

    def _before(self, piece: PromptPiece, rows: slice, by_distance: bool) -> Iterator[Keys]:
        """Yield what this rank holds of the tokens before a piece."""
        pages = self.caches.pages
        for span, (k, v) in zip(piece.seen, pages.segments(rows, piece.seen), strict=True):
            where = None
            if by_distance:
                assert pages.positions is not None
                where = piece.places(pages.positions[span])
            yield Keys(k, v, None, where)

    def _merged(self, found: Partial) -> Partial:
        if self.comm.size == 1:
            return found
        packed = torch.cat([found.out.float(), found.lse.unsqueeze(-1)], dim=-1)
        gathered = self.comm.all_gather(packed, "merge")
        return merge_stacked(gathered[..., :-1], gathered[..., -1])


class _Distances(NamedTuple):
    """``j - i`` of what a step reads, for each of its tokens."""

    streaming: list[list[Distance]]  # by streaming cache: the places of its slot
    segments: list[list[Distance]]  # the spans of the page pool
