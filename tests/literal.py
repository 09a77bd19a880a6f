"""Attention, equation 5 and the window's definition, written out: slow and literal.

Deliberately shares no code with the package: the formulas are the paper's, written out again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def causal(tokens: int) -> Tensor:
    """Return the causal mask of a text, bool ``[N, N]``: row i is True up to column i."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def literal_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, bias: float | Tensor = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention in float64 to the keys that each query sees, and its lse.

    ``q`` is ``[..., G, T, D]``, ``k`` and ``v`` are ``[..., S, D]``, and ``seen`` is bool and like
    ``bias`` broadcast to the scores, ``[..., G, T, S]``.
    """
    scores = torch.einsum("...gtd,...sd->...gts", q.double(), k.double()) * scale + bias
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).nan_to_num()  # of a query that sees nothing
    return torch.einsum("...gts,...sd->...gtd", weights, v.double()), scores.logsumexp(-1)


def literal_head(
    q: Tensor, k: Tensor, v: Tensor, scale: float, settings: dict[str, Any], slope: float = 0.0
) -> Tensor:
    """Streaming attention of one head: ``q``, ``k``, ``v`` ``[N, D]``, one query at a time.

    ``settings`` are a `StreamingPolicy`'s by name; ``slope`` is ALiBi's: a score is lowered by that
    times the distance.
    """
    place = torch.arange(q.shape[0], dtype=q.dtype)
    out = torch.empty_like(q)
    n0 = settings["sinks"]
    for i in range(q.shape[0]):
        start = window_start(i, settings)
        if start <= n0:
            weights = torch.exp(scale * (k[: i + 1] @ q[i]) + slope * (place[: i + 1] - i))
            out[i] = weights @ v[: i + 1] / weights.sum()
            continue
        kept = [*range(n0), *range(start, i + 1)]
        weights = torch.exp(scale * (k[kept] @ q[i]) + slope * (place[kept] - i))
        numerator, denominator = weights @ v[kept], weights.sum()
        if settings["compensation"]:
            dropped = start - n0
            k_hat, v_hat = k[n0:start].mean(0), v[n0:start].mean(0)
            away = place[n0:start].mean() - i
            weight = dropped * torch.exp(scale * (q[i] @ k_hat) + slope * away)
            numerator, denominator = numerator + weight * v_hat, denominator + weight
        out[i] = numerator / denominator
    return out


def window_start(i: int, settings: dict[str, Any]) -> int:
    """Return the first position in the window of the query at ``i``; it may be negative."""
    length, ratio = settings["window_min"], settings["window_ratio"]
    if ratio is not None:
        length = max(length, math.ceil((i + 1) / ratio))
    if settings["window_max"] is not None:
        length = min(length, settings["window_max"])
    start: int = settings["block"] * math.floor((i + 1 - length) / settings["block"])
    return start
