"""What finding heads costs, in time and memory: one piece of work, in a process of its own.

A process's peak memory says nothing of one piece of work among several, so each gets a process,
which `razor_dist.evals.bench_identify` starts::

    python -m razor_dist.evals.identify_cost '{"work": "probe", "model": "smollm2"}'

The baseline of the probe materialises the attention matrix, as reading weights off a model usually
does: all heads of one layer at a time, in float32 like transformers' eager attention, and dropped
before the next layer's. Keeping those of all layers (``output_attentions=True``) would take as many
times the memory as there are layers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.config.errors import ConfigError, RazorError
from razor_dist.config.ranges import check_least
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.device import torch_device, torch_dtype
from razor_dist.evals.peak import Peak
from razor_dist.evals.random_model import random_model, shape_config
from razor_dist.evals.timing import random_tokens
from razor_dist.heads.passkeys import PasskeySample
from razor_dist.heads.razor import (
    ProbeContext,
    ProbeScores,
    RazorSettings,
    plain_vocabulary,
    probe_input,
)
from razor_dist.models.alibi import is_alibi
from razor_dist.models.bridge import run_body
from razor_dist.models.loader import load_model, read_config
from razor_dist.models.registry import display_name, resolve_model
from razor_dist.models.shape import ModelShape

Work = Literal["probe", "materialised", "training"]
# Where a sample's passkeys are recalled: ten of 32 words, as in the paper.
_RECALLED = 320


@dataclass(frozen=True)
class CostSettings:
    """One piece of work.

    Attributes
    ----------
    work : str
        ``probe``, RazorAttention's as `identify` runs it; ``materialised``, the same scores from
        attention matrices; ``training``, steps of DuoAttention's gates.
    model : str
        A model by name; with ``random_weights`` a folder whose ``config.json`` gives the sizes.
    random_weights : bool
    tokens, repeats : int
        Of the probe.
    train_tokens, steps : int
        Tokens of a training sample (of random ids), and samples.
    threads : int or None
        torch's own number if None.
    device, dtype : str
        As in `EngineConfig`.
    seed : int

    Raises
    ------
    ConfigError
        If a number is too small for its work.
    """

    work: Work = "probe"
    model: str = "smollm2"
    random_weights: bool = False
    tokens: int = 2500
    repeats: int = 4
    train_tokens: int = 32768
    steps: int = 100
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, steps=1)
        if self.train_tokens <= _RECALLED:
            raise ConfigError(
                f"train_tokens must be more than the {_RECALLED} recalled, got {self.train_tokens}"
            )
        _ = self.razor

    @property
    def razor(self) -> RazorSettings:
        """Of the probe."""
        return RazorSettings(tokens=self.tokens, repeats=self.repeats, seed=self.seed)


@dataclass(frozen=True)
class Cost:
    """What a piece of work took.

    Attributes
    ----------
    seconds : float
    before_bytes, peak_bytes : int
        Memory held before the work, with the model loaded and used once, and at most during it:
        the process's resident memory on CPU, torch's allocations on CUDA.
    tokens : int
        Of the prompt, or of all samples.
    scores : dict
        Of a probe; empty for training.
    """

    seconds: float
    before_bytes: int
    peak_bytes: int
    tokens: int
    scores: dict[str, list[list[float]]]


class MaterialisedContext(ProbeContext):
    """The probe's `AttentionContext`, but with the attention matrix of a layer held."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `razor_dist.models.bridge.AttentionContext`."""
        q_KGTD, total = q.unflatten(0, (k.shape[0], -1)), q.shape[1]
        logits = torch.matmul(q_KGTD * scale, k[:, None].transpose(-1, -2)).float()
        future = torch.ones(total, total, dtype=torch.bool, device=q.device).triu(1)
        weights = logits.masked_fill_(future, float("-inf")).softmax(-1)
        del logits, future
        n = self._tokens
        for r in range(1, self._repeats):
            here = slice(self._start + r * n, self._start + (r + 1) * n)
            for earlier in range(r):
                for kind, shift in enumerate((1, 0)):  # induction, echo
                    begin = self._start + earlier * n + shift
                    there = weights[..., here, begin : begin + n].diagonal(dim1=-2, dim2=-1)
                    summed = there.sum(-1, dtype=torch.float64).flatten()
                    self._weight[kind, layer, :, r] += summed.cpu()
        out: Tensor = (weights.to(v.dtype) @ v[:, None]).flatten(0, 1).transpose(0, 1)
        return out


def measure(settings: CostSettings) -> Cost:
    """Do the work and measure it.

    Raises
    ------
    ConfigError, ModelError
        If the model cannot be loaded, is biased by distance, or what training needs is not
        installed.
    """
    refuse_alibi(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    config = EngineConfig(model=settings.model, device=settings.device, dtype=settings.dtype)
    device = torch_device(config, 0)
    model, vocabulary = _load(settings, device, torch_dtype(config, device))
    if settings.work == "training":
        return _training(settings, model, device)
    context = ProbeContext if settings.work == "probe" else MaterialisedContext
    # Weights are read from the disk when they are first used.
    _probe(replace(settings.razor, tokens=min(settings.tokens, 16)), model, vocabulary, context)
    with Peak(device) as peak:
        found = _probe(settings.razor, model, vocabulary, context)
    scores = {kind: [list(row) for row in rows] for kind, rows in found.scores.items()}
    tokens = found.tokens * settings.repeats
    return Cost(peak.seconds, peak.before, peak.peak, tokens, scores)


def refuse_alibi(settings: CostSettings) -> None:
    """Raise `ConfigError` for a model that has no use for a probe or for training."""
    name = settings.model
    config = shape_config(name) if settings.random_weights else read_config(resolve_model(name))
    if is_alibi(config):
        raise ConfigError(
            "bench-identify measures methods for models that are not biased by distance (ALiBi), "
            f"and {display_name(name)} is; its heads' scopes follow from its weights, "
            "without a probe or training"
        )


def _load(
    settings: CostSettings, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, Tensor]:
    """The model, and the token ids that a probe may use."""
    if settings.random_weights:
        torch.manual_seed(settings.seed)
        model = random_model(settings.model, device, dtype)
        return model, torch.arange(ModelShape.from_config(model.config).vocab_size)
    path = resolve_model(settings.model)
    model = load_model(path, device=device, dtype=dtype)
    return model, plain_vocabulary(path, model.config)


@torch.inference_mode()
def _probe(
    razor: RazorSettings,
    model: PreTrainedModel,
    vocabulary: Tensor,
    context_class: type[ProbeContext],
) -> ProbeScores:
    """A probe of exactly the tokens asked for, if the vocabulary has them.

    `identify` uses fewer where the model's context is shorter: scores beyond it mean nothing. What
    they cost is the same, so that models of any context can be compared at one length.
    """
    shape = ModelShape.from_config(model.config)
    longer = replace(shape, max_positions=max(shape.max_positions, razor.tokens * razor.repeats))
    tokens, ids = probe_input(longer, vocabulary, razor)
    context = context_class(shape, tokens, razor.repeats)
    run_body(model, ids, context)
    return context.scores()


def _training(settings: CostSettings, model: PreTrainedModel, device: torch.device) -> Cost:
    from razor_dist.heads.duo.settings import DuoSettings
    from razor_dist.heads.duo.train import train
    from razor_dist.parallel.zero import join_ranks

    group = join_ranks(device)
    vocab_size, tokens = ModelShape.from_config(model.config).vocab_size, settings.train_tokens
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[-_RECALLED:] = True

    def sample(index: int) -> PasskeySample:
        return PasskeySample(torch.tensor(random_tokens(vocab_size, tokens, index)), mask)

    def short(index: int) -> PasskeySample:
        return PasskeySample(sample(index).ids[: _RECALLED + 1], mask[-_RECALLED - 1 :])

    train(model, short, DuoSettings(steps=1), group)  # DeepSpeed's own set-up, and the weights
    with Peak(device) as peak:
        train(model, sample, DuoSettings(steps=settings.steps), group)
    return Cost(peak.seconds, peak.before, peak.peak, tokens * settings.steps, {})


def main(argv: list[str]) -> int:
    """Measure what the JSON in the one argument says; the result is JSON on stdout."""
    try:
        cost = measure(CostSettings(**json.loads(argv[0])))
    except RazorError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(cost)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
