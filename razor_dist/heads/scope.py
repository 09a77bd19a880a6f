"""The reach of each head of an ALiBi model, from its weights (RazorAttention, section 3.1).

A key's score falls by the head's slope l with every token of distance, while queries and keys are
bounded by the norm before the layer. So beyond some distance, the head's *scope* L, no weight
exceeds epsilon (Theorem 1, equation 2)::

    L = (2 ||W_Q W_K^T|| (||gain||^2 + ||shift||^2) - log epsilon) / l

with the spectral norm, and gain and shift the weight and bias of the norm. A head needs a window of
L tokens and no more, no sinks, and nothing that stands for what is dropped. Heads whose scope,
rounded up (`window_of`), reaches the context are retrieval heads.

Here W_Q holds the scale of the scores, and the bias of the queries as one more column, for an input
that is always 1; the bias of the keys adds the same to all scores of a query and is left out.

**What the proof leaves open.** (Appendix A.1.) It drops the denominator's term of the query's own
key, which is below 1 when their product is negative; and it bounds ``||gain * z||`` by
``||gain||``, which holds on average over a normalised z, not where the gain is large. For all
weights and inputs ``bound="strict"`` holds. With ``||z||^2 <= E``, and the query's own key in the
denominator, the weight is at most ``exp(q (k_n - k_m) - l (m - n))``, where::

    |q (k_n - k_m)| <= ||A^T B||  sqrt(E + 1)  2 sqrt(E),   A = [W_Q gain, W_Q shift],  B = W_K gain

(columns scaled by the gain; for A, one more for the shift). Where coordinates are clipped (MPT),
norms of queries and keys are bounded one by one, by the weights and by the clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from razor_dist.heads.decision import Scores, ranked, rounded
from razor_dist.heads.head_map import HeadMap
from razor_dist.heads.settings import Bound, ScopeSettings
from razor_dist.models.alibi import AlibiModel, LayerWeights
from razor_dist.models.loader import dtype_name
from razor_dist.models.shape import ModelShape

KIND: Final = "scope"  # of score, in `HeadMap.scores`: L of each query head, in tokens


def scopes(weights: LayerWeights, slopes: Tensor, epsilon: float, bound: Bound = "paper") -> Tensor:
    """Compute L of every query head of a layer from its ``slopes``, float64 ``[H]``, in tokens."""
    content = _paper_bound(weights) if bound == "paper" else _strict_bound(weights)
    return (content - math.log(epsilon)) / slopes.double().cpu()


def _paper_bound(w: LayerWeights) -> Tensor:
    """Bound the product of a query and a key as Theorem 1 does, ``[H]``."""
    squares = w.gain.double().square().sum() + w.shift.double().square().sum()
    query, key = _query(w, torch.ones_like(w.gain), w.shift.new_zeros(())), _key(w)
    if w.query_bias is not None:
        squares = squares + 0.5  # of the input that is always 1: 2 * 0.5
    if w.clip is None:
        return (_product_norm(query, key) * 2 * squares).cpu()
    size = query.shape[1]
    norms = [
        (torch.linalg.matrix_norm(x, 2) * (2 * squares).sqrt()).clamp(max=w.clip * size**0.5)
        for x in (query / w.scale, key)
    ]
    return (norms[0] * norms[1] * w.scale).cpu()


def _strict_bound(w: LayerWeights) -> Tensor:
    """Bound ``q (k_n - k_m)`` for all weights and inputs, ``[H]``."""
    width = w.gain.numel()
    query, key = _query(w, w.gain, w.shift), _key(w) * w.gain.double()
    if w.clip is None:
        return (_product_norm(query, key) * (width + 1) ** 0.5 * 2 * width**0.5).cpu()
    most = w.clip * query.shape[1] ** 0.5
    one = (torch.linalg.matrix_norm(query / w.scale, 2) * (width + 1) ** 0.5).clamp(max=most)
    two = (torch.linalg.matrix_norm(key, 2) * 2 * width**0.5).clamp(max=2 * most)
    return (one * two * w.scale).cpu()


def _query(w: LayerWeights, gain: Tensor, shift: Tensor) -> Tensor:
    """``scale * [W_Q gain, W_Q shift + bias]``, float64 ``[H, D, E + 1]``."""
    query = w.query.double()
    constant = (query * shift.double()).sum(-1, keepdim=True)
    if w.query_bias is not None:
        constant = constant + w.query_bias.double().unsqueeze(-1)
    return torch.cat([query * gain.double(), constant], -1) * w.scale


def _key(w: LayerWeights) -> Tensor:
    """W_K of every query head, float64 ``[H, D, E]``."""
    group = w.query.shape[0] // w.key.shape[0]
    return w.key.double().repeat_interleave(group, 0)


def _product_norm(query: Tensor, key: Tensor) -> Tensor:
    """Spectral norm of ``query^T key`` for every head, by the small factors of both: ``[H]``."""
    (r_q, r_k) = (torch.linalg.qr(x.transpose(-1, -2), mode="r").R for x in (query, key))
    return torch.linalg.matrix_norm(r_q @ r_k.transpose(-1, -2), 2)


def window_of(scope: float, context: int) -> int | None:
    """Return the window that covers a scope, in tokens; None if it reaches the context.

    Rounded up to ``2**n`` or ``3 * 2**(n-1)``: heads with one window share a cache and a kernel
    call, and a layer's scopes are all different. A window of the whole context would be kept by
    every rank: a retrieval head's keys are sharded.
    """
    least = math.ceil(scope)
    power: int = 1 << max(0, least - 1).bit_length()
    window = power * 3 // 4 if power >= 4 and least <= power * 3 // 4 else power
    return window if window < context else None


def measure(
    model: AlibiModel, settings: ScopeSettings, on_layer: Callable[[int], None] | None = None
) -> Scores:
    """Compute L of every query head, ``[layers][query heads]``; ``on_layer`` after each layer."""
    rows = []
    for layer in range(ModelShape.from_config(model.config).layers):
        weights = model.layer_weights(layer)
        slopes = model.slopes(weights.key.device)
        rows.append(scopes(weights, slopes, settings.epsilon, settings.bound).tolist())
        if on_layer is not None:
            on_layer(layer)
    return rounded(rows)


def head_map(
    model_name: str,
    config: PretrainedConfig,
    found: Scores,
    settings: ScopeSettings,
    dtype: torch.dtype,
) -> HeadMap:
    """Build the head map of scopes; those of a KV head's query heads give its window."""
    shape = ModelShape.from_config(config)
    context = settings.context_tokens or shape.max_positions
    group = shape.group
    windows = tuple(
        tuple(window_of(max(row[h : h + group]), context) for h in range(0, len(row), group))
        for row in found
    )
    reaching = tuple((i, j) for i, j in ranked(found) if window_of(found[i][j], context) is None)
    return HeadMap.of_model(
        model_name,
        config,
        method="alibi",
        settings={
            "epsilon": settings.epsilon,
            "bound": settings.bound,
            "context": context,
            "dtype": dtype_name(dtype),
        },
        retrieval=tuple(tuple(window is None for window in row) for row in windows),
        selected={KIND: reaching},
        scores={KIND: found},
        windows=windows,
    )
