"""DuoAttention's gated attention: differentiable in the gates, linear where it streams.

For the j-th KV head of layer i and the query heads of its group (papers/duoattention.txt, 2.2)::

    attn_ij = alpha_ij * full_attn + (1 - alpha_ij) * streaming_attn

where full attention is causal, and streaming attention of the query at position t sees the keys s
with ``s < sinks`` or ``t - recent < s <= t``: the first tokens, and the most recent ones with
itself among them.

**Memory.** Neither branch holds a matrix of all queries by all keys, forward or backward. Full
attention is torch's fused kernel. Streaming attention cuts the queries into blocks of at least
`recent`; a block needs the sinks, its own keys and those of the block before, so N tokens cost
N (sinks + 2 block) weights. The paper takes such blocks for an approximation (appendix A.1,
Figure 14); here a mask within each block makes it exact. Gradients flow to the gates, and through
queries, keys and values to the gates of the layers below.

Letters: H query heads, K key-value heads, G = H / K, T tokens, D head dimension, B block, n blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from razor_dist.config.errors import ConfigError
from razor_dist.kernels.query import Query
from razor_dist.parallel.zero import import_deepspeed

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From ``q_HTD``, ``k_KTD`` and ``v_KTD`` of some heads and the whole sequence to ``[H, T, D]``."""

_ALIGNMENT = 64  # of masks' rows, which fused kernels require


def full_attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scale: float) -> Tensor:
    if not _takes_groups(q_HTD):
        # `enable_gqa` would hold a matrix of queries by keys. In a batch of groups, all heads of a
        # group have the same memory for keys.
        q_KGTD = q_HTD.unflatten(0, (k_KTD.shape[0], -1))
        k_KGTD, v_KGTD = (x[:, None].expand(*q_KGTD.shape[:3], -1) for x in (k_KTD, v_KTD))
        return scaled_dot_product_attention(
            q_KGTD, k_KGTD, v_KGTD, is_causal=True, scale=scale
        ).flatten(0, 1)
    return scaled_dot_product_attention(
        q_HTD[None], k_KTD[None], v_KTD[None], is_causal=True, scale=scale, enable_gqa=True
    )[0]


def _takes_groups(q: Tensor) -> bool:
    """True if a fused kernel takes grouped queries; on CUDA none does in float32."""
    return q.device.type != "cuda" or q.dtype != torch.float32


def streaming_attention(
    q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scale: float, sinks: int, recent: int
) -> Tensor:
    """Attend exactly to the first ``sinks`` and the last ``recent`` (1 or more), ``[H, T, D]``."""
    q_KGTD = q_HTD.unflatten(0, (k_KTD.shape[0], -1))
    tokens = q_HTD.shape[1]
    block = -(-recent // _ALIGNMENT) * _ALIGNMENT
    # From here on no sink is among a query's recent tokens, so that one mask fits all blocks.
    start = block * -(-(sinks + recent) // block)

    # The first queries, at most `start` of them, have one small mask.
    t = torch.arange(min(start, tokens), device=k_KTD.device)
    distance = t[:, None] - t
    visible = (distance >= 0) & ((distance < recent) | (t < sinks))
    q, k, v = (x[None, ..., :start, :] for x in (q_KGTD, k_KTD, v_KTD))
    out_KGTD = _grouped(q, k, v, visible, scale)[0]
    if tokens <= start:
        return out_KGTD.flatten(0, 1)

    # The others come in blocks with the same mask, the last one padded: the added keys come after
    # all queries, so that none sees them.
    blocks = -(-(tokens - start) // block)
    extra = start + blocks * block - tokens
    q_KGnBD = pad(q_KGTD[:, :, start:], (0, 0, 0, extra)).unflatten(2, (blocks, block))

    def keys_of_blocks(x_KTD: Tensor) -> Tensor:
        near_KnDW = pad(x_KTD[:, start - block :], (0, 0, 0, extra)).unfold(1, 2 * block, block)
        sinks_nKSD = x_KTD[None, :, :sinks].expand(blocks, -1, -1, -1)
        return torch.cat([sinks_nKSD, near_KnDW.permute(1, 0, 3, 2)], 2)

    row = torch.arange(block, device=k_KTD.device)[:, None]
    distance = row + block - torch.arange(2 * block, device=k_KTD.device)
    near = (distance >= 0) & (distance < recent)
    visible = torch.cat([near.new_ones(block, sinks), near], 1)
    keys, values = keys_of_blocks(k_KTD), keys_of_blocks(v_KTD)
    rest_nKGBD = _grouped(q_KGnBD.movedim(2, 0), keys, values, visible, scale)
    rest_KGTD = rest_nKGBD.movedim(0, 2).flatten(2, 3)[:, :, : tokens - start]
    return torch.cat([out_KGTD, rest_KGTD], 2).flatten(0, 1)


def _grouped(
    q_nKGTD: Tensor, k_nKSD: Tensor, v_nKSD: Tensor, visible_TS: Tensor, scale: float
) -> Tensor:
    """Attend with a mask; a group's queries become rows, so that keys are not repeated."""
    group = q_nKGTD.shape[2]
    out = scaled_dot_product_attention(
        q_nKGTD.flatten(2, 3), k_nKSD, v_nKSD, attn_mask=visible_TS.repeat(group, 1), scale=scale
    )
    return out.unflatten(2, (group, -1))


def gated_attention(
    q_HTD: Tensor,
    k_KTD: Tensor,
    v_KTD: Tensor,
    scale: float,
    gates_K: Tensor,
    sinks: int,
    recent: int,
) -> Tensor:
    """Mix both by ``gates_K``, alpha of each KV head, in float32; ``[H, T, D]`` as ``q_HTD``."""
    full = full_attention(q_HTD, k_KTD, v_KTD, scale)
    streaming = streaming_attention(q_HTD, k_KTD, v_KTD, scale, sinks, recent)
    alpha = gates_K.float().repeat_interleave(q_HTD.shape[0] // k_KTD.shape[0])[:, None, None]
    return (alpha * full + (1 - alpha) * streaming).to(q_HTD.dtype)


class Ulysses:
    """DeepSpeed-Ulysses: a rank holds a part of the sequence, and attends for a part of the heads.

    An all-to-all before attention gives each rank the whole sequence for its share of the KV heads
    and their groups; one after attention returns the tokens. Rank r of the group holds the r-th of
    equal parts. Raise `ConfigError` if a layer's KV heads cannot be shared evenly.
    """

    def __init__(self, group: dist.ProcessGroup, kv_heads: int) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if kv_heads % size:
            fit = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
            raise ConfigError(
                f"the model's {kv_heads} KV heads cannot be shared out evenly over {size} "
                f"ranks; sequence-parallel training needs {fit} ranks"
            )
        import_deepspeed()
        from deepspeed.sequence.layer import DistributedAttention

        share = kv_heads // size
        self.heads = slice(rank * share, (rank + 1) * share)
        self._distributed = DistributedAttention(_Local(), group, scatter_idx=2, gather_idx=1)

    def __call__(self, attention: Attention, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor:
        """Attend for this rank's tokens in all heads; each rank computes its `heads`."""
        parts = (x.transpose(0, 1)[None] for x in (q_HTD, k_KTD, v_KTD))  # [1, T, heads, D]
        out_1THD: Tensor = self._distributed(*parts, 0, None, attention)
        return out_1THD[0].transpose(0, 1)


class _Local(nn.Module):
    """The attention that `DistributedAttention` calls between its two exchanges."""

    def forward(
        self, q_1NHD: Tensor, k_1NKD: Tensor, v_1NKD: Tensor, attention: Attention
    ) -> Tensor:
        out_HND = attention(*(x[0].transpose(0, 1) for x in (q_1NHD, k_1NKD, v_1NKD)))
        return out_HND.transpose(0, 1)[None].contiguous()


@dataclass(frozen=True)
class GateContext:
    """An `AttentionContext` (`razor_dist.models.bridge`) of gated or full attention."""

    gates: Tensor | None  # float32 [layers, K], in [0, 1]; None for full attention, the target
    sinks: int
    recent: int
    ulysses: Ulysses | None = None  # for ranks that each hold a part of the sequence

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        q, scale = query.q.flatten(0, 1), query.scale
        mine = slice(None) if self.ulysses is None else self.ulysses.heads

        def attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor:
            if self.gates is None:
                return full_attention(q_HTD, k_KTD, v_KTD, scale)
            gates_K = self.gates[layer, mine]
            return gated_attention(q_HTD, k_KTD, v_KTD, scale, gates_K, self.sinks, self.recent)

        out = attention(q, k, v) if self.ulysses is None else self.ulysses(attention, q, k, v)
        return out.transpose(0, 1)
