"""Attention kernels: `attend` over a segment of keys, `merge` of partial results.

This is the one place where a backend is chosen.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from razor_dist.kernels import many_cpu
from razor_dist.kernels.partial import (
    HIDDEN,
    Partial,
    empty_partial,
    foldable,
    joined,
    merge,
    merge_stacked,
    over_keys,
)
from razor_dist.kernels.quantized import Codes, KeysOrValues, attend_codes
from razor_dist.kernels.torch_cuda import PLAN_KEYS

__all__ = [
    "BACKENDS",
    "HIDDEN",
    "Partial",
    "attend",
    "attend_windows",
    "compensate",
    "empty_partial",
    "joined",
    "merge",
    "merge_stacked",
    "takes_windows",
]

# Keys of a block that is converted to the queries' dtype: a shard of a long context that is
# converted whole would be in memory twice. On CUDA a block has the `PLAN_KEYS` that cuDNN takes.
_CONVERTED_KEYS = 4096

# In order of preference; each module is imported when it is first asked.
BACKENDS = ("many_cpu", "flash_attn", "torch_cuda", "torch_cpu", "meta", "reference")


@functools.cache
def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"razor_dist.kernels.{name}")


def attend(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
    backend: str | None = None,
) -> Partial:
    """Softmax attention of grouped queries over one segment of keys.

    ``q`` is ``[K, G, T, D]``, G query heads for each of K key-value heads; ``k`` and ``v`` are
    ``[K, S, D]``, of any dtype, or both `Codes`: if no backend reads them as they are, they are
    converted to the dtype of ``q`` block by block. ``out`` is in the dtype of ``q`` or float32.

    With ``causal``, query t sees keys 0..t; it requires ``T == S`` (else ValueError), so that no
    alignment convention matters. ``bias`` is float32 ``[S]``, ``[T, S]`` or ``[K, G, S]``, finite,
    added to ``scale * q . k``; `HIDDEN` hides a key. It may be rounded to the dtype of ``q``.
    ``backend`` is one of `BACKENDS` (else ValueError), or the first that supports the input.
    """
    if causal and q.shape[2] != k.shape[1]:
        raise ValueError(f"causal needs as many queries as keys, got {q.shape[2]} and {k.shape[1]}")
    if q.shape[2] == 0 or k.shape[1] == 0:
        # The fused ops report lse = 0, not -inf, for rows without keys.
        return empty_partial(q)
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    for module in map(_backend, BACKENDS if backend is None else [backend]):
        if backend is not None or module.supports(q, k, v, causal, bias is not None):
            return module.attend(q, k, v, scale, causal, bias)
    return _attend_converted(q, k, v, scale, causal, bias)


def takes_windows(q: Tensor, k: KeysOrValues) -> bool:
    """True if `attend_windows` computes these queries and keys; values have the keys' dtype."""
    return many_cpu.supports(q, k, k, True, False)


def attend_windows(
    q: Tensor, k: KeysOrValues, v: KeysOrValues, first: Tensor, *, scale: float
) -> Partial:
    """Causal attention of queries ``[K, G, T, D]`` to windows, where `takes_windows`.

    The queries are the last T of S tokens; query t sees the keys from ``first[t]`` to its
    own. ``first`` is int64 ``[T]`` and never decreases.
    """
    return many_cpu.attend(q, k, v, scale, True, first=first)


def _attend_converted(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    scale: float,
    causal: bool,
    bias: Tensor | None,
) -> Partial:
    """`attend` after converting keys and values block by block; codes stay transformed."""
    queries = k.transform(q) if isinstance(k, Codes) else q
    # Attention of a few queries is bound by memory: on CPU it reads the codes as they are.
    few = foldable(q, causal, bias) and q.device.type == "cpu" and q.dtype == torch.float32

    def converted(span: slice) -> Partial:
        part = None if bias is None else bias[..., span]
        of_k, of_v = k[:, span], v[:, span]
        if isinstance(of_k, Codes) and isinstance(of_v, Codes):
            if few:
                return attend_codes(queries, of_k, of_v, scale, part)
            of_k, of_v = of_k.scaled(), of_v.scaled()
        keys = of_k.to(q.dtype), of_v.to(q.dtype)
        return attend(queries, *keys, scale=scale, causal=causal, bias=part)

    # Causal attention has as many keys as queries, those of a chunk's shard: one block.
    block = PLAN_KEYS if q.device.type == "cuda" else _CONVERTED_KEYS
    found = over_keys(converted, k.shape[1], k.shape[1] if causal else block)
    return found._replace(out=v.transform(found.out)) if isinstance(v, Codes) else found


def compensate(
    q: Tensor, k_mean: Tensor, v_mean: Tensor, count: Tensor, *, scale: float
) -> Partial:
    """Attention to one compensation token: a segment of ``count`` identical keys.

    RazorAttention's equation 5: the token has weight ``count * exp(scale * q . k_mean)``, so its
    ``lse`` is ``scale * q . k_mean + log(count)`` and its ``out`` is ``v_mean``.

    ``q`` is ``[K, G, T, D]``; ``k_mean`` and ``v_mean``, float32 ``[K, T, D]``, are the means of
    the keys and values that were dropped for each query, ``count``, ``[T]``, their number; a query
    with a count of 0 sees nothing. With T = 1 in these three all queries share one token.
    """
    scores = torch.linalg.vecdot(q.float(), k_mean.unsqueeze(1)) * scale + count.log()
    return Partial(v_mean.unsqueeze(1).expand(*q.shape[:-1], v_mean.shape[-1]), scores)
