"""Norms and rotary embeddings as one operation each, where transformers has eight and more.

A decode step is bound by the number of its kernels as much as by what they read, and a prompt's
passes over all of its tokens cost a tenth of it on CPU. `use_fused_layers` puts these in a model's
place; without kernels, and where gradients are wanted, they are computed as before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from razor_dist.kernels.compiled import operations
from razor_dist.kernels.decode import available

# transformers' signature: (q [1, H, T, D], k, cos [1, T, R], sin) to q and k, rotated.
Rotary = Callable[..., tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x²) + eps)`` over the last dimension, rounded once."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first R dimensions, rounded once; the definition.

    ``q`` is ``[1, H, T, D]``, ``k`` ``[1, K, T, D]``; of ``cos`` and ``sin`` ``[1, T, R]`` the
    first half is read. Pairs are neighbours if ``interleaved``, else dimensions i and i + R/2.
    """

    def turned(x: Tensor) -> Tensor:
        width = cos.shape[-1]
        part, rest = x[..., :width].float(), x[..., width:]
        c, s = (table[:, None, :, : width // 2].float() for table in (cos, sin))
        pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).mT
        a, b = pairs.unbind(-1)
        both = torch.stack([a * c - b * s, b * c + a * s], -1)
        found = both.flatten(-2) if interleaved else both.mT.flatten(-2)
        return torch.cat([found.to(x.dtype), rest], -1)

    return turned(q), turned(k)


def use_fused_layers(model: nn.Module) -> None:
    """Have a model's RMSNorms and rotary embeddings computed by one operation each.

    A layer is replaced only if it computes what its replacement does, which is tried on random
    numbers. transformers' function for rotary embeddings is its module's, so that it is replaced
    for all models of the family in this process.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm") and _is_rms_norm(module):
            module.__class__ = _fused_norm(kind)
        if kind.__name__.endswith("Attention"):
            namespace: Any = sys.modules[kind.__module__]
            original = getattr(namespace, "apply_rotary_pos_emb", None)
            if original is not None and not hasattr(original, "original"):
                interleaved = _interleaved(original)
                if interleaved is not None:
                    namespace.apply_rotary_pos_emb = _fused_rotary(original, interleaved)


def _served(*tensors: Tensor) -> bool:
    """Tell if there is an operation for these tensors."""
    x = tensors[0]
    if x.device.type != "cpu":
        return available(x.device)
    if not torch.is_inference_mode_enabled() or operations() is None:
        return False
    return {tensor.dtype for tensor in tensors} == {torch.float32}


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        on_cpu: tuple[Tensor, Tensor] = operations().rotate(q, k, cos, sin, interleaved)
        return on_cpu
    kernels = importlib.import_module("razor_dist.kernels.rotary_triton")
    found: tuple[Tensor, Tensor] = kernels.rotate(q, k, cos, sin, interleaved)
    return found


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    found: Tensor = (
        operations().rms_norm(x, weight, eps)
        if x.device.type == "cpu"
        else rms_norm(x, weight, eps)
    )
    return found


def _is_rms_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not hasattr(module, "variance_epsilon") or weight is None or weight.dim() != 1:
        return False
    generator = torch.Generator(weight.device).manual_seed(0)
    of = {"dtype": weight.dtype, "device": weight.device, "generator": generator}
    x = torch.randn(2, len(weight), **of)
    with torch.no_grad():
        want, got = module(x), rms_norm(x, weight, module.variance_epsilon)
    return bool(torch.allclose(want.float(), got.float(), rtol=2e-2, atol=2e-2))


def _fused_norm(kind: type[nn.Module]) -> type[nn.Module]:
    if kind.__name__.startswith("Fused"):
        return kind

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if _served(hidden_states, self.weight):
            return _rms_norm(hidden_states, self.weight, self.variance_epsilon)
        found: Tensor = kind.forward(self, hidden_states)
        return found

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward})


def _interleaved(function: Rotary) -> bool | None:
    """Return the pairs that transformers' function rotates; None if it does something else."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 16, generator=generator) for heads in (4, 2))
    angles = torch.randn(1, 3, 8, generator=generator).repeat(1, 1, 2)
    for width in (16, 8):
        half = torch.cat([angles[..., : width // 2]] * 2, -1)
        tables = half.cos(), half.sin()
        try:
            want = function(q, k, *tables)
        except RuntimeError:
            continue  # it rotates all dimensions only
        for interleaved in (False, True):
            got = rotate(q, k, *tables, interleaved)
            if all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True)):
                return interleaved
    return None


def _fused_rotary(original: Rotary, interleaved: bool) -> Rotary:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        alone = len(q) == len(cos) == 1 and cos.shape[1] == q.shape[2]
        served = alone and _served(q, k, cos, sin)
        if not served or unsqueeze_dim != 1 or q.requires_grad:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return _rotate(q, k, cos, sin, interleaved)

    apply_rotary_pos_emb.original = original  # type: ignore[attr-defined]
    return apply_rotary_pos_emb
