"""Weights sharded over the ranks: DeepSpeed's ZeRO stage 3.

All uses of DeepSpeed, which the extras ``zero3`` and ``train`` bring, share this module. It imports
DeepSpeed only inside functions.

A rank keeps 1/P of each weight. Before a decoder layer runs, its weights are gathered from all
ranks; when it has run, they are freed. So every rank must run the same layers equally often, which
the engine does: a rank without tokens of a chunk runs one dummy token.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from razor_dist.config.errors import ConfigError
from razor_dist.config.extras import install_command

# The settings that DeepSpeed requires of every engine, and no reports.
COMMON = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 2**31,
}


def name_accelerator(device: torch.device | None = None) -> None:
    """Set ``DS_ACCELERATOR``, unless it is set: without it DeepSpeed guesses, and prints its guess.

    DeepSpeed reads it when it is imported, by accelerate as well, and when it makes an engine.
    """
    kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.setdefault("DS_ACCELERATOR", kind)


def require_deepspeed(use: str, extra: str) -> None:
    """Raise `ConfigError` if DeepSpeed is not installed, without its import, which is slow.

    ``use`` and ``extra`` are as in `import_deepspeed`.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"{use} DeepSpeed, which is not installed: {install_command(extra)}")


def import_deepspeed(
    device: torch.device | None = None,
    *,
    use: str = "training on several ranks or with --zero-stage 3 needs",
    extra: str = "train",
) -> Any:
    """The module ``deepspeed``, set up for a ``device``; `ConfigError` if it is not installed.

    ``use`` and ``extra`` are for the message: the purpose, and the extra that brings the package.
    """
    name_accelerator(device)
    # DeepSpeed takes LOCAL_RANK for the GPU's index among those that the rank sees. It is not its
    # place on the node if each rank sees only its own.
    if device is not None and device.type == "cuda" and device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"{use} DeepSpeed, which is not installed: {install_command(extra)} ({error})"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed gathers by a function that torch has renamed.
    warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)
    return deepspeed


def join_ranks(device: torch.device, timeout: float = 600.0) -> dist.ProcessGroup:
    """The group of all ranks: torchrun's, the one there is already, or this process alone.

    It is NCCL's on CUDA, else gloo's; a collective gives up after ``timeout`` seconds.
    """
    deepspeed = import_deepspeed(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        limit = timedelta(seconds=timeout)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(backend, timeout=limit)
        else:  # a process alone needs no port
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    # On CPU DeepSpeed would compile C++ collectives now: a minute in which a kill leaves a lock
    # that every later run waits for. gloo is fast enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    group = dist.group.WORLD
    assert group is not None
    return group


class ShardedWeights:
    """Replaces a module's frozen weights by this rank's shares of them; `join_ranks` comes first.

    No rank waits here for another, and none reads more of mapped files than its share, unless the
    dtype changes: then one weight at a time is read whole. The module works again after
    `gather_when_run`.

    Parameters
    ----------
    body : Module
        Its weights are on the CPU and equal on all ranks, at best views of mapped files, which
        experts of a mixture are not (`load_model`).
    device : device
        Where weights are gathered, and where buffers and this rank's shares are kept.
    dtype : dtype, optional
        Of the shares, by default the weights'.
    offload : bool
        Keep the shares in CPU memory instead.
    group : ProcessGroup, optional
        The ranks that share the weights, by default all.
    together : collection of types
        Modules whose weights are gathered at once: the decoder layers.
    """

    def __init__(
        self,
        body: nn.Module,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        offload: bool = False,
        group: dist.ProcessGroup | None = None,
        together: Collection[type[nn.Module]] = (),
    ) -> None:
        self._body, self._device, self._offload, self._together = body, device, offload, together
        self._dtype = to = dtype or next(body.parameters()).dtype
        deepspeed = import_deepspeed(device)

        class Shares(deepspeed.zero.Init):  # type: ignore[name-defined]
            """`Init` without the broadcast of rank 0's weights: every rank has the same files."""

            def _convert_to_zero_parameters(self, param_list: Sequence[Any]) -> None:
                for param in param_list:
                    param.data = param.data.to(to)
                    self._convert_to_deepspeed_param(param)
                    param.partition()
                    # DeepSpeed gathers to the device of the parameter's data.
                    param.data = torch.empty(0, dtype=to, device=device)

        Shares(
            module=body,
            data_parallel_group=group or dist.group.WORLD,
            config_dict_or_path=self._config(prefetch=0),
            dtype=to,
        )
        for module in body.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    def gather_when_run(self, note: Callable[[int], None] | None = None) -> None:
        """Gather each layer's weights when it runs, and free them when it has run.

        All ranks must call this together, and then run the module equally often. ``note`` is called
        with the bytes that this rank sends in each all-gather.
        """
        deepspeed = import_deepspeed(self._device)
        if self._together:
            deepspeed.utils.set_z3_leaf_modules(self._body, list(self._together))
        prefetch = 0
        # A GPU computes one layer while the next is gathered; a CPU would gain nothing by that.
        if self._device.type == "cuda":
            layers: list[Any] = [m for m in self._body.modules() if type(m) in self._together]
            sizes: list[int] = [sum(p.ds_numel for p in m.parameters()) for m in layers]
            prefetch = max(sizes, default=50_000_000)  # DeepSpeed's own default
        deepspeed.initialize(model=self._body, config=self._config(prefetch))
        if note is not None:
            for param in self._body.parameters():
                _count_gathers(param, note)

    def _config(self, prefetch: int) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": 3,
            # Norms and biases stay whole: gathering each would cost more than it saves.
            "stage3_param_persistence_threshold": 10_000,
            # A weight that two modules share is gathered for each, not kept between them.
            "stage3_max_reuse_distance": 0,
            # Weight by weight: all at once, a layer would lie in memory twice.
            "stage3_allgather_sequential": True,
            "stage3_prefetch_bucket_size": prefetch,
            # It would replace torch.nn.functional.linear for the whole process.
            "memory_efficient_linear": False,
        }
        if self._offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
        bf16 = {"enabled": self._dtype == torch.bfloat16}
        return {**COMMON, "zero_optimization": zero, "bf16": bf16}


def _count_gathers(param: Any, note: Callable[[int], None]) -> None:
    """Call ``note`` with the bytes sent whenever DeepSpeed gathers this weight."""
    gather = param.all_gather_coalesced

    def counted(params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for p in params:
            note((p.ds_zero_partition_world_size - 1) * p.ds_tensor.nbytes)
        return gather(params, *args, **kwargs)

    param.all_gather_coalesced = counted
