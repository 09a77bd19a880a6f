"""The dimensions of a head by which blocks of keys are chosen (`razor_dist.kernels.chosen`)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from razor_dist.config.errors import ModelError


def slower_half(model: nn.Module, head_dim: int) -> Tensor:
    """Return the half of a head's dimensions that turn slowest with position, int64 ``[D / 2]``.

    They are found by turning each unit vector by one position, as the model does, so that any
    arrangement of pairs will do. Dimensions that are not turned come first. `ModelError` for a
    model without rotary embeddings.
    """
    body: Any = getattr(model, "base_model", model)
    kinds = [type(m) for m in body.modules() if type(m).__name__.endswith("Attention")]
    turn = (
        getattr(sys.modules[kinds[0].__module__], "apply_rotary_pos_emb", None) if kinds else None
    )
    if turn is None or not hasattr(body, "rotary_emb"):
        raise ModelError("retrieval_share is for models with rotary embeddings")
    device = next(body.parameters()).device
    unit = torch.eye(head_dim, device=device)[None, None]
    cos, sin = body.rotary_emb(unit, torch.ones(1, head_dim, dtype=torch.int64, device=device))
    turned = turn(unit, unit, cos, sin)[0][0, 0].fill_diagonal_(0)
    return turned.norm(dim=-1).argsort(stable=True)[: head_dim // 2].sort().values
