"""The reach of each head of an ALiBi model, from its weights (RazorAttention, section 3.1).

A key's score falls by the head's slope l with every token of distance, while the norm before the
layer bounds queries and keys. So beyond some distance, the head's *scope* L, no weight exceeds
epsilon (Theorem 1, equation 2)::

    L = (2 ||W_Q W_K^T|| (||gain||^2 + ||shift||^2) - log epsilon) / l

with the spectral norm, and gain and shift the weight and bias of the norm. A head needs a window of
L tokens, without sinks or compensation token. Heads whose scope, rounded up (`window_of`), reaches
the context are retrieval heads.

Here W_Q includes the scale of the scores, and the bias of the queries as one more column, for an
input that is always 1; the bias of the keys adds the same to all scores of a query and is left out.

**Gaps in the proof** (appendix A.1). It drops the denominator's term for the query's own key, which
is below 1 when their product is negative; and it bounds ``||gain * z||`` by ``||gain||``, which
holds on average over a normalised z, but not where the gain is large. ``bound="strict"`` holds for
all weights and inputs. With ``||z||^2 <= E``, and the query's own key in the denominator, the
weight is at most ``exp(q (k_n - k_m) - l (m - n))``, where::

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

from razor_dist.heads.decision import ranked, rounded
from razor_dist.heads.head_map import HeadMap
from razor_dist.identify.settings import Bound, ScopeSettings
from razor_dist.models.alibi import AlibiModel, LayerWeights
from razor_dist.models.loader import dtype_name
from razor_dist.models.shape import ModelShape

KIND: Final = "scope"  # of score, in `HeadMap.scores`: L of each query head, in tokens


def scopes(weights: LayerWeights, slopes: Tensor, epsilon: float, bound: Bound = "paper") -> Tensor:
    """L of every query head of a layer, float64 ``[H]``, in tokens."""
    content = _product_bound(weights, bound)
    return (content - math.log(epsilon)) / slopes.double().cpu()


def _product_bound(w: LayerWeights, bound: Bound) -> Tensor:
    """Bound ``q k``, float64 ``[H]``; with ``bound="strict"``, ``q (k_n - k_m)``."""
    if bound == "paper":
        query, key = _query(w, torch.ones_like(w.gain), w.shift.new_zeros(())), _key(w)
        squares = w.gain.double().square().sum() + w.shift.double().square().sum()
        if w.query_bias is not None:
            squares = squares + 0.5  # for the input that is always 1: 2 * 0.5
        of_query = of_key = float(2 * squares.detach()) ** 0.5
    else:
        query, key = _query(w, w.gain, w.shift), _key(w) * w.gain.double()
        of_query, of_key = (w.gain.numel() + 1) ** 0.5, 2 * w.gain.numel() ** 0.5
    if w.clip is None:
        return (_product_norm(query, key) * of_query * of_key).cpu()
    most = w.clip * query.shape[1] ** 0.5
    one = (torch.linalg.matrix_norm(query / w.scale, 2) * of_query).clamp(max=most)
    keys = 1 if bound == "paper" else 2
    two = (torch.linalg.matrix_norm(key, 2) * of_key).clamp(max=keys * most)
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
    """The window that covers a scope, in tokens; None if it reaches the context.

    It is rounded up to ``2**n`` or ``3 * 2**(n-1)``, because heads with the same window share a
    cache and a kernel call, and a layer's scopes are all different. If it reaches the context the
    head is a retrieval head: ranks share its keys, but would all keep the whole window.
    """
    least = math.ceil(scope)
    power: int = 1 << max(0, least - 1).bit_length()
    window = power * 3 // 4 if power >= 4 and least <= power * 3 // 4 else power
    return window if window < context else None


def head_map(
    name: str, model: AlibiModel, settings: ScopeSettings, on_layer: Callable[[int], None]
) -> HeadMap:
    """Build the head map of scopes; a KV head's window covers all of its query heads' scopes."""
    shape = ModelShape.from_config(model.config)
    context, group = settings.context_tokens or shape.max_positions, shape.group
    rows = []
    for layer in range(shape.layers):
        weights = model.layer_weights(layer)
        slopes = model.slopes(weights.key.device)
        rows.append(scopes(weights, slopes, settings.epsilon, settings.bound).tolist())
        on_layer(layer)
    found = rounded(rows)
    windows = tuple(
        tuple(window_of(max(row[h : h + group]), context) for h in range(0, len(row), group))
        for row in found
    )
    reaching = tuple((i, j) for i, j in ranked(found) if window_of(found[i][j], context) is None)
    own = {"epsilon": settings.epsilon, "bound": settings.bound}
    return HeadMap.of_model(
        name,
        model.config,
        method="alibi",
        settings=own | {"context": context, "dtype": dtype_name(model.dtype)},
        retrieval=tuple(tuple(window is None for window in row) for row in windows),
        selected={KIND: reaching},
        scores={KIND: found},
        windows=windows,
    )
