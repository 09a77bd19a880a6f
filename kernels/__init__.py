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

# Keys of another dtype than the queries are converted in blocks of this many: otherwise a shard of
# a long context would be in memory twice. On CUDA they are as many as cuDNN is given.
_CONVERTED_KEYS = 4096

# In order of preference; each module is imported when it is first asked.
BACKENDS = ("flash_attn", "torch_cuda", "many_cpu", "torch_cpu", "meta", "reference")


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
    ``[K, S, D]``. Those of another dtype than ``q``, or both `Codes`, are read in blocks that are
    converted to it, where an op wants one dtype. ``out`` is in the dtype of ``q`` or float32.

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
    many = many_cpu.supports(q, causal, bias) and many_cpu.reads(k) and many_cpu.reads(v)
    if backend is None and many:
        return many_cpu.attend(q, k, v, scale, causal)
    if isinstance(k, Codes) or isinstance(v, Codes) or k.dtype != q.dtype:
        return _attend_converted(q, k, v, scale, causal, bias, backend)
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
        return _backend(backend).attend(q, k, v, scale, causal, bias)
    for name in BACKENDS:
        module = _backend(name)
        if module is not many_cpu and module.supports(q, causal, bias):
            return module.attend(q, k, v, scale, causal, bias)
    raise AssertionError("the reference backend supports every input")


def takes_windows(q: Tensor, k: KeysOrValues) -> bool:
    """Tell if `attend_windows` computes this; values are as keys."""
    return many_cpu.supports(q, True, None) and many_cpu.reads(k)


def attend_windows(
    q: Tensor, k: KeysOrValues, v: KeysOrValues, first: Tensor, *, scale: float
) -> Partial:
    """Causal attention of queries ``[K, G, T, D]`` to windows, where `takes_windows`.

    The queries are those of the last T of S keys; query t sees the keys from ``first[t]`` to its
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
    backend: str | None,
) -> Partial:
    """`attend` of keys and values that are converted block by block; codes stay transformed."""
    queries = k.transform(q) if isinstance(k, Codes) else q
    # Bound by memory, these are read as they are.
    few = foldable(q, causal, bias) and backend is None
    few &= q.device.type == "cpu" and q.dtype == torch.float32

    def converted(span: slice) -> Partial:
        part = None if bias is None else bias[..., span]
        of_k, of_v = k[:, span], v[:, span]
        if isinstance(of_k, Codes) and isinstance(of_v, Codes):
            if few:
                return attend_codes(queries, of_k, of_v, scale, part)
            of_k, of_v = of_k.scaled(), of_v.scaled()
        keys = of_k.to(q.dtype), of_v.to(q.dtype)
        return attend(queries, *keys, scale=scale, causal=causal, bias=part, backend=backend)

    # Causal attention is over as many keys as queries: a shard of a chunk, and short.
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
    the keys and values that were dropped for each query, and ``count``, ``[T]``, is how many they
    were; a query with a count of 0 sees nothing. All queries may share one: T is 1 then.
    """
    scores = torch.linalg.vecdot(q.float(), k_mean.unsqueeze(1)) * scale + count.log()
    return Partial(v_mean.unsqueeze(1).expand(*q.shape[:-1], v_mean.shape[-1]), scores)
