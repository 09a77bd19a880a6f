"""Attention of one step: what all ranks compute of it, and chunks of prompts, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from razor_dist.attention.decode import DecodeContext
from razor_dist.attention.prefill import PrefillContext
from razor_dist.attention.short import ShortContext
from razor_dist.kernels.query import Query


class StepContext:
    """`AttentionContext` of a step that reads the weights once for all that is in it.

    A rank's tokens are those of ``short``, which all ranks have alike, and then its own of each of
    ``chunks``. What they send follows in this order on every rank.
    """

    def __init__(
        self, short: Sequence[DecodeContext | ShortContext], chunks: Sequence[PrefillContext]
    ) -> None:
        # A rank without tokens of a chunk takes part in it.
        self._parts = [part for part in short if part.tokens] + list(chunks)

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        outs, end = [], 0
        for part in self._parts:
            own = slice(end, end + part.tokens)
            end = own.stop
            outs.append(part.attend(layer, query.tokens(own), k[:, own], v[:, own]))
        if end < k.shape[1]:  # the dummy token of a rank that has no other
            outs.append(outs[0].new_zeros(k.shape[1] - end, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
