"""Choosing the next tokens of a step from logits, for all of its sequences at once.

A sequence must draw the same tokens alone and in company, so nothing may depend on the order in
which a device adds: the weights of a row's tokens, from their probabilities, are integers.

It should also draw the same tokens on other numbers of ranks, whose logits differ by some 1e-6. So
tokens race: each has a random number from the exponential distribution, and that with the least
ratio of number to weight is drawn, as often as it is likely. Such a difference changes the winner
about once in a million draws. It would change the inverse of the distribution function at a random
place once in some hundreds, since it moves every border between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.protocol.sampling_params import MAX_LOGPROBS, SamplingParams

# Below this a temperature is 0. Logits divided by less can exceed float32, and what is drawn is
# the likeliest token anyway unless another's logit is within 1e-4 of its.
_COLDEST = 1e-5
# Weight of the likeliest token; what is less likely by more than that is never drawn. Times a
# vocabulary's size it must fit int64.
_HEAVIEST = 2.0**40
# Tokens that nearly always have top_p of the mass together.
_FEW = 1024
# Increment and multipliers of SplitMix64 (Steele, Lea and Flood, 2014) as signed numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


class Draw(NamedTuple):
    """Names the random numbers by which one token is drawn."""

    seed: int  # 64 bits, signed
    place: int  # tokens that were drawn with this seed before


@dataclass(frozen=True)
class Sampled:
    token: int
    logprob: float | None = None  # under the model (temperature 1), if asked for
    top: Sequence[tuple[int, float]] = ()  # likeliest tokens and log-probabilities, if asked for


class Adjusted(NamedTuple):
    """Rows by which tokens are chosen instead of the model's."""

    rows: Sequence[int]  # of the step's logits
    logits: Tensor  # float32 [len(rows), V]


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    draws: Sequence[Draw],
    adjusted: Adjusted | None = None,
    *,
    rows: Sequence[int] | None = None,
    peaks: Sequence[int] | None = None,
) -> list[Sampled | None]:
    """Choose a token by each of the ``rows`` of ``logits``, float32 ``[m, V]``, or of all.

    An ``adjusted`` row is taken instead, where there is one. ``peaks`` are those of all ``logits``
    (`likeliest`), if they are known. Then ``logits`` are not read for a row of temperature 0, or
    one that hardly differs from it (below 1e-5): it takes the likeliest token. For any other
    ``draws`` name the random numbers. Log-probabilities are those of ``logits``.

    Return None for a row by which the model has computed no distribution: a logit is NaN or
    infinite, or all are masked.
    """
    rows = range(len(logits)) if rows is None else rows
    peaks = likeliest(logits).tolist() if peaks is None else peaks
    tokens = [peaks[row] for row in rows]
    groups = [(dict(enumerate(rows)), logits)]
    if adjusted is not None:
        own = likeliest(adjusted.logits).tolist()
        for i, token in zip(adjusted.rows, own, strict=True):
            tokens[i] = token if tokens[i] >= 0 else -1
            del groups[0][0][i]
        groups.append(({i: row for row, i in enumerate(adjusted.rows)}, adjusted.logits))
    broken = [token < 0 for token in tokens]
    for places, values in groups:
        drawn = [i for i in places if not broken[i] and params[i].temperature >= _COLDEST]
        if drawn:
            own_values = values[[places[i] for i in drawn]]
            highest = own_values.gather(-1, _column([tokens[i] for i in drawn], values.device))
            chosen = _draw(
                own_values - highest,
                [params[i] for i in drawn],
                [draws[i] for i in drawn],
            )
            for i, token in zip(drawn, chosen, strict=True):
                tokens[i] = token
    sampled = [None if no else Sampled(t) for t, no in zip(tokens, broken, strict=True)]
    with_logprobs = [i for i, p in enumerate(params) if not broken[i] and p.logprobs is not None]
    if with_logprobs:
        logprobs = torch.log_softmax(logits[[rows[i] for i in with_logprobs]], dim=-1)
        chosen_at = _column([tokens[i] for i in with_logprobs], logprobs.device)
        # As many for each, so that among equals the choice is the same in company.
        top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]))
        found = zip(
            with_logprobs,
            logprobs.gather(-1, chosen_at)[:, 0].tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            strict=True,
        )
        for i, logprob, ids, values in found:
            pairs = list(zip(ids, values, strict=True))[: params[i].logprobs]
            sampled[i] = Sampled(tokens[i], logprob, pairs)
    return sampled


def likeliest(logits: Tensor) -> Tensor:
    """Return the first token with the largest logit of each row, int64 ``[n]``.

    It is -1 where that logit is NaN or infinite. `DecodeGraphs` records this with a step, so that
    of one without anything but greedy answers the host needs these numbers alone.
    """
    peaks, tokens = logits.max(-1)  # the maximum of NaN and anything is NaN
    return tokens.masked_fill(peaks - peaks != 0, -1)  # infinity less infinity is NaN, too


def _draw(relative: Tensor, params: Sequence[SamplingParams], draws: Sequence[Draw]) -> list[int]:
    """Draw a token by each row of logits ``[n, V]`` whose maximum is 0."""
    device = relative.device
    weights = relative / _column([p.temperature for p in params], device, torch.float32)
    weights = (weights.exp() * _HEAVIEST).long()
    rows = [i for i, p in enumerate(params) if p.min_p > 0.0]
    if rows:
        least = _column([params[i].min_p * _HEAVIEST for i in rows], device, torch.float64)
        weights[rows] *= weights[rows] >= least
    top_k = [p.top_k if 0 < p.top_k < weights.shape[-1] else 0 for p in params]
    rows = [i for i, k in enumerate(top_k) if k]
    if rows:
        weights[rows] = _top_k(weights[rows], _column([top_k[i] for i in rows], device))
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        count = min(max(top_k[i] or _FEW for i in rows), weights.shape[-1])
        top_p = _column([params[i].top_p for i in rows], device, torch.float64)
        weights[rows] = _top_p(weights[rows], top_p, count)
    drawn: list[int] = (weights / _exponential(draws, weights)).argmax(-1).tolist()
    return drawn


def _exponential(draws: Sequence[Draw], weights: Tensor) -> Tensor:
    """Return a random number for each of ``weights``, float64 ``[n, V]``; their mean is 1.

    It is a hash of the draw's seed and place and of the token, so no draw depends on another.
    """
    seeds, places = (_column(values, weights.device) for values in zip(*draws, strict=True))
    tokens = torch.arange(weights.shape[-1], device=weights.device)
    hashed = _mixed(_mixed(_mixed(seeds) + places) + tokens * _INCREMENT)
    uniform = (_shifted(hashed, 11).double() + 0.5) * 2.0**-53
    # The highest of 2**53 numbers is rounded to 1: its logarithm is 0, and so may be a weight.
    return -uniform.clamp(max=1 - 2.0**-53).log()


def _mixed(values: Tensor) -> Tensor:
    """Return the output of SplitMix64 for int64 states."""
    values = (values ^ _shifted(values, 30)) * _MULTIPLIERS[0]
    values = (values ^ _shifted(values, 27)) * _MULTIPLIERS[1]
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if they were unsigned."""
    return (values >> bits) & ((1 << 64 - bits) - 1)


def _top_k(weights: Tensor, top_k: Tensor) -> Tensor:
    """Weights ``[n, V]``, 0 for those below the ``top_k``-th, ``[n, 1]``, of their row."""
    largest = weights.topk(int(top_k.max())).values
    return weights * (weights >= largest.gather(-1, top_k - 1))


def _top_p(weights: Tensor, top_p: Tensor, count: int) -> Tensor:
    """Weights ``[n, V]``, 0 outside the smallest set whose share reaches ``top_p``, ``[n, 1]``.

    The heaviest token is in it, even if ``top_p`` is next to nothing. Only the ``count`` heaviest
    are sorted where they reach it.
    """
    vocabulary = weights.shape[-1]
    # Weight and place in one number, so that of equals the first one is larger.
    keys = weights * vocabulary + torch.arange(vocabulary - 1, -1, -1, device=weights.device)
    largest = keys.topk(count).values
    ordered = largest // vocabulary
    enough = weights.sum(-1, keepdim=True) * top_p
    # A token stays if the weight before it is less than enough.
    kept = (ordered.cumsum(-1) - ordered < enough).sum(-1, keepdim=True).clamp(min=1)
    found = weights * (keys >= largest.gather(-1, kept - 1))
    short = (ordered.sum(-1) < enough[:, 0]).nonzero()[:, 0]
    if len(short):
        found[short] = _top_p(weights[short], top_p[short], vocabulary)
    return found


def _column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)
