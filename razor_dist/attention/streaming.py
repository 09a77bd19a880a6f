"""Attention of streaming heads in a prefill chunk: `razor_dist.heads.policy` by segments.

A query attends to its window, to the sinks and to the compensation token, each by a call of its
own; the partial results are merged. The queries of a *run* share where their window starts::

    sinks  dropped: one compensation token     window                        run
    |####|xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx|=============================|qqqqqqqq|
    0    N0                                   s                           begin     end

so a run takes four calls: sinks; compensation token; ``[s, begin)``, of which all its queries see
everything; and ``[begin, end)``, itself, under the causal mask.

There is a run for every ``block`` tokens: thousands in a long chunk, too many calls. Where the
window's length does not change, each run is the one before it moved by its own length B::

    run 0    |=============|qqqq|
    run 1         |=============|qqqq|
    run 2              |=============|qqqq|

Then the ops are given many runs as a batch, whose keys are overlapping views of the same memory
(`SpanKeys.moved`), and the compensation sums of each run follow from those of the run before it by
the B tokens that it drops.

Letters: K key-value heads, G query heads per key-value head, T queries, D head dimension, N0 sinks,
n runs of B queries each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.attention.window_plan import QuerySpan
from razor_dist.heads.policy import StreamingPolicy, WindowRun
from razor_dist.kernels import Partial, merge
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

    def see_dropped(self, at: range, mean: tuple[Tensor, Tensor], dropped: Interval) -> Partial:
        """Attention of the queries ``at`` to the compensation token of what was dropped."""
        away = None
        if self.query.by_distance:
            # It stands where the tokens do that it stands for, on average.
            middle = (dropped.begin + dropped.end - 1) / 2
            away = middle - torch.arange(at.start, at.stop, device=mean[0].device)
        return self.part(at).compensate(*mean, len(dropped), away)

    def see_moved(self, runs: Sequence[WindowRun], keys: SpanKeys) -> list[Partial]:
        """Attention of runs that are alike, each to its window up to itself, and to itself."""
        first, times = runs[0], len(runs)
        q_KnGBD, step = self._by_run(runs), first.end - first.begin
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
            out, lse = (torch.stack(x) for x in zip(*heads, strict=True))
            partials.append(_in_order(out, lse))
        return partials

    def see_dropped_moved(
        self, runs: Sequence[WindowRun], keys: SpanKeys, sums: Tensor, sinks: int
    ) -> Partial:
        """`see_dropped` for runs that are alike, with float32 ``[2, K, n, D]`` sums."""
        heads, times, _ = sums.shape[1:]
        step, dropped = runs[0].end - runs[0].begin, runs[0].start - sinks
        counts = torch.arange(dropped, dropped + times * step, step, device=sums.device)
        k_mean, v_mean = (x.flatten(0, 1) for x in keys.mean(sums, counts[:, None]))
        query = self.query._replace(q=self._by_run(runs).flatten(0, 1))
        found = query.compensate(k_mean, v_mean, counts.repeat(heads))
        return _in_order(*(x.unflatten(0, (heads, times)) for x in found))

    def _by_run(self, runs: Sequence[WindowRun]) -> Tensor:
        """The queries of runs that are alike, ``[K, n, G, B, D]``."""
        return self.part(_range(runs)).q.unflatten(2, (len(runs), -1)).transpose(1, 2)


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
    sums, summed_to = keys.sums, keys.first  # over [N0, summed_to)
    # The bias by distance is relative to the run at hand.
    most = 1 if queries.query.by_distance else max(1, _TOGETHER // policy.block)
    for runs in _alike(span.runs, sinks, most):
        start = max(runs[0].start, sinks)
        if policy.compensation and start > summed_to:
            dropped = keys.windowed(summed_to, start)
            sums = sums + torch.stack([x.float().sum(1) for x in dropped])
            summed_to = start
        at = _range(runs)
        if len(runs) == 1:
            partials = [
                queries.see(at, keys.windowed(start, at.start), start),
                queries.see(at, keys.windowed(at.start, at.stop), at.start, causal=True),
            ]
            if policy.compensation and start > sinks:
                mean = keys.mean(sums, start - sinks)
                partials.append(queries.see_dropped(at, mean, Interval(sinks, start)))
        else:
            partials = queries.see_moved(runs, keys)
            if policy.compensation:
                # Each run drops a block more than the one before it.
                summed_to = runs[-1].start
                steps = [
                    x.unflatten(1, (len(runs) - 1, -1)).float().sum(2)
                    for x in keys.windowed(start, summed_to)
                ]
                each = torch.cat([sums.unsqueeze(2), torch.stack(steps)], 2).cumsum(2)
                partials.append(queries.see_dropped_moved(runs, keys, each, sinks))
                sums = each[:, :, -1]
        partials.append(queries.see(at, keys.sinks(0, sinks), 0))
        outs.append(merge(partials).out)
    return torch.cat(outs, dim=2)


def _alike(runs: Sequence[WindowRun], sinks: int, most: int) -> Iterator[list[WindowRun]]:
    """Group the runs, in order, whose windows begin after the sinks and move with them."""
    group: list[WindowRun] = []
    for run in runs:
        if group:
            last = group[-1]
            length = last.end - last.begin
            moved = length == run.end - run.begin == run.start - last.start and last.start > sinks
            if not moved or len(group) == most:
                yield group
                group = []
        group.append(run)
    if group:
        yield group


def _in_order(out_KnGBD: Tensor, lse_KnGB: Tensor) -> Partial:
    out, lse = (x.transpose(1, 2).flatten(2, 3) for x in (out_KnGBD, lse_KnGB))
    return Partial(out, lse)


def _range(runs: Sequence[WindowRun]) -> range:
    return range(runs[0].begin, runs[-1].end)
