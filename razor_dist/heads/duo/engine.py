"""What DeepSpeed does for gate training alone: the engine of the gates, and Ulysses' exchanges.

Two engines, because two things are sharded or not on their own account. The gates are thousands
of numbers, alike on every rank, with the optimiser of an ordinary (stage 0) engine; its gradients
are averaged over ranks. The frozen weights are, with ZeRO stage 3, parameters of an engine
without optimiser (`razor_dist.parallel.zero`), which gathers each layer's weights when the layer
runs, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from razor_dist.config.errors import ConfigError
from razor_dist.heads.duo.gates import Attention
from razor_dist.parallel.zero import COMMON, import_deepspeed


class Ulysses:
    """DeepSpeed-Ulysses: a rank holds a part of the sequence, and attends for a part of the heads.

    An all-to-all before attention gives each rank the whole sequence for its share of KV heads
    and of their groups, one after it gives the tokens back.

    Parameters
    ----------
    group : ProcessGroup
        Of the ranks; rank r holds the r-th of equal parts.
    kv_heads : int
        Of a layer.

    Raises
    ------
    ConfigError
        If the KV heads cannot be shared out evenly.
    """

    def __init__(self, group: dist.ProcessGroup, kv_heads: int) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        if kv_heads % self._size:
            fit = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
            raise ConfigError(
                f"the model's {kv_heads} KV heads cannot be shared out evenly over {self._size} "
                f"ranks; sequence-parallel training needs {fit} ranks"
            )
        import_deepspeed()
        from deepspeed.sequence.layer import DistributedAttention

        self._distributed = DistributedAttention(_Local(), group, scatter_idx=2, gather_idx=1)

    def heads(self, kv_heads: int) -> slice:
        """See `razor_dist.heads.duo.gates.Spread`."""
        share = kv_heads // self._size
        return slice(self._rank * share, (self._rank + 1) * share)

    def __call__(self, attention: Attention, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor:
        """See `razor_dist.heads.duo.gates.Spread`."""
        parts = (x.transpose(0, 1)[None] for x in (q_HTD, k_KTD, v_KTD))  # [1, T, heads, D]
        out_1THD = self._distributed(*parts, 0, None, attention)
        out: Tensor = out_1THD[0].transpose(0, 1)
        return out


class _Local(nn.Module):
    """What `DistributedAttention` calls between its two exchanges."""

    def forward(
        self, q_1NHD: Tensor, k_1NKD: Tensor, v_1NKD: Tensor, attention: Attention
    ) -> Tensor:
        out_HND = attention(*(x[0].transpose(0, 1) for x in (q_1NHD, k_1NKD, v_1NKD)))
        return out_HND.transpose(0, 1)[None].contiguous()


def gate_engine(
    module: nn.Module, rate: float, schedule: Callable[[int], float]
) -> tuple[Any, torch.optim.Optimizer]:
    """DeepSpeed's engine for a module that has the gates for parameters, and its optimiser.

    Parameters
    ----------
    module : Module
        Its forward returns the loss.
    rate : float
        Learning rate.
    schedule : callable
        From a step, counted from 0, to the factor of the learning rate. An argument beside
        DeepSpeed's configuration, none of whose own schedules rises, stays and falls.
    """

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    engine, optimizer, _, _ = import_deepspeed().initialize(
        model=module,
        model_parameters=list(module.parameters()),
        lr_scheduler=scheduler,
        config={
            **COMMON,
            "optimizer": {
                "type": "AdamW",
                # No weight decay: what draws gates to 0 is the loss. torch's own AdamW, since
                # DeepSpeed's is compiled on first use.
                "params": {"lr": rate, "weight_decay": 0.0, "torch_adam": True},
            },
            "zero_optimization": {"stage": 0},
        },
    )
    return engine, optimizer
