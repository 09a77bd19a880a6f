"""Attention in plain torch: the definition that every other backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial
from razor_dist.kernels.quantized import KeysOrValues, of_one_dtype


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    """See `razor_dist.kernels.attend`; materialises the scores in float32."""
    scores = torch.einsum("kgtd,ksd->kgts", q.float(), k.float()) * scale
    if bias is not None:
        scores = scores + (bias.unsqueeze(2) if bias.dim() == 3 else bias).float()
    if causal:
        t = q.shape[2]
        future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # A row with no visible key has lse = -inf and must give zeros, not NaN.
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return Partial(torch.einsum("kgts,ksd->kgtd", weights, v.float()), lse)


def supports(q: Tensor, k: KeysOrValues, v: KeysOrValues, causal: bool, biased: bool) -> bool:
    return of_one_dtype(q, k, v)
