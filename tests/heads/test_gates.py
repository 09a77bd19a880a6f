"""Gated attention against its definition, and its gradient against finite differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from razor_dist.identify.duo import attention
from razor_dist.identify.duo.attention import GateContext, gated_attention, streaming_attention
from razor_dist.models.loader import load_model
from tests.literal import causal, literal_attention
from tests.tiny_models import make_tiny

SCALE = 0.3


def _literal(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return literal_attention(q.unflatten(0, (len(k), -1)), k, v, visible, SCALE)[0].flatten(0, 1)


def _visible(tokens: int, sinks: int, recent: int) -> Tensor:
    """The definition, pair by pair."""
    return torch.tensor(
        [[s <= t and (s < sinks or t - recent < s) for s in range(tokens)] for t in range(tokens)]
    )


def _inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(heads, tokens, 8, generator=generator, dtype=dtype, requires_grad=True)
        for heads in (6, 2, 2)
    )
    return q, k, v


def _assert_alike(out: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """The same values and gradients."""
    torch.testing.assert_close(out, wanted)
    back = torch.randn_like(out)
    grads = (torch.autograd.grad(result, inputs, back) for result in (out, wanted))
    torch.testing.assert_close(*grads)


# One token; less than a block; block edges; more blocks, the last one whole or not.
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 192, 300])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (3, 5), (64, 64), (1, 65), (90, 20)])
def test_streaming_attention_is_the_masked_softmax(tokens: int, sinks: int, recent: int) -> None:
    inputs = _inputs(tokens)
    out = streaming_attention(*inputs, SCALE, sinks, recent)
    wanted = _literal(*inputs, _visible(tokens, sinks, recent))
    _assert_alike(out, wanted, inputs)


@pytest.mark.parametrize("grouped", [True, False])
def test_full_attention_and_its_gradients(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as it is on CUDA in float32, where no fused kernel takes grouped heads."""
    monkeypatch.setattr(attention, "_takes_groups", lambda q: grouped)
    inputs = _inputs(70)
    out = attention.full_attention(*inputs, SCALE)
    wanted = _literal(*inputs, causal(70))
    _assert_alike(out, wanted, inputs)


def test_gates_mix_full_and_streaming_attention() -> None:
    q, k, v = _inputs(200)
    out = gated_attention(q, k, v, SCALE, torch.tensor([1.0, 0.0]), 4, 16)
    full = _literal(q, k, v, causal(200))
    streaming = _literal(q, k, v, _visible(200, 4, 16))
    torch.testing.assert_close(out[:3], full[:3])
    torch.testing.assert_close(out[3:], streaming[3:])
    out = gated_attention(q, k, v, SCALE, torch.tensor([0.25, 0.5]), 4, 16)
    torch.testing.assert_close(out[:3], (0.25 * full + 0.75 * streaming)[:3])
    torch.testing.assert_close(out[3:], (0.5 * full + 0.5 * streaming)[3:])


def test_gradients_of_the_gates_are_finite_differences(tmp_path: Path) -> None:
    """Through a whole model: gates of low layers act through all layers above."""
    path = make_tiny("qwen2", tmp_path)
    model = load_model(path, device=torch.device("cpu"), dtype=torch.float32).double()
    ids = torch.randint(3, 190, (1, 150), generator=torch.Generator().manual_seed(0))
    direction = torch.randn(150, 64, generator=torch.Generator().manual_seed(1)).double()

    def value(gates: Tensor) -> Tensor:
        hidden = model.base_model(
            input_ids=ids,
            position_ids=torch.arange(150)[None],
            attention_context=GateContext(gates, sinks=2, recent=8),
        ).last_hidden_state
        return (hidden[0] * direction).sum()

    gates = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).reshape(3, 2).requires_grad_()
    [got] = torch.autograd.grad(value(gates), gates)
    step = 1e-3  # the gates are mixed in float32
    for layer in range(3):
        for head in range(2):
            with torch.no_grad():
                ends = []
                for sign in (1, -1):
                    moved = gates.clone()
                    moved[layer, head] += sign * step
                    ends.append(value(moved))
            wanted = (ends[0] - ends[1]) / (2 * step)
            torch.testing.assert_close(got[layer, head], wanted, rtol=1e-3, atol=1e-3)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple) else (result,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def test_no_attention_matrix_is_held() -> None:
    tokens = 4096
    q, k, v = _inputs(tokens, torch.float32)
    with Largest() as largest:
        gated_attention(q, k, v, SCALE, torch.full((2,), 0.5), 16, 64).sum().backward()
    # Keys of the blocks are the largest: (16 + 2 x 64) / 64 of all keys, and gradients alike.
    assert largest.elements <= 6 * tokens * 8
