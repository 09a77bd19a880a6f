"""Attention of one forward pass, which may have three kinds of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.attention.decode import DecodeContext
from razor_dist.attention.prefill import PrefillContext
from razor_dist.attention.replicated import ReplicatedContext
from razor_dist.kernels.query import Query


class PassContext:
    """`AttentionContext` of decoded, replicated and prefilled tokens, which share one pass.

    The model reads its weights once for all of them. On every rank the parts send in the same
    order.
    """

    def __init__(self, *parts: DecodeContext | ReplicatedContext | PrefillContext) -> None:
        self._parts = parts

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        outs, end = [], 0
        for part in self._parts:
            own = slice(end, end + part.tokens)
            end = own.stop
            outs.append(part.attend(layer, query.tokens(own), k[:, own], v[:, own]))
        if end < k.shape[1]:  # the dummy token of a rank without tokens
            outs.append(outs[0].new_zeros(k.shape[1] - end, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
