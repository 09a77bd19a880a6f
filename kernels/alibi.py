"""Attention biased by distance (ALiBi): query i scores key j by ``slope * (j - i)`` more.

Softmax ignores a constant per query, so the bias may be ``slope * (j - r)`` for any reference
position r, if ``slope * (r - i)`` is added to the lse afterwards. r decides the precision. With
r = 0, ``slope * j`` is rounded to within 0.03 at a million tokens and a slope of 1, for near keys
as for far ones. With r near the queries, only the biases of far keys are large and rounded, and
their weights vanish. So queries are taken in blocks, with r the first position of a block: scores
of near keys are off by at most ``slope * BLOCK * 2**-24`` (3e-5), however long the context.

The bias reaches the fused ops in one of two forms:

- in float32, and on CPU, as a float32 mask with one row per head;
- in bfloat16 on CUDA as further dimensions of the head (`widened`), for which keys and values are
  copied once: flash attention takes no mask there, and the other op only one in bfloat16, which is
  off by up to 1/512 of the bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.kernels import attend
from razor_dist.kernels.partial import Partial, joined, merge, over_keys
from razor_dist.kernels.quantized import KeysOrValues

# Queries that share a reference.
BLOCK = 512
# Place values of a distance's digits. The last is for fractions, such as the compensation token's.
_PLACES = (65536.0, 256.0, 1.0, 1 / 256)
# Keys that `widened` copies at a time.
WIDENED_KEYS = 16384
# Dimensions that `widened` adds: each digit for each of the two parts of the slope.
WIDER = 2 * len(_PLACES)


class Places(NamedTuple):
    """Positions, in their sequence, of the tokens of an attention call."""

    queries: Sequence[range]  # in order, as runs of consecutive positions
    keys: Tensor  # int64 [S], in any order


class Distance(NamedTuple):
    """``j - i`` of keys, in the forms that the ops take."""

    number: Tensor  # float32 [S], multiples of 1/256 below 2**24
    digits: Tensor | None  # `digits_of`, bfloat16 [S, WIDER]; None if a mask holds the bias

    @classmethod
    def of(cls, number: Tensor, queries: torch.dtype) -> Distance:
        return cls(number, digits_of(number) if needs_digits(number.device, queries) else None)


def needs_digits(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the bias reaches the ops by `widened`, for queries of this dtype."""
    return device.type == "cuda" and dtype == torch.bfloat16


def distance_bias(slopes: Tensor, distance: Tensor) -> Tensor:
    """The bias of keys at ``distance`` (float32 ``[S]``, ``j - i``), float32 ``[K, G, S]``."""
    return slopes.unsqueeze(-1) * distance


def attend_at_places(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    slopes: Tensor,
    places: Places,
    *,
    scale: float,
    causal: bool,
) -> Partial:
    """Attention over one segment with ALiBi's bias.

    The parameters are those of `razor_dist.kernels.attend`, and ``slopes`` is float32 ``[K, G]``,
    not negative; below 1 in every published model. The lse holds the bias ``slope * (j - i)``, so
    that the result merges with any other segment's.
    """
    partials = []
    for begin, positions in blocks(places.queries, BLOCK):
        end = begin + len(positions)
        seen = [(slice(0, k.shape[1]), False)]
        if causal:
            parts = ((slice(0, begin), False), (slice(begin, end), True))
            seen = [(at, own) for at, own in parts if at.stop > at.start]
        found = []
        for at, own in seen:
            # Exact below 2**24.
            number = (places.keys[at] - positions[0]).float()
            keys = k[:, at], v[:, at], slopes, Distance.of(number, q.dtype)
            found.append(attend_at_distance(q[:, :, begin:end], *keys, scale=scale, causal=own))
        block = merge(found) if len(found) > 1 else found[0]
        shift = torch.arange(0, -len(positions), -1, device=q.device, dtype=torch.float32)
        partials.append(Partial(block.out, block.lse + distance_bias(slopes, shift)))
    # A causal block is merged, so in float32, unless it is the first.
    return joined(partials)


def blocks(queries: Sequence[range], length: int) -> Iterator[tuple[int, range]]:
    """Cut runs of query positions at multiples of ``length``.

    Yields, for each block, the index of its first query and the positions of its queries.
    """
    done = 0
    for run in queries:
        begin = run.start
        while begin < run.stop:
            end = min(run.stop, (begin // length + 1) * length)
            yield done + begin - run.start, range(begin, end)
            begin = end
        done += len(run)


def attend_at_distance(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    slopes: Tensor,
    distance: Distance,
    *,
    scale: float,
    causal: bool = False,
) -> Partial:
    """Attention over one segment whose keys are at the same distance from all queries.

    The parameters are those of `razor_dist.kernels.attend`; the lse holds the bias.
    """
    number, digits = distance
    if digits is not None:

        def wider(span: slice) -> Partial:
            keys = k[:, span].to(q.dtype), v[:, span].to(q.dtype)
            wide = widened(q, *keys, scale, slopes, digits[span])
            out, lse = attend(*wide, scale=scale, causal=causal)
            return Partial(out[..., : q.shape[3]], lse)

        # Causal attention is over one block of queries at most.
        return over_keys(wider, k.shape[1], k.shape[1] if causal else WIDENED_KEYS)
    if q.device.type == "cuda" and q.dtype == torch.float16:
        # A float16 mask would end at 65504, before the biases of far keys do.
        q = q.float()
    return attend(q, k, v, scale=scale, causal=causal, bias=distance_bias(slopes, number))


def digits_of(distance: Tensor) -> Tensor:
    """Distances ``[S]`` for `widened`: bfloat16 ``[S, WIDER]``, signed digits of base 256, twice.

    bfloat16 holds each digit exactly; together they are exact for multiples of 1/256 below 2**24.
    """
    size, sign = distance.abs(), distance.sign()
    digits = [torch.floor(size / place) % 256 * sign for place in _PLACES]
    return torch.stack([digit for digit in digits for _ in range(2)], -1).to(torch.bfloat16)


def widened(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slopes: Tensor, digits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose plain attention is ``q . k`` biased by distance.

    ``slope * distance`` becomes part of the dot product: a key is followed by the digits of its
    distance, a query by the slope times each digit's place value. The slope is two bfloat16
    numbers, the second for what the first leaves, and so right to 16 bits, which is as good as
    exact for any weight that is not negligible.

    ``q`` is bfloat16 ``[K, G, T, D]``, ``k`` and ``v`` are ``[K, S, D]``, ``slopes`` float32
    ``[K, G]`` and ``digits``, `digits_of` the distances, ``[S, WIDER]``. The results have
    ``D + WIDER`` dimensions; the values' further ones are 0.
    """
    unit = slopes / scale
    high = unit.to(q.dtype)
    low = (unit - high.float()).to(q.dtype)
    columns = torch.stack([part * place for place in _PLACES for part in (high, low)], -1)
    heads, group, queries, _ = q.shape
    return (
        torch.cat([q, columns[:, :, None].expand(heads, group, queries, WIDER)], -1),
        torch.cat([k, digits.to(k.dtype).expand(heads, *digits.shape)], -1),
        torch.nn.functional.pad(v, (0, WIDER)),
    )
