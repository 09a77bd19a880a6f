"""Attention of streaming heads in a prefill chunk: `razor_dist.cache.policy` by segments.

A query attends to its window, to the sinks and to the compensation token, each by a call of its
own; the partial results are merged. The queries of a *run* share where their window starts::

    sinks  dropped: one compensation token     window                        run
    |####|xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx|=============================|qqqqqqqq|
    0    N0                                   s                           begin     end

There is a run for every ``block`` tokens: thousands in a long chunk. Sinks and compensation tokens
are those of many runs at once; so are windows where there is a kernel for them
(`razor_dist.kernels.attend_windows`). Where there is none, a run takes two calls: ``[s, begin)``,
of which all its queries see everything; and ``[begin, end)``, itself, under the causal mask. Where
the window's length does not change, each run is the one before it moved by its own length B::

    run 0    |=============|qqqq|
    run 1         |=============|qqqq|
    run 2              |=============|qqqq|

Then the ops are given many runs as a batch, whose keys are overlapping views of the same memory
(`SpanKeys.moved`).

Letters: K key-value heads, G query heads per key-value head, T queries, D head dimension, N0 sinks,
n runs of B queries each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.attention.window_plan import QuerySpan
from razor_dist.cache.policy import StreamingPolicy, WindowRun
from razor_dist.kernels import Partial, joined, merge
from razor_dist.kernels.alibi import Places
from razor_dist.kernels.query import Query
from razor_dist.parallel.zigzag import Interval

# Most queries in a batch of runs: unmerged results take memory, and more would save no time.
_TOGETHER = 4096


@dataclass(frozen=True)
class SpanKeys:
    """Keys and values that the queries of a span may see."""

    k: Tensor  # [K, end - first, D]: positions from ``first`` to the span's end
    v: Tensor
    first: int  # max(N0, s(i)) of the span's first query i: where its window begins
    sink_k: Tensor  # [K, N0, D]; sinks at positions not yet reached may hold anything
    sink_v: Tensor
    sums: Tensor  # float32 [2, K, D]: sums of keys and values over [N0, first)

    def windowed(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        at = slice(begin - self.first, end - self.first)
        return self.k[:, at], self.v[:, at]

    def moved(self, begin: int, end: int, step: int, times: int) -> tuple[Tensor, Tensor]:
        """Keys and values at ``[begin + j step, end + j step)`` for j < times: ``[K, n, S, D]``."""
        k, v = (
            x.unfold(1, end - begin, step).transpose(2, 3)
            for x in self.windowed(begin, end + (times - 1) * step)
        )
        return k, v

    def sinks(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        return self.sink_k[:, begin:end], self.sink_v[:, begin:end]

    def mean(self, sums: Tensor, count: int | Tensor) -> tuple[Tensor, Tensor]:
        """The compensation token of ``count`` dropped tokens, float32."""
        # Rounded as the cache keeps it, so that prefill and decode see the same.
        k, v = (sums / count).to(self.k.dtype).float()
        return k, v


@dataclass(frozen=True)
class SpanQueries:
    """Queries at consecutive positions from ``begin`` on."""

    query: Query
    begin: int

    def part(self, positions: range) -> Query:
        return self.query.tokens(slice(positions.start - self.begin, positions.stop - self.begin))

    def see(
        self, at: range, keys: tuple[Tensor, Tensor], first: int, *, causal: bool = False
    ) -> Partial:
        """Attention of the queries ``at`` to keys and values at positions from ``first`` on."""
        k, v = keys
        where = None
        if self.query.by_distance:
            where = Places([at], torch.arange(first, first + k.shape[1], device=k.device))
        return self.part(at).attend(k, v, causal=causal, where=where)

    def see_windows(self, runs: Sequence[WindowRun], keys: SpanKeys) -> Partial:
        """Attention of adjacent runs, each to its window."""
        if self.query.dual is not None:
            return self._see_windows_in_chunks(runs, keys, self.query.dual.length)
        at, start = _range(runs), max(runs[0].start, keys.first)
        k, v = keys.windowed(start, at.stop)
        if self.query.takes_windows(k):
            run_of, starts = _runs_and_drops(tuple(runs), start, k.device)
            return self.part(at).attend_windows(k, v, starts[run_of])
        # The bias by distance is relative to this run.
        most = 1 if self.query.by_distance else len(runs)
        found = [
            self._see_window(group[0], keys) if len(group) == 1 else self._see_moved(group, keys)
            for group in _alike(runs, keys.first, most)
        ]
        return joined(found)

    def _see_windows_in_chunks(
        self, runs: Sequence[WindowRun], keys: SpanKeys, length: int
    ) -> Partial:
        """The same with dual chunk attention: windows within one chunk are as without it."""

        def chunk_of(run: WindowRun) -> int | None:
            chunk = max(run.start, keys.first) // length
            return chunk if chunk == (run.end - 1) // length else None

        found = []
        for chunk, group in itertools.groupby(runs, chunk_of):
            own = list(group)
            if chunk is None:
                found += [self._see_window(run, keys) for run in own]
            else:
                at = _range(own)
                queries = SpanQueries(self.part(at).seen_by(chunk, at), at.start)
                found.append(queries.see_windows(own, keys))
        return joined(found)

    def _see_window(self, run: WindowRun, keys: SpanKeys) -> Partial:
        at, start = _range([run]), max(run.start, keys.first)
        before = self.see(at, keys.windowed(start, at.start), start)
        own = self.see(at, keys.windowed(at.start, at.stop), at.start, causal=True)
        return merge([before, own])

    def _see_moved(self, runs: Sequence[WindowRun], keys: SpanKeys) -> Partial:
        """Attention of runs that are alike, each to its window up to itself, and to itself."""
        first, times = runs[0], len(runs)
        step = first.end - first.begin
        q_KnGBD = self.part(_range(runs)).q.unflatten(2, (times, -1)).transpose(1, 2)
        partials = []
        for begin, end, causal in (
            (first.start, first.begin, False),
            (first.begin, first.end, True),
        ):
            # One head after the other: head and run cannot be one axis without a copy of the keys.
            heads = [
                self.query._replace(q=q).attend(k, v, causal=causal)
                for q, k, v in zip(q_KnGBD, *keys.moved(begin, end, step, times), strict=True)
            ]
            out, lse = (
                torch.stack(x).transpose(1, 2).flatten(2, 3) for x in zip(*heads, strict=True)
            )
            partials.append(Partial(out, lse))
        return merge(partials)

    def see_dropped(
        self, runs: Sequence[WindowRun], keys: SpanKeys, sums: Tensor, sinks: int
    ) -> Partial:
        """Attention of adjacent runs to the compensation tokens of what each has dropped.

        ``sums``, float32 ``[2, K, n, D]``, are those of the keys and values before each window.
        """
        at, device, away = _range(runs), sums.device, None
        run_of, counts = _runs_and_drops(tuple(runs), sinks, device)
        k_mean, v_mean = keys.mean(sums, counts.clamp(min=1).unsqueeze(-1))
        if self.query.slopes is not None:
            # It stands at the mean position of the dropped tokens.
            middle = sinks + (counts[run_of] - 1) / 2
            away = middle - torch.arange(at.start, at.stop, device=device)
        k_mean, v_mean = (x.index_select(1, run_of) for x in (k_mean, v_mean))
        # With dual chunk attention it stands in the first chunk, as the sinks do.
        query = self.part(at).seen_by(0, at)
        return query.compensate(k_mean, v_mean, counts[run_of], away)


def window_attention(
    queries: SpanQueries, span: QuerySpan, keys: SpanKeys, policy: StreamingPolicy
) -> Tensor:
    """Attention of streaming heads for all queries of ``span.at``: float32 ``[K, G, T, D]``."""
    sinks, outs = policy.sinks, []
    inside = span.at & Interval(0, sinks)
    if len(inside):  # queries among the sinks themselves: plain causal attention
        at = range(inside.begin, inside.end)
        before = queries.see(at, keys.sinks(0, at.start), 0)
        own = queries.see(at, keys.sinks(at.start, at.stop), at.start, causal=True)
        outs.append(merge([before, own]).out)
    sums, summed_to = keys.sums.unsqueeze(2), keys.first  # over [N0, summed_to)
    most = max(1, _TOGETHER // policy.block)
    for index in range(0, len(span.runs), most):
        runs = span.runs[index : index + most]
        partials = [queries.see_windows(runs, keys)]
        if policy.compensation and runs[-1].start > sinks:
            # Each run has dropped what is before its window.
            end = max(runs[-1].start, summed_to)
            dropped = torch.stack([x.float() for x in keys.windowed(summed_to, end)])
            _, counts = _runs_and_drops(tuple(runs), sinks, sums.device)
            ends = (counts + sinks - summed_to).clamp(min=0)
            each = torch.cat([sums, sums + dropped.cumsum(2)], 2).index_select(2, ends)
            partials.append(queries.see_dropped(runs, keys, each, sinks))
            sums, summed_to = each[:, :, -1:], end
        partials.append(queries.see(_range(runs), keys.sinks(0, sinks), 0))
        outs.append(merge(partials).out)
    return torch.cat(outs, dim=2)


def _alike(runs: Sequence[WindowRun], first: int, most: int) -> Iterator[list[WindowRun]]:
    """Group up to ``most`` neighbouring runs of equal length whose windows move on by it.

    Only runs whose windows start at ``first`` or later are grouped; any other run is alone.
    """
    group: list[WindowRun] = []
    for run in runs:
        if group:
            last = group[-1]
            length = last.end - last.begin
            moved = length == run.end - run.begin == run.start - last.start and last.start >= first
            if not moved or len(group) == most:
                yield group
                group = []
        group.append(run)
    if group:
        yield group


@functools.lru_cache(maxsize=64)
def _runs_and_drops(
    runs: tuple[WindowRun, ...], first: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The run of every query, and the tokens from ``first`` on that each run does not see: int64.

    They are the same in all layers, and copying them to a device takes it time.
    """
    lengths = torch.tensor([run.end - run.begin for run in runs])
    dropped = torch.tensor([max(0, run.start - first) for run in runs])
    run_of = torch.arange(len(runs)).repeat_interleave(lengths)
    return run_of.to(device), dropped.to(device)


def _range(runs: Sequence[WindowRun]) -> range:
    return range(runs[0].begin, runs[-1].end)
