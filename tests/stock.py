"""Stock transformers on a text, with its own attention or with one that a test defines."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from tests.literal import causal, literal_attention, literal_head


def stock_logits(
    model: str | Path, tokens: Seq[int], attention: str = "eager", **given: Any
) -> Tensor:
    """float32 ``[N, V]``: logits of every position. Eager, since sdpa runs an op that ours may."""
    stock = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention)
    with torch.inference_mode():
        logits: Tensor = stock(torch.tensor([tokens]), use_cache=False, **given).logits[0]
    return logits


def register(name: str, attend: Callable[..., Tensor]) -> None:
    """Define an attention of transformers, which computes each KV head in float64.

    ``attend(q, k, v, scaling, given)`` returns ``[G, N, D]`` of a KV head's queries ``[G, N, D]``;
    ``given`` has what the model was called with, and "layer" and "head".
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        scaling: float,
        **given: Any,
    ) -> tuple[Tensor, None]:
        queries = query[0].double().split(query.shape[1] // key.shape[1])
        outs = [
            attend(q, k, v, scaling, {**given, "layer": module.layer_idx, "head": head})
            for head, (q, k, v) in enumerate(
                zip(queries, key[0].double(), value[0].double(), strict=True)
            )
        ]
        return torch.cat(outs).to(query.dtype).transpose(0, 1).unsqueeze(0), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


def _literal_razor(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, given: dict[str, Any]
) -> Tensor:
    literal, layer, head = given["literal"], given["layer"], given["head"]
    if literal["retrieval"][layer][head]:
        return literal_attention(q, k, v, causal(len(k)), scaling)[0]
    if "windows" in literal:
        minimum = literal["windows"][layer][head]
        literal = literal | {"window_min": minimum, "window_max": None, "window_ratio": None}
    return torch.stack([literal_head(of_one, k, v, scaling, literal) for of_one in q])


register("literal_razor", _literal_razor)


def literal_logits(
    model: str | Path, tokens: Seq[int], retrieval: Any, settings: dict[str, Any]
) -> Tensor:
    """float32 ``[N, V]``: logits of every position with the literal attention."""
    literal = {**settings, "retrieval": retrieval}
    return stock_logits(model, tokens, "literal_razor", literal=literal)
