"""Equation 5 and the window's definition, written out query by query: slow and literal.

Deliberately shares no code with the package: the formulas are the paper's, written out again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

NAME = "literal_razor"


def literal_head(
    q: Tensor, k: Tensor, v: Tensor, scale: float, settings: dict[str, Any], slope: float = 0.0
) -> Tensor:
    """Streaming attention of one head: ``q``, ``k``, ``v`` ``[N, D]``, one query at a time.

    ``slope`` is ALiBi's: a score is lowered by that times the distance.
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
    """Where the window of the query at position ``i`` begins; perhaps before the text."""
    length, ratio = settings["minimum"], settings["ratio"]
    if ratio is not None:
        length = max(length, math.ceil((i + 1) / ratio))
    if settings["maximum"] is not None:
        length = min(length, settings["maximum"])
    start: int = settings["block"] * math.floor((i + 1 - length) / settings["block"])
    return start


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    literal: dict[str, Any],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    out = torch.empty_like(query, dtype=torch.float64)
    for h in range(heads):
        kv = h // group
        q, k, v = (x.double() for x in (query[0, h], key[0, kv], value[0, kv]))
        if literal["retrieval"][module.layer_idx][kv]:
            n = q.shape[0]
            scores = scaling * q @ k.T
            future = torch.ones(n, n, dtype=torch.bool).triu(1)
            out[0, h] = torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v
        else:
            own = literal
            if "windows" in literal:
                minimum = literal["windows"][module.layer_idx][kv]
                own = literal | {"minimum": minimum, "maximum": None, "ratio": None}
            out[0, h] = literal_head(q, k, v, scaling, own)
    return out.to(query.dtype).transpose(1, 2), None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def literal_logits(
    model: str, tokens: list[int], retrieval: Any, settings: dict[str, Any]
) -> Tensor:
    """float32 ``[N, V]``: logits of every position with the literal attention."""
    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation=NAME)
    with torch.inference_mode():
        output = loaded(
            input_ids=torch.tensor([tokens]),
            use_cache=False,
            literal={**settings, "retrieval": retrieval},
        )
    return output.logits[0]
