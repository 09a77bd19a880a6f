"""The measurement without training, against its definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from razor_dist.identify.criterion import Sample, score
from razor_dist.identify.onthefly import Change
from razor_dist.identify.settings import OnTheFlySettings
from razor_dist.models.loader import load_model
from razor_dist.models.shape import ModelShape
from tests.tiny_models import make_tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_scores_are_those_of_attention_matrices(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    model = load_model(path, device=CPU, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    samples = []
    for tokens in (150, 90):
        mask = torch.zeros(tokens, dtype=torch.bool)
        mask[-40::3] = True
        samples.append(Sample(torch.randint(4, 190, (tokens,), generator=generator), mask))
    sinks, recent = 4, 16
    settings = OnTheFlySettings(sinks=sinks, recent=recent)
    scores = score(model, samples, Change(model, settings))

    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    shape = ModelShape.from_config(stock.config)
    moved = torch.zeros(shape.layers, shape.kv_heads)
    whole = torch.zeros(shape.layers, 1)
    for one in samples:
        t = torch.arange(len(one.ids))
        distance = t[:, None] - t
        hidden_by_cut = (distance >= recent) & (t >= sinks)
        values: dict[int, torch.Tensor] = {}
        hooks = [
            layer.self_attn.v_proj.register_forward_hook(
                lambda _, __, out, index=index, into=values: into.__setitem__(index, out[0])
            )
            for index, layer in enumerate(stock.model.layers)
        ]
        with torch.no_grad():
            attentions = stock(one.ids[None], output_attentions=True).attentions
        for hook in hooks:
            hook.remove()
        for layer, attention in enumerate(attentions):
            weights = attention[0]
            cut = weights.masked_fill(hidden_by_cut, 0)
            cut = cut / cut.sum(-1, keepdim=True)
            v = values[layer].unflatten(1, (shape.kv_heads, -1)).transpose(0, 1)
            v = v.repeat_interleave(shape.group, 0)
            project = stock.model.layers[layer].self_attn.o_proj.weight.detach()
            project = project.unflatten(1, (shape.query_heads, -1))
            full = torch.einsum("hts,hsd,ehd->hte", weights, v, project)[:, one.mask]
            lost = full - torch.einsum("hts,hsd,ehd->hte", cut, v, project)[:, one.mask]
            by_group = lost.unflatten(0, (shape.kv_heads, -1)).sum(1)
            moved[layer] += by_group.square().sum((1, 2))
            whole[layer] += full.sum(0).square().sum()
    torch.testing.assert_close(torch.tensor(scores), (moved / whole).sqrt(), atol=1e-5, rtol=1e-3)
