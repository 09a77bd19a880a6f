"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.config.errors import EngineError
from razor_dist.engine.sampling_params import SamplingParams

# Below this a temperature is 0. Logits divided by less can exceed float32, and what is drawn is
# the likeliest token anyway unless another's logit is within 1e-4 of its.
_COLDEST = 1e-5


@dataclass(frozen=True)
class Sampled:
    """A chosen token."""

    token: int
    logprob: float | None  # under the model (temperature 1), if asked for
    top: list[tuple[int, float]]  # likeliest tokens and their log-probabilities, if asked for


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Sampled:
    """Choose one token from ``logits``, float32 ``[V]``, by the request's own CPU ``generator``.

    Temperature 0, or one that hardly differs from it (below 1e-5), takes the likeliest token, the
    one of lowest index among equals.

    Raises
    ------
    EngineError
        If the model has computed no distribution: a logit is NaN or infinite, or all are masked.
    """
    logits = logits.cpu()
    if not torch.isfinite(logits.max()):  # the maximum of NaN and anything is NaN
        raise EngineError("the model computed logits that are not finite")
    if params.temperature < _COLDEST:
        token = int(logits.argmax())
    else:
        probabilities = _filtered(logits / params.temperature, params)
        token = int(torch.multinomial(probabilities, 1, generator=generator))
    if params.logprobs is None:
        return Sampled(token, None, [])
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(params.logprobs)
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)


def _filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities ``[V]`` after top-k, then top-p."""
    if params.top_k > 0 and params.top_k < logits.shape[0]:
        least = logits.topk(params.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = torch.softmax(logits, dim=-1)
    if params.top_p < 1.0:
        ordered, index = probabilities.sort(descending=True, stable=True)
        # The smallest set whose mass reaches top_p: a token stays if the mass before it is less.
        outside = ordered.cumsum(0) - ordered >= params.top_p
        outside[0] = False  # even if top_p is 0 in float32
        probabilities[index[outside]] = 0.0
    return probabilities / probabilities.sum()
