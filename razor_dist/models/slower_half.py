"""The dimensions of a head by which blocks of keys are chosen (`razor_dist.kernels.chosen`)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from razor_dist.config.errors import ModelError


def slower_half(model: nn.Module, head_dim: int) -> Tensor:
    """The half of a head's dimensions that rotate slowest with position, int64 ``[D / 2]``.

    They are found by rotating each unit vector by one position, as the model does, which works for
    any arrangement of pairs. Dimensions that do not rotate count as the slowest; some models, such
    as Phi, pass only the others to the rotation. Raise `ModelError` for a model without rotary
    embeddings.
    """
    body: Any = getattr(model, "base_model", model)
    found = [m for m in body.modules() if type(m).__name__.endswith("Attention")]
    code = sys.modules[type(found[0]).__module__] if found else None
    turn = getattr(code, "apply_rotary_pos_emb", None)
    if turn is None or getattr(body, "rotary_emb", None) is None:
        raise ModelError("retrieval_share is for models with rotary embeddings")
    device = next(body.parameters()).device
    width: int = getattr(found[0], "rotary_ndims", head_dim)  # what the model passes to `turn`
    unit = torch.eye(width, device=device)[None, None]
    cos, sin = body.rotary_emb(unit, torch.ones(1, width, dtype=torch.int64, device=device))
    turned = torch.zeros(head_dim, device=device)
    turned[:width] = turn(unit, unit, cos, sin)[0][0, 0].fill_diagonal_(0).norm(dim=-1)
    return turned.argsort(stable=True)[: head_dim // 2].sort().values
