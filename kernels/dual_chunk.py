"""Dual chunk attention: positions that never exceed those that a model was trained with.

A text is cut into chunks of c = ``chunk_size - local_size`` tokens, and a key at position j is
rotated by ``j mod c``. The rotation of a query at position i, with r = ``i mod c``, depends on the
key's chunk (arXiv 2402.17463; vLLM's names)::

    intra  the query's own chunk     r
    succ   the chunk before that     min(r + c, chunk_size)
    inter  any earlier chunk         min(2 c - 1, chunk_size)

So distances within a chunk are unchanged, as are those from a chunk's first tokens to the
``local_size`` tokens before it; no other exceeds ``chunk_size``. Keys do not depend on the query,
and their cache depends on the text alone. The query comes rotated by r and is rotated further here,
by the difference.

Beyond the ``original`` length L scores are multiplied by ``(0.1 ln((i + 1) / L) + 1)²``, YaRN's
temperature for a context of i + 1 tokens (arXiv 2501.15383). It belongs to the query
alone, so that it is the same in prefill, in decode and behind a cached prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.kernels import attend
from razor_dist.kernels.alibi import Places, blocks
from razor_dist.kernels.fused import turn
from razor_dist.kernels.partial import Partial, empty_partial, joined, merge
from razor_dist.kernels.quantized import KeysOrValues

# Distance in chunks from which on all chunks are treated alike.
INTER = 2


class DualChunk(NamedTuple):
    """A model's dual chunk attention."""

    length: int  # c, tokens of a chunk
    size: int  # chunk_size, the largest position of a query
    original: int  # L; 0: scores keep their scale
    frequencies: Tensor  # float32 [R / 2], radians a token, of pairs of dimensions i and i + R / 2

    def turned(self, q: Tensor, at: range, chunk: int) -> Tensor:
        """Rotate queries ``[K, G, T, D]`` at positions ``at`` for keys of the ``chunk``-th chunk.

        ``q`` comes rotated by ``at mod c``.
        """
        if at.stop <= self.length:
            return q
        position = torch.arange(at.start, at.stop, device=q.device)
        rest, away = position % self.length, position // self.length - chunk
        succ = (rest + self.length).clamp(max=self.size)
        inter = torch.full_like(rest, min(2 * self.length - 1, self.size))
        further = torch.where(away < INTER, succ, inter) - rest
        further = further.masked_fill(away == 0, 0)
        angles = further.unsqueeze(-1) * self.frequencies
        scale = torch.ones_like(angles[:, :1])
        if self.original:
            ratio = ((position + 1) / self.original).clamp(min=1)
            scale = (0.1 * ratio.log() + 1).square().unsqueeze(-1)
        heads, group, tokens, dim = q.shape
        flat = q.reshape(1, heads * group, tokens, dim)
        found = turn(flat, angles.cos()[None], angles.sin()[None], interleaved=False)
        scaled = (found.float() * scale).to(q.dtype)
        return scaled.view(heads, group, tokens, dim)


def attend_in_chunks(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    dual: DualChunk,
    places: Places,
    *,
    scale: float,
    causal: bool,
) -> Partial:
    """Attention over one segment; the parameters are those of `razor_dist.kernels.attend`.

    With ``causal``, keys and queries are of the same tokens, in ascending order; without, all keys
    precede all queries. The result is float32.
    """
    if not q.shape[2] or not k.shape[1]:
        return empty_partial(q)
    runs = list(_key_runs(places.keys, dual.length))
    partials = []
    for begin, at in blocks(places.queries, dual.length):
        end, chunk = begin + len(at), at.start // dual.length
        seen = begin if causal else k.shape[1]
        parts = [(slice(run.start, min(run.stop, seen)), m, False) for run, m in runs]
        if causal:
            parts.append((slice(begin, end), chunk, True))
        found: list[Partial] = []
        turned: dict[int, Tensor] = {}
        for span, of, own in parts:
            if span.start >= span.stop:
                continue
            away = min(chunk - of, INTER)
            if away not in turned:
                turned[away] = dual.turned(q[:, :, begin:end], at, chunk - away)
            found.append(attend(turned[away], k[:, span], v[:, span], scale=scale, causal=own))
        partials.append(merge(found) if found else empty_partial(q[:, :, begin:end]))
    return joined(partials)


def _key_runs(keys: Tensor, length: int) -> Iterator[tuple[slice, int]]:
    """Yield runs of adjacent keys of one chunk, each with the chunk's number."""
    chunks = keys // length
    edges = (chunks.diff().nonzero().flatten() + 1).tolist()
    bounds = [0, *edges, len(keys)]
    numbers = chunks[torch.tensor(bounds[:-1], device=keys.device)].tolist()
    for (a, b), number in zip(itertools.pairwise(bounds), numbers, strict=True):
        yield slice(a, b), number
