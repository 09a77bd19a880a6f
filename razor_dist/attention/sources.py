"""Sources of answers: the positions that the strongest retrieval heads attend to.

While an answer's token is computed, the chosen heads' queries score the rank's own keys a second
time. Each rank keeps the few largest scores and the log-sum-exp of all. From those of all ranks, a
position's softmax weight over the whole sequence is ``exp(score - logsumexp)``, for any number of
ranks. Steps without a request for sources skip this.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.attention.step import SourceToken
from razor_dist.cache.caches import Caches
from razor_dist.cache.pages import Span
from razor_dist.heads.layout import HeadLayout
from razor_dist.kernels.dual_chunk import INTER
from razor_dist.kernels.quantized import Codes, KeysOrValues
from razor_dist.kernels.query import Query
from razor_dist.models.bridge import AttentionContext
from razor_dist.parallel.comm import Communicator

# Positions reported for each head and token.
TOP = 8
# The least weight that is reported, a mean over the heads.
LEAST = 0.002
# Keys that are converted to float32 at a time.
_WIDENED = 1 << 16

QueryHeads = Seq[tuple[int, int]]  # layer and query head


class Sources(NamedTuple):
    """One token's largest attention weights, by head: ``[heads, TOP]``, largest first.

    If a head has fewer positions, the rest are -1, with a weight of 0.
    """

    positions: Tensor  # int64
    weights: Tensor  # float32

    def merged(self) -> list[tuple[int, float]]:
        """Positions with their mean weight over the heads, largest first; none below `LEAST`."""
        found: dict[int, float] = {}
        count = len(self.positions)
        pairs = zip(self.positions.flatten().tolist(), self.weights.flatten().tolist(), strict=True)
        for position, weight in pairs:
            if weight > 0:
                found[position] = found.get(position, 0.0) + weight / count
        kept = (pair for pair in found.items() if pair[1] >= LEAST)
        return sorted(kept, key=lambda pair: (-pair[1], pair[0]))


class _Head(NamedTuple):
    row: int  # of its keys in the page pool
    kv: int  # index of its KV head among those that the model hands to attention
    group: int  # index among that KV head's query heads
    place: int  # index among all source heads


class SourceHeads:
    """The query heads whose weights are taken, each of a retrieval head's group."""

    def __init__(self, layout: HeadLayout, heads: QueryHeads, group: int) -> None:
        self.count = len(heads)
        self.by_layer: dict[int, list[_Head]] = {}
        for place, (layer, head) in enumerate(heads):
            of = layout.short[layer]
            number = of.retrieval.index(head // group)
            row = of.retrieval_rows.start + number
            found = _Head(row, int(of.order[number]), head % group, place)
            self.by_layer.setdefault(layer, []).append(found)


class SourceTracer:
    """Takes the scores of one pass, for the tokens whose requests want sources."""

    def __init__(
        self,
        comm: Communicator,
        caches: Caches,
        heads: SourceHeads,
        tokens: Seq[SourceToken],
    ) -> None:
        self._comm, self._caches, self._heads, self._tokens = comm, caches, heads, tokens
        self._pages = caches.pages
        shape, device = (len(tokens), heads.count), caches.pages.k.device
        # Scores, indices in the rank's shard, and the lse, for each token and head.
        self._scores = torch.full((*shape, TOP), -torch.inf, device=device)
        self._indices = torch.zeros((*shape, TOP), dtype=torch.int64, device=device)
        self._lse = torch.full(shape, -torch.inf, device=device)

    def look(self, layer: int, query: Query) -> None:
        """Score the keys of one layer, including the new tokens'.

        ``query`` has all tokens of the pass and all retrieval heads.
        """
        for head in self._heads.by_layer.get(layer, ()):
            for index, token in enumerate(self._tokens):
                q = query.scale * query.q[head.kv, head.group, token.index].float()
                parts = []
                for span in token.spans:
                    keys, _ = self._pages.at(slice(head.row, head.row + 1), span)
                    scores = self._score(q, keys, token.position, span)
                    if query.slopes is not None:
                        assert self._pages.positions is not None
                        distance = (self._pages.positions[span] - token.position).float()
                        scores += query.slopes[head.kv, head.group] * distance
                    parts.append(scores)
                if not parts:
                    continue
                scores = torch.cat(parts)
                top = scores.topk(min(TOP, len(scores)))
                at = index, head.place
                self._scores[at][: len(top.values)] = top.values
                self._indices[at][: len(top.values)] = top.indices
                self._lse[at] = scores.logsumexp(0)

    def _score(self, q: Tensor, keys: KeysOrValues, position: int, span: Span) -> Tensor:
        """Scores of the keys in the slots ``span`` by a query at ``position`` (`scores_of`)."""
        dual = self._caches.dual
        if dual is None or position < dual.length:
            return scores_of(q, keys)
        assert self._pages.positions is not None
        at, chunk = range(position, position + 1), position // dual.length
        row = q.view(1, 1, 1, -1)
        turned = [dual.turned(row, at, chunk - away).flatten() for away in range(INTER + 1)]
        every = torch.stack([scores_of(of_one, keys) for of_one in turned])
        away = chunk - self._pages.positions[span] // dual.length
        return every.gather(0, away.clamp(max=INTER).unsqueeze(0)).squeeze(0)

    def gather(self) -> list[Sources]:
        """Return, on rank 0, each token's sources; all ranks must call it, after the pass."""
        positions = [
            token.places[at] if len(token.places) else torch.zeros_like(at)
            for token, at in zip(self._tokens, self._indices, strict=True)
        ]
        # Indices and float32 numbers are exact in float64.
        parts = [x.double() for x in (self._scores, torch.stack(positions), self._lse[..., None])]
        every = self._comm.all_gather(torch.cat(parts, dim=-1), "sources").cpu()
        if self._comm.rank:
            return []
        scores, at, lse = every[..., :TOP], every[..., TOP : 2 * TOP], every[..., -1]
        weights = (scores - lse.logsumexp(0)[..., None]).exp()  # [P, tokens, heads, TOP]
        top = weights.movedim(0, -2).flatten(-2).topk(TOP)
        found = at.movedim(0, -2).flatten(-2).gather(-1, top.indices).long()
        found[top.values == 0] = -1
        return [Sources(*pair) for pair in zip(found, top.values.float(), strict=True)]


class TracedContext:
    """An `AttentionContext` that also gives its queries to a tracer."""

    def __init__(self, context: AttentionContext, tracer: SourceTracer) -> None:
        self._context, self._tracer = context, tracer

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        out = self._context.attend(layer, query, k, v)
        # By now the new tokens' keys are stored.
        self._tracer.look(layer, query)
        return out


def scores_of(q: Tensor, keys: KeysOrValues) -> Tensor:
    """Scores of one head's ``keys`` ``[1, n, D]`` by a scaled query ``[D]``, float32 ``[n]``."""

    def score(part: KeysOrValues) -> Tensor:
        if isinstance(part, Codes):
            return (part.levels()[0] @ part.transform(q)) * part.scale[0]
        return part[0].float() @ q

    begins = range(0, max(1, keys.shape[1]), _WIDENED)
    return torch.cat([score(keys[:, at : at + _WIDENED]) for at in begins])
