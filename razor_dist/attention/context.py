"""Attention of one pass: its three kinds of tokens side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.attention.decode import DecodeContext
from razor_dist.attention.prefill import PrefillContext
from razor_dist.attention.replicated import ReplicatedContext
from razor_dist.kernels.query import Query


class PassContext:
    """`AttentionContext` of a pass, which so reads the weights once for all that is in it.

    What the parts send follows in their order on every rank.
    """

    def __init__(self, *parts: DecodeContext | ReplicatedContext | PrefillContext) -> None:
        self._parts = parts

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        outs, end = [], 0
        for part in self._parts:
            own = slice(end, end + part.tokens)
            end = own.stop
            outs.append(part.attend(layer, query.tokens(own), k[:, own], v[:, own]))
        if end < k.shape[1]:  # the dummy token of a rank that has no other
            outs.append(outs[0].new_zeros(k.shape[1] - end, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
