"""Cost of finding heads: razor's probe, the probe with attention matrices, and gate training.

A process's peak memory says nothing of one piece of work among several, so each is measured in a
process of its own.

The baseline of the probe materialises the attention matrix, as reading weights off a model usually
does: all heads of one layer at a time, in float32 like transformers' eager attention, and dropped
before the next layer's. Keeping those of all layers (``output_attentions=True``) would take as many
times the memory as there are layers.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.device import torch_device, torch_dtype
from razor_dist.evals.bench.measure import BenchRecord, Table, cost_on, random_tokens
from razor_dist.evals.bench.settings import RECALLED_TOKENS, ProbeBenchSettings
from razor_dist.evals.bench.shape import random_model, shape_config
from razor_dist.identify.criterion import Sample
from razor_dist.identify.duo.train import train
from razor_dist.identify.razor import ProbeContext, ProbeScores, plain_vocabulary, probe_input
from razor_dist.identify.settings import DuoSettings, RazorSettings
from razor_dist.jobs.process import call
from razor_dist.kernels.query import Query
from razor_dist.models.adapters import is_alibi
from razor_dist.models.bridge import run_body
from razor_dist.models.loader import load_model, read_config
from razor_dist.models.registry import display_name, resolve_model
from razor_dist.models.shape import ModelShape
from razor_dist.models.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


def run(settings: ProbeBenchSettings) -> BenchRecord:
    """Measure each piece of work, in a process of its own; `ConfigError` if none can be."""
    refuse_alibi(settings)
    works = {"probe": "razor probe", "materialised": "with attention matrices"}
    if settings.training:
        works["training"] = f"gate training, {settings.steps} steps"
    rows = [["", "tokens", "s", "memory before, MiB", "peak, MiB", "rise, MiB"]]
    costs, notes = {}, []
    for work, name in works.items():
        log.info("%s ...", name)
        costs[work] = cost = call(measure, work, settings)
        if "failed" in cost:
            rows.append([name, "failed", *[""] * 4])
            notes.append(f"{work} failed: {cost['failed']}")
            continue
        before, peak = cost["before_bytes"], cost["peak_bytes"]
        mib = [f"{nbytes / 2**20:,.0f}" for nbytes in (before, peak, peak - before)]
        rows.append([name, f"{cost['tokens']:,}", f"{cost['seconds']:.1f}", *mib])
    if len(notes) == len(costs):
        raise ConfigError(costs["probe"]["failed"])
    scores = [cost.pop("scores") for cost in costs.values() if "scores" in cost]
    difference = None
    if len(scores) == 2:
        a, b = (torch.tensor(list(found.values()), dtype=torch.float64) for found in scores)
        # Relative to the largest; random weights may score 0 everywhere.
        difference = float((a - b).abs().max() / (a.max() or 1.0))
        notes.append(f"Scores differ by at most {difference:.1e} of the largest.")
    figures = {"costs": costs, "largest_difference_of_scores": difference}
    return BenchRecord("probe", settings, figures, [Table("", rows)], notes)


class MaterialisedContext(ProbeContext):
    """The probe's `AttentionContext`, but with the attention matrix of a layer held."""

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        total = k.shape[1]
        logits = torch.matmul(query.q * query.scale, k[:, None].transpose(-1, -2)).float()
        future = torch.ones(total, total, dtype=torch.bool, device=k.device).triu(1)
        weights = logits.masked_fill_(future, float("-inf")).softmax(-1)
        del logits, future
        n = self.tokens
        for r in range(1, self.repeats):
            here = slice(self.start + r * n, self.start + (r + 1) * n)
            for earlier in range(r):
                for kind, shift in enumerate((1, 0)):  # induction, echo
                    begin = self.start + earlier * n + shift
                    there = weights[..., here, begin : begin + n].diagonal(dim1=-2, dim2=-1)
                    summed = there.sum(-1, dtype=torch.float64).flatten()
                    self._weight[kind, layer, :, r] += summed.cpu()
        out: Tensor = (weights.to(v.dtype) @ v[:, None]).flatten(0, 1).transpose(0, 1)
        return out


def measure(work: str, settings: ProbeBenchSettings) -> dict[str, Any]:
    """Do ``probe``, ``materialised`` or ``training``.

    Returns the `Cost`, the model loaded and used once before; ``tokens``; a probe's ``scores``.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    config = EngineConfig(model=settings.source, device=settings.device, dtype=settings.dtype)
    device = torch_device(config, 0)
    dtype = torch_dtype(config, device)
    if settings.shape is not None:
        torch.manual_seed(settings.seed)
        model = random_model(settings.shape, device, dtype)
        vocabulary = torch.arange(ModelShape.from_config(model.config).vocab_size)
    else:
        path = resolve_model(settings.source)
        model = load_model(path, device=device, dtype=dtype)
        vocabulary = plain_vocabulary(load_tokenizer(path), model.config)
    if work == "training":
        return _training(settings, model, device)
    razor = RazorSettings(tokens=settings.tokens, repeats=settings.repeats, seed=settings.seed)
    context = ProbeContext if work == "probe" else MaterialisedContext
    # Weights are read from the disk when they are first used.
    _probe(replace(razor, tokens=min(settings.tokens, 16)), model, vocabulary, context)
    with cost_on(device) as cost:
        found = _probe(razor, model, vocabulary, context)
    return {**vars(cost), "tokens": found.tokens * settings.repeats, "scores": found.scores}


def refuse_alibi(settings: ProbeBenchSettings) -> None:
    shape = settings.shape
    if is_alibi(shape_config(shape) if shape else read_config(resolve_model(settings.source))):
        raise ConfigError(
            "bench probe measures methods for models that are not biased by distance (ALiBi), "
            f"and {display_name(settings.source)} is; its heads' scopes follow from its weights, "
            "without a probe or training"
        )


@torch.inference_mode()
def _probe(
    razor: RazorSettings, model: PreTrainedModel, vocabulary: Tensor, context: type[ProbeContext]
) -> ProbeScores:
    """Run a probe of exactly the tokens asked for, if the vocabulary has them.

    `identify` uses fewer where the model's context is shorter: scores beyond it mean nothing. They
    cost the same, so that models of any context can be compared at one length.
    """
    shape = ModelShape.from_config(model.config)
    longer = replace(shape, max_positions=max(shape.max_positions, razor.tokens * razor.repeats))
    tokens, ids = probe_input(longer, vocabulary, razor)
    found = context(shape, tokens, razor.repeats)
    run_body(model, ids, found)
    return found.by_query_head()


def _training(
    settings: ProbeBenchSettings, model: PreTrainedModel, device: torch.device
) -> dict[str, Any]:
    vocab_size, tokens = ModelShape.from_config(model.config).vocab_size, settings.train_tokens

    def sample(index: int, most: int = tokens) -> Sample:
        ids = torch.tensor(random_tokens(vocab_size, most, index))
        return Sample(ids, torch.arange(most) >= most - RECALLED_TOKENS)

    train(model, partial(sample, most=RECALLED_TOKENS + 1), DuoSettings(steps=1))  # reads weights
    with cost_on(device) as cost:
        train(model, sample, DuoSettings(steps=settings.steps))
    return {**vars(cost), "tokens": tokens * settings.steps}
