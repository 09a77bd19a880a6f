"""Choosing the next tokens of a step from logits, for all of its sequences at once.

A sequence must draw the same tokens alone and in company, so nothing may depend on the order in
which a device adds: the weights of a row's tokens, from their probabilities, are integers.
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
    generators: Sequence[torch.Generator],
    adjusted: Adjusted | None = None,
) -> list[Sampled | None]:
    """Choose a token by each row of ``logits``, float32 ``[n, V]``, or by its ``adjusted`` one.

    Temperature 0, or one that hardly differs from it (below 1e-5), takes the likeliest token, the
    one of lowest index among equals, and copies no row to the host. Any other takes one number from
    the row's own CPU generator. Log-probabilities are those of ``logits``.

    Return None for a row by which the model has computed no distribution: a logit is NaN or
    infinite, or all are masked.
    """
    peaks, finite, tokens = _peaks(logits)
    groups = [({i: i for i in range(len(params))}, logits, peaks)]
    if adjusted is not None:
        own_peaks, own_finite, own_tokens = _peaks(adjusted.logits)
        for i, ok, token in zip(adjusted.rows, own_finite, own_tokens, strict=True):
            finite[i], tokens[i] = finite[i] and ok, token
            del groups[0][0][i]
        own_rows = {i: row for row, i in enumerate(adjusted.rows)}
        groups.append((own_rows, adjusted.logits, own_peaks))
    for rows, values, highest in groups:
        drawn = [i for i in rows if finite[i] and params[i].temperature >= _COLDEST]
        if drawn:
            at = [rows[i] for i in drawn]
            chosen = _draw(
                values[at] - highest[at].unsqueeze(-1),
                [params[i] for i in drawn],
                [generators[i] for i in drawn],
            )
            for i, token in zip(drawn, chosen, strict=True):
                tokens[i] = token
    sampled = [Sampled(token) if ok else None for token, ok in zip(tokens, finite, strict=True)]
    with_logprobs = [i for i, p in enumerate(params) if finite[i] and p.logprobs is not None]
    if with_logprobs:
        logprobs = torch.log_softmax(logits[with_logprobs], dim=-1)
        own = logprobs.gather(-1, _column([tokens[i] for i in with_logprobs], logprobs.device))
        # As many for each, so that among equals the choice is the same in company.
        top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]))
        found = zip(
            with_logprobs,
            own[:, 0].tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            strict=True,
        )
        for i, logprob, ids, values in found:
            pairs = list(zip(ids, values, strict=True))[: params[i].logprobs]
            sampled[i] = Sampled(tokens[i], logprob, pairs)
    return sampled


def _peaks(logits: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Return each row's maximum, whether that is finite, and the first token that has it."""
    peaks, likeliest = logits.max(-1)  # the maximum of NaN and anything is NaN
    finite, tokens = torch.stack([peaks.isfinite().long(), likeliest]).tolist()
    return peaks, finite, tokens


def _draw(
    relative: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> list[int]:
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
    # The inverse of the distribution function, at a uniformly distributed place.
    ends = weights.cumsum(-1)
    uniform = torch.cat([torch.rand(1, dtype=torch.float64, generator=g) for g in generators])
    places = (uniform.to(device).unsqueeze(-1) * ends[:, -1:]).long()
    places = places.minimum(ends[:, -1:] - 1)  # the product may be rounded up
    drawn: list[int] = torch.searchsorted(ends, places, right=True)[:, 0].tolist()
    return drawn


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
