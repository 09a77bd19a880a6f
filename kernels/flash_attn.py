"""The flash-attn package (CUDA, 16-bit), imported only when it is used."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from razor_dist.kernels.partial import Partial
from razor_dist.kernels.quantized import KeysOrValues, of_one_dtype
from razor_dist.kernels.torch_cuda import CUDNN_ON

log = logging.getLogger(__name__)


@functools.cache
def _installed() -> bool:
    # A package that was built for another torch is found but cannot be imported.
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        from flash_attn import flash_attn_func  # noqa: F401
    except ImportError as error:
        log.warning("flash-attn is installed and not used, for it cannot be imported: %s", error)
        return False
    return True


def supports(q: Tensor, k: KeysOrValues, v: KeysOrValues, causal: bool, biased: bool) -> bool:
    """16-bit CUDA tensors without a bias; not on Hopper, where torch_cuda takes cuDNN too."""
    return (
        not biased
        and q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= 256
        and torch.cuda.get_device_capability(q.device) != CUDNN_ON
        and of_one_dtype(q, k, v)
        and _installed()
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    """See `razor_dist.kernels.attend`; flash-attn's lse is a natural logarithm."""
    from flash_attn import flash_attn_func

    heads, group, queries, dim = q.shape
    # flash-attn's layout is [batch, tokens, heads, dim], grouped queries included.
    out, lse, _ = flash_attn_func(
        q.reshape(1, heads * group, queries, dim).transpose(1, 2),
        k.unsqueeze(0).transpose(1, 2),
        v.unsqueeze(0).transpose(1, 2),
        softmax_scale=scale,
        causal=causal,
        return_attn_probs=True,
    )
    out = out.transpose(1, 2).reshape(heads, group, queries, dim)
    return Partial(out, lse.reshape(heads, group, queries))
