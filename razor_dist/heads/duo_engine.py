"""What DeepSpeed does for gate training: ranks, the engine of the gates, shards of the weights.

Everything that imports DeepSpeed is here, and imports it when it is called: it is the extra
``train``, and no other part of razor_dist needs it.

Two engines, because two things are sharded or not on their own account. The gates are thousands
of numbers, alike on every rank, with the optimiser of an ordinary (stage 0) engine; its gradients
are averaged over ranks. The frozen weights are, with ZeRO stage 3, parameters of an engine
without optimiser, which gathers each layer's weights when the layer runs, forward and backward.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from razor_dist.errors import ConfigError
from razor_dist.heads.gates import Attention


def import_deepspeed(device: torch.device | None = None) -> Any:
    """The module ``deepspeed``.

    Parameters
    ----------
    device : torch.device, optional
        Where it is to run, which it wants to know when it is first imported.

    Raises
    ------
    ConfigError
        If it is not installed; the message names the extra.
    """
    if device is not None:
        # Read when it is imported and when it makes an engine; no argument takes their place.
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("LOCAL_RANK", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
    except ImportError as error:
        raise ConfigError(
            "method duo trains with DeepSpeed, which is not installed: "
            f"pip install 'razor-dist[train]' ({error})"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def join_ranks(device: torch.device, timeout: float = 600.0) -> dist.ProcessGroup:
    """The group of all ranks: torchrun's, the one there is already, or this process alone.

    Parameters
    ----------
    device : torch.device
        NCCL on CUDA, else gloo.
    timeout : float
        Seconds after which a collective gives up.
    """
    deepspeed = import_deepspeed(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        limit = timedelta(seconds=timeout)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=limit)
        else:  # in memory: a process alone needs no port
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    # On CPU DeepSpeed would compile C++ collectives now: a minute in which a kill leaves a lock
    # that every later run waits for. gloo is fast enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    group = dist.group.WORLD
    assert group is not None
    return group


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
        """See `razor_dist.heads.gates.Spread`."""
        share = kv_heads // self._size
        return slice(self._rank * share, (self._rank + 1) * share)

    def __call__(self, attention: Attention, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor:
        """See `razor_dist.heads.gates.Spread`."""
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
            **_SILENT,
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


def shard_weights(body: nn.Module, device: torch.device) -> None:
    """Shard frozen weights over all ranks, in place: ZeRO stage 3.

    The module then gathers each layer's weights whenever the layer runs or is differentiated.

    Parameters
    ----------
    body : Module
        Weights of one dtype, on any device: they are moved one by one, so that the device never
        holds them all.
    device : torch.device
        Where this rank's shares, and what is no weight, go.
    """
    deepspeed = import_deepspeed()
    dtype = next(body.parameters()).dtype
    config = {
        **_SILENT,
        "zero_optimization": {
            "stage": 3,
            # Norms and biases stay whole: gathering each would cost more than it saves.
            "stage3_param_persistence_threshold": 10_000,
            # It would replace torch.nn.functional.linear for the whole process.
            "memory_efficient_linear": False,
        },
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    deepspeed.zero.Init(
        module=body, config_dict_or_path=config, dtype=dtype, mem_efficient_linear=False
    )
    for module in body.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    deepspeed.initialize(model=body, config=config)


_SILENT = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 2**31,
}
