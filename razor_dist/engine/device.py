"""A rank's device, its dtypes and its ring attention."""

from __future__ import annotations

import logging
import time

import torch

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.speculative import SpeculativeConfig
from razor_dist.kernels.compiled import compile_ahead
from razor_dist.kernels.decode import available
from razor_dist.kernels.quantized import INT4, INT8
from razor_dist.models.loader import dtype_name
from razor_dist.parallel.ring import RingAttention, ring_attention
from razor_dist.parallel.ring_flash import load_zigzag, ring_flash_attention

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": INT8, "int4": INT4}


def prepare_device(config: EngineConfig) -> None:
    """Begin to compile what ranks on CPU will need, before they start.

    Ranks may be on other hosts with other devices, so this process's lack of a GPU is no error.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        compile_ahead()


def torch_device(config: EngineConfig, local_rank: int) -> torch.device:
    """The device of a rank; `ConfigError` if CUDA is asked for and not there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU; use cpu or auto")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def torch_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights and computation; `ConfigError` for bf16 on a GPU without it."""
    # Decode attention over bf16 runs about 5 times slower than fp32 on CPUs without bf16.
    if config.dtype == "fp32" or (config.dtype == "auto" and device.type == "cpu"):
        return torch.float32
    planned = device.type != "cuda" or device.index is None  # for a GPU that is not here
    if planned or torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    name = torch.cuda.get_device_name(device)
    if config.dtype == "bf16":
        raise ConfigError(
            f"dtype is bf16, for which {name} has no fused attention (Ampere, compute capability "
            "8.0, is the first that has); use fp32"
        )
    log.warning(
        "dtype is fp32, in twice the memory of bf16, for which %s has no fused attention", name
    )
    return torch.float32


def torch_kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values that are kept or travel; ``dtype`` is what is computed in."""
    return dtype if config.kv_dtype == "auto" else _DTYPES[config.kv_dtype]


def drafts_config(config: EngineConfig, device: torch.device) -> SpeculativeConfig | None:
    """Return the settings of drafts, or None; ``auto`` drafts on CPU, where it was measured."""
    if config.speculative_config != "auto":
        return config.speculative_config
    return SpeculativeConfig() if device.type == "cpu" else None


def kv_dtype_name(kv_dtype: torch.dtype) -> str:
    return "int4" if kv_dtype == INT4 else dtype_name(kv_dtype)


def warn_of_kv_dtype(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Say what a choice of dtypes costs that its user may not expect."""
    if device.type == "cpu" and kv_dtype == torch.bfloat16 and not available(device):
        log.warning(
            "keys and values are kept in bf16 on cpu: half the memory of fp32, but without "
            "compiled kernels decoding over a long context is slower; kv_dtype: fp32 is faster "
            "where it fits"
        )
    elif kv_dtype == torch.float32 != dtype:
        log.warning(
            "kv_dtype is fp32, but the model computes in bf16: its keys and values take twice "
            "the memory and are no more exact; kv_dtype: auto keeps them in bf16"
        )


def ring_of(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> RingAttention:
    """The ring that the settings name; `ConfigError` unless it can compute here in this dtype."""
    check_ring(config, device, dtype, kv_dtype)
    if config.ring == "own":
        return ring_attention
    load_zigzag()
    return ring_flash_attention


def check_ring(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Raise `ConfigError` unless the ring can compute on such a device in this dtype."""
    if config.ring == "own":
        return
    if device.type != "cuda" or dtype == torch.float32:
        raise ConfigError(
            "ring is ring_flash_attn, which computes in bf16 on cuda only; here it is "
            f"{dtype_name(dtype)} on {device.type}: use ring: own"
        )
    if kv_dtype != dtype:
        raise ConfigError(
            "ring is ring_flash_attn, whose keys and values have the dtype of the queries; set "
            "kv_dtype: auto, or use ring: own"
        )


def wait_for_device(device: torch.device, seconds: float) -> None:
    """Wait until a device has finished its queued work.

    `RuntimeError` after ``seconds``: collectives in a recorded step have no time-out of their own,
    and never end where another rank has stopped.
    """
    if device.type != "cuda":
        return
    done, deadline = torch.cuda.Event(), time.monotonic() + seconds
    done.record()
    while not done.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the device has not answered for {seconds:g} s")
        time.sleep(0)  # for the threads beside this one
