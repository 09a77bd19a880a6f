"""Fused operations between a layer's matrix products, each in place of several of transformers'.

A decode step takes as long for its number of kernels as for the bytes that they read; on CPU, such
operations are a tenth of a prompt's time. `use_fused_layers` makes a model compute its norms,
rotary embeddings, gated activations and residual sums by these:

- ``rms_norm(x, weight, eps)``
- ``add_rms_norm(x, residual, weight, eps)``: the norm of a sum, and the sum
- ``rotate(q, k, cos, sin, interleaved)``
- ``gated(gate, up)``: SwiGLU's ``silu(gate) * up``

Their definitions are here; `fused_triton` has them for CUDA, the compiled C++ for CPU. Without
kernels, and where gradients are wanted, a model computes as transformers does.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from razor_dist.kernels.compiled import operations
from razor_dist.kernels.decode import Rotation, available

# transformers' signature: (q [1, H, T, D], k, cos [1, T, R], sin) to q and k, rotated.
Rotary = Callable[..., tuple[Tensor, Tensor]]

# Up to this many tokens, a layer's sum waits for the next norm, and activations are gated by one
# operation. With more, what waits would take memory beside attention, and launches do not matter.
_FEW = 64


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x²) + eps)`` over the last dimension, rounded once."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm` of ``x + residual``, rounded to its dtype before, and that sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, rounded once; both ``[..., I]``."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first R dimensions, rounded once; the definition.

    ``q`` is ``[1, H, T, D]``, ``k`` ``[1, K, T, D]``; of ``cos`` and ``sin`` ``[1, T, R]`` the
    first half is read. Pairs are neighbours if ``interleaved``, else dimensions i and i + R/2.
    """

    half = cos.shape[-1] // 2
    tables = cos[..., :half], sin[..., :half]
    return turn(q, *tables, interleaved=interleaved), turn(k, *tables, interleaved=interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """`rotate` of one tensor ``[1, H, T, D]``; ``cos`` and ``sin`` are ``[1, T, R / 2]``."""
    width = 2 * cos.shape[-1]
    part, rest = x[..., :width].float(), x[..., width:]
    c, s = (table[:, None].float() for table in (cos, sin))
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).mT
    a, b = pairs.unbind(-1)
    both = torch.stack([a * c - b * s, b * c + a * s], -1)
    found = both.flatten(-2) if interleaved else both.mT.flatten(-2)
    return torch.cat([found.to(x.dtype), rest], -1)


class _Postponed(NamedTuple):
    q: Tensor
    k: Tensor
    rotation: Rotation


_POSTPONED: ContextVar[list[_Postponed] | None] = ContextVar("postponed", default=None)


@contextmanager
def postponed_rotations(yes: bool = True) -> Iterator[None]:
    """Leave rotary embeddings to attention, which takes them by `postponed_rotation`."""
    token = _POSTPONED.set([] if yes else None)
    try:
        yield
    finally:
        _POSTPONED.reset(token)


def postponed_rotation(q: Tensor, k: Tensor) -> Rotation | None:
    """Take the rotation that ``q`` and ``k`` still need before attention; None if there is none.

    Raise `NotImplementedError` if the model has changed them since its rotary embeddings.
    """
    waiting = _POSTPONED.get()
    if not waiting:
        return None
    last = waiting.pop()
    if waiting or last.q is not q or last.k is not k:
        raise NotImplementedError("queries or keys are changed after their rotary embeddings")
    return last.rotation


def use_fused_layers(model: nn.Module) -> None:
    """Make a model's layers compute by these operations.

    A part is replaced only if its replacement gives the same result on random numbers. The function
    for rotary embeddings belongs to transformers' module, so that it is replaced for all models of
    the family in this process.
    """
    model.eval()
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm") and _is_rms_norm(module):
            module.__class__ = _fused(kind, _norm_forward)
        if kind.__name__.endswith("MLP") and _is_gated(module):
            module.__class__ = _fused(kind, _mlp_forward)
        if kind.__name__.endswith("Attention"):
            namespace: Any = sys.modules[kind.__module__]
            original = getattr(namespace, "apply_rotary_pos_emb", None)
            if original is not None and not hasattr(original, "original"):
                interleaved = _interleaved(original)
                if interleaved is not None:
                    namespace.apply_rotary_pos_emb = _fused_rotary(original, interleaved)
    body = getattr(model, "base_model", model)
    layers = list(getattr(body, "layers", []))
    # The last layer's sum needs the model's own norm to add it up.
    if _is_fused(getattr(body, "norm", None)) and all(map(_adds_up, layers)):
        for layer in layers:
            layer.__class__ = _fused(type(layer), _layer_forward)


def _kernels(*tensors: Tensor) -> Any:
    """The module that has the operations for these tensors; None if transformers' own are used."""
    x = tensors[0]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if x.device.type != "cpu":
        name = "razor_dist.kernels.fused_triton"
        return importlib.import_module(name) if available(x.device) else None
    of_float32 = {tensor.dtype for tensor in tensors} == {torch.float32}
    return operations() if of_float32 and torch.is_inference_mode_enabled() else None


class Sum(NamedTuple):
    """A layer's output before its last sum, which the next norm computes.

    It is a tuple because DeepSpeed's hooks around layers look for tensors there.
    """

    residual: Tensor
    part: Tensor


def _normed(norm: Any, x: Tensor | Sum) -> tuple[Tensor, Tensor]:
    """Return a fused norm's output, and its input as one tensor."""
    if isinstance(x, Tensor):
        return norm(x), x
    of = x.part, x.residual, norm.weight
    kernels = _kernels(*of)
    if kernels is None:
        total = x.residual + x.part
        return norm(total), total
    found: tuple[Tensor, Tensor] = kernels.add_rms_norm(*of, norm.variance_epsilon)
    return found


def _norm_forward(kind: Any, self: Any, hidden_states: Tensor | Sum) -> Tensor:
    if isinstance(hidden_states, Sum):
        return _normed(self, hidden_states)[0]
    kernels = _kernels(hidden_states, self.weight)
    if kernels is None:
        found: Tensor = kind.forward(self, hidden_states)
    else:
        found = kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon)
    return found


def _mlp_forward(kind: Any, self: Any, hidden_states: Tensor) -> Tensor:
    if torch.is_grad_enabled() or hidden_states.shape[-2] > _FEW:
        plain: Tensor = kind.forward(self, hidden_states)
        return plain
    if hasattr(self, "gate_up_proj"):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, -1)
    else:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
    kernels = _kernels(gate, up)
    inner = functional.silu(gate) * up if kernels is None else kernels.gated(gate, up)
    found: Tensor = self.down_proj(inner)
    return found


def _layer_forward(kind: Any, self: Any, hidden_states: Tensor | Sum, **given: Any) -> Any:
    x = hidden_states if isinstance(hidden_states, Tensor) else hidden_states.part
    if torch.is_grad_enabled() or x.shape[-2] > _FEW:
        return kind.forward(self, hidden_states, **given)
    normed, residual = _normed(self.input_layernorm, hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **given)
    normed, residual = _normed(self.post_attention_layernorm, Sum(residual, attended))
    return Sum(residual, self.mlp(normed))


def _fused(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of ``kind`` with ``forward(kind, self, ...)``; ``kind`` if it is one already."""
    if kind.__name__.startswith("Fused"):
        return kind

    def fused_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(kind, self, *args, **kwargs)

    own = {"forward": fused_forward, "__module__": kind.__module__}
    return type(f"Fused{kind.__name__}", (kind,), own)


def _is_fused(module: Any) -> bool:
    return type(module).__name__.startswith("Fused")


def _random(weight: Tensor) -> Tensor:
    """Random hidden states of two tokens, ``[1, 2, len(weight)]``."""
    x = torch.randn(1, 2, len(weight), generator=torch.Generator().manual_seed(0))
    return x.to(weight)


def _gives(trial: Callable[[], Any], got: Tensor) -> bool:
    """True if ``trial``, transformers' own layer, gives ``got`` within 2e-2; False if it raises."""
    try:
        want = trial()
    except Exception:  # of whatever kind: BitNet's MLP norms by a weight of another size
        return False
    same = isinstance(want, Tensor) and want.shape == got.shape
    return same and torch.allclose(want.float(), got.float(), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def _is_rms_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not hasattr(module, "variance_epsilon") or weight is None or weight.dim() != 1:
        return False
    x = _random(weight)
    return _gives(lambda: module(x), rms_norm(x, weight, module.variance_epsilon))


def _with(module: nn.Module, parts: dict[str, Any]) -> Any:
    """A copy of a module in which ``parts`` stand in for submodules, to see how they are used."""
    changed = copy.copy(module)
    changed.__dict__["_modules"] = {**module._modules, **parts}
    return changed


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """True if an MLP is ``down(silu(gate) * up)``, with gate and up in one matrix or two."""
    if not hasattr(module, "down_proj") or _is_fused(module):
        return False
    gate, up = torch.randn(2, 1, 2, 16, generator=torch.Generator().manual_seed(0))
    both = torch.cat([gate, up], -1)
    parts = {
        "gate_proj": lambda x: gate,
        "up_proj": lambda x: up,
        "gate_up_proj": lambda x: both,
        "down_proj": lambda x: x,
    }
    if not any(hasattr(module, name) for name in ("gate_up_proj", "gate_proj")):
        return False
    return _gives(lambda: _with(module, parts).forward(gate), gated(gate, up))


@torch.no_grad()
def _adds_up(layer: Any) -> bool:
    """True if a layer is ``h + mlp(norm(h))``, where ``h = x + attention(norm(x))``."""
    norms = [getattr(layer, f"{name}_layernorm", None) for name in ("input", "post_attention")]
    if not all(map(_is_fused, norms)) or not hasattr(layer, "mlp"):
        return False
    parts = {
        "self_attn": lambda hidden_states, **_: (hidden_states * 0.5, None),
        "mlp": lambda hidden_states: hidden_states * 0.75,
    }
    tried, x = _with(layer, parts), _random(layer.input_layernorm.weight)
    found = _layer_forward(None, tried, x)
    return _gives(lambda: tried.forward(x), found.residual + found.part)


def _interleaved(function: Rotary) -> bool | None:
    """The `rotate` that transformers' function equals, by ``interleaved``; None if neither."""
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
        kernels = _kernels(q, k, cos, sin)
        if unsqueeze_dim != 1 or not alone or kernels is None:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        waiting = _POSTPONED.get()
        if waiting is not None:
            waiting.append(_Postponed(q, k, Rotation(cos, sin, interleaved)))
            return q, k
        found: tuple[Tensor, Tensor] = kernels.rotate(q, k, cos, sin, interleaved)
        return found

    apply_rotary_pos_emb.original = original  # type: ignore[attr-defined]
    return apply_rotary_pos_emb
