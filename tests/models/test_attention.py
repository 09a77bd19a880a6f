"""The bridge from transformers: what it hands on, and what it refuses to compute wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from razor_dist.config.errors import ModelError
from razor_dist.engine.build import check_model
from razor_dist.kernels.query import Query
from razor_dist.models.bridge import NAME
from razor_dist.models.loader import load_model
from tests.tiny_models import Tiny

HEADS, KV_HEADS, TOKENS, WIDTH = 4, 2, 5, 8


class Recorder:
    """A context that notes what it is asked and answers with zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, torch.Size, torch.Size, float]] = []

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        q = query.q.flatten(0, 1)
        self.calls.append((layer, q.shape, k.shape, query.scale))
        return q.new_zeros(q.shape[1], q.shape[0], v.shape[2])


class Layer(nn.Module):
    """All that the bridge looks at in a model's attention."""

    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx, self.is_causal = 3, is_causal


def call(
    layer: nn.Module | None = None,
    *,
    key_width: int = WIDTH,
    value_width: int = WIDTH,
    key_tokens: int = TOKENS,
    mask: Tensor | None = None,
    **given: Any,
) -> Recorder:
    """Call the bridge as a model's layer does."""
    recorder = Recorder()
    out, weights = ALL_ATTENTION_FUNCTIONS[NAME](
        layer or Layer(),
        torch.zeros(1, HEADS, TOKENS, WIDTH),
        torch.zeros(1, KV_HEADS, key_tokens, key_width),
        torch.zeros(1, KV_HEADS, key_tokens, value_width),
        mask,
        attention_context=recorder,
        **given,
    )
    assert out.shape == (1, TOKENS, HEADS, value_width)
    assert weights is None
    return recorder


def test_a_layer_is_handed_on() -> None:
    shapes = ((HEADS, TOKENS, WIDTH), (KV_HEADS, TOKENS, WIDTH))
    assert call(scaling=0.25, dropout=0.0).calls == [(3, *shapes, 0.25)]
    assert call().calls == [(3, *shapes, WIDTH**-0.5)]


def test_what_changes_nothing_is_let_through() -> None:
    recorder = call(
        position_ids=torch.arange(TOKENS),
        position_embeddings=(torch.ones(1), torch.ones(1)),
        output_attentions=False,
        use_cache=False,
        is_causal=True,
        sliding_window=None,
        of_a_later_release=None,
    )
    assert recorder.calls == call().calls


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"value_width": 16}, "queries, keys and values of widths 8, 8, 16"),
        ({"key_width": 4, "value_width": 4}, "of widths 8, 4, 4"),
        ({"key_tokens": 7}, "of 5, 7, 7 tokens"),
        ({"mask": torch.zeros(1, 1, TOKENS, TOKENS)}, "a mask of its own"),
        ({"layer": Layer(is_causal=False)}, "attention of Layer is bidirectional"),
        ({"is_causal": False}, "bidirectional"),
        ({"dropout": 0.1}, "drops out"),
        ({"sliding_window": 128}, "'sliding_window'"),
        ({"softcap": 30.0}, "'softcap'"),
        ({"s_aux": torch.zeros(HEADS)}, "'s_aux'"),
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"indices": torch.zeros(1)}, "'indices'"),
        ({"of_a_later_release": 0}, "'of_a_later_release'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_would_be_computed_wrongly_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        call(**given)


def test_layers_that_run_several_times_are_refused(tiny: Tiny) -> None:
    """Each run has keys of its own, and the caches have room for one."""
    model: Any = load_model(tiny("llama"), device=torch.device("cpu"), dtype=torch.float32)
    check_model(model, "tiny")
    first, second, *_ = model.model.layers
    model.model.layers = nn.ModuleList([first, second, first, second])
    with pytest.raises(ModelError, match="tiny cannot be served: not all of its layers attend"):
        check_model(model, "tiny")
