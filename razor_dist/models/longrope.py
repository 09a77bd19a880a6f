"""LongRoPE (arXiv 2402.13753): one of two sets of rotary frequencies for a whole sequence.

Phi-3's long-context models have ``short_factor`` for texts of up to
``original_max_position_embeddings`` tokens and ``long_factor`` for longer ones. Keys rotated by one
set mean nothing to queries rotated by the other, so a sequence must use one set from its first
token on. transformers chooses in every forward call, by the largest position in it. That is right
for a call with a whole text, but wrong for a slice of a text, for decode steps over several
sequences, and for the cached keys of a text that exceeds the limit while it is answered (there
`generate` drops the cache and reads everything again).

Here the choice is made once, by the length that the sequence may reach (`position_mark`), and is
part of every position id: bit `LONG` asks for the long set. So it holds in every chunk, on every
rank and in every decode step, also if short and long sequences share a step or a CUDA graph.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONG = 1 << 40


class LongRope(nn.Module):
    """A model's rotary embedding with the set of frequencies that each position's mark asks for.

    It computes by two copies of ``stock``, transformers' embedding of ``rope_type`` longrope, one
    for each set, with transformers' own choice switched off.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.limit: int = stock.config.rope_parameters["original_max_position_embeddings"]
        init = ROPE_INIT_FUNCTIONS["longrope"]
        device = stock.inv_freq.device
        self.short = _fixed(stock, init(stock.config, device, seq_len=self.limit)[0])
        self.long = _fixed(stock, init(stock.config, device, seq_len=self.limit + 1)[0])

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each ``[B, T, D]`` in the dtype of ``x``; D is a head's rotated part.

        ``position_ids`` is int64 ``[B, T]``, with bit `LONG` where the long frequencies are wanted.
        """
        long = (position_ids & LONG).bool().unsqueeze(-1)
        positions = plain_positions(position_ids)
        cos_short, sin_short = self.short(x, positions)
        cos_long, sin_long = self.long(x, positions)
        return torch.where(long, cos_long, cos_short), torch.where(long, sin_long, sin_short)


def plain_positions(position_ids: Tensor) -> Tensor:
    return position_ids & (LONG - 1)


def _fixed(stock: Any, inv_freq: Tensor) -> nn.Module:
    fixed = copy.deepcopy(stock)
    fixed.rope_type = "default"  # whose frequencies transformers never updates
    fixed.inv_freq = nn.Buffer(inv_freq, persistent=False)
    module: nn.Module = fixed
    return module


def mark_long_positions(model: PreTrainedModel) -> None:
    """Make a model of ``rope_type`` longrope use `LongRope`; leave other models alone."""
    body: Any = model.base_model
    rope = getattr(body, "rotary_emb", None)
    if getattr(rope, "rope_type", None) == "longrope":
        body.rotary_emb = LongRope(rope)


def position_mark(body: nn.Module, max_read: int) -> int:
    """The number to add to every position id of a sequence: 0, or `LONG` (LongRoPE only).

    ``body`` is a model's ``base_model``, after `mark_long_positions`. ``max_read``, the most tokens
    of the sequence that the model may ever read, decides alone: if the answer may exceed the limit,
    its prompt is read with the long frequencies, too.
    """
    rope = getattr(body, "rotary_emb", None)
    return LONG if isinstance(rope, LongRope) and max_read > rope.limit else 0
