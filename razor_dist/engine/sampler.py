"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.sampling_params import SamplingParams


@dataclass(frozen=True)
class Sampled:
    """A chosen token.

    Attributes
    ----------
    token : int
    logprob : float or None
        Its log-probability under the model (temperature 1), if asked for.
    top : list of (int, float)
        The likeliest tokens and their log-probabilities, if asked for.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Sampled:
    """Choose one token.

    Parameters
    ----------
    logits : Tensor
        ``[V]`` float32.
    params : SamplingParams
        Temperature 0 takes the likeliest token, the one of lowest index among equals.
    generator : torch.Generator
        The request's own source of randomness, on CPU.

    Returns
    -------
    Sampled
    """
    logits = logits.cpu()
    if params.temperature == 0.0:
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
        probabilities[index[outside]] = 0.0
    return probabilities / probabilities.sum()
