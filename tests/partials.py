"""Inputs of attention, its results compared, and the operation that fused ones compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from razor_dist.kernels import Partial


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch compute by so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw(kv_heads: int, group: int, queries: int, keys: int, dim: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(kv_heads, group, queries, dim, generator=generator)
    k = torch.randn(kv_heads, keys, dim, generator=generator)
    v = torch.randn(kv_heads, keys, dim, generator=generator)
    return q, k, v


def assert_close(got: Partial, want: Partial, *, atol: float, rtol: float) -> None:
    torch.testing.assert_close(got.out.to(want.out.dtype), want.out, atol=atol, rtol=rtol)
    torch.testing.assert_close(got.lse.to(want.lse.dtype), want.lse, atol=atol, rtol=rtol)


def _plain_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over ``[batch, heads, ...]`` as the fused ops do it: lse is 0 for an empty row."""
    scores = scale * q.float() @ k.float().transpose(-1, -2)
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
    lse = scores.logsumexp(-1)
    return scores.softmax(-1).nan_to_num(0.0) @ v.float(), lse.masked_fill(lse == -math.inf, 0.0)


class CudaOps(TorchDispatchMode):
    """torch's attention ops for CUDA, by name, are these functions, which return out and lse."""

    def __init__(self, **ops: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        named = ((f"_scaled_dot_product_{name}_attention", op) for name, op in ops.items())
        self._ops = {getattr(torch.ops.aten, name).default: op for name, op in named}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (op := self._ops.get(func)) is None:
            return func(*args, **(kwargs or {}))
        found = op(*args, **kwargs)
        rest = (str(each.type) == "Tensor" for each in func._schema.returns[len(found) :])
        return *found, *(torch.empty(0) if tensor else 0 for tensor in rest)
