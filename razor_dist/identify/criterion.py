"""The common part of all criteria of retrieval heads: samples, a score of each KV head, a head map.

A criterion is an `AttentionContext` of full attention that also measures heads. `score` runs a
model over a batch of samples with it. DuoAttention's gates are trained instead (`duo.train`), on
the same kind of samples, and give scores of the same form.

Letters: H query heads, K key-value heads, G = H / K, T tokens, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.heads.decision import Scores, by_rule, rounded
from razor_dist.heads.head_map import HeadMap
from razor_dist.kernels.query import Query
from razor_dist.models.bridge import run_body
from razor_dist.models.shape import ModelShape


@dataclass(frozen=True)
class Sample:
    """Tokens, int64 ``[N]``, and the mask of those whose attention counts, bool ``[N]``."""

    ids: Tensor
    mask: Tensor


class Criterion(ABC):
    """Scores the heads of a model by forward passes, one for each sample."""

    sample: Sample  # of the current pass

    def begin(self, sample: Sample) -> None:
        """Prepare for the pass over a sample."""
        self.sample = sample

    @abstractmethod
    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        """Compute full attention as `AttentionContext` says, and measure."""

    @abstractmethod
    def scores(self) -> Tensor:
        """The score of each KV head from all samples so far, float64 ``[layers, K]``."""


def score(
    model: PreTrainedModel,
    batch: Iterable[Sample],
    criterion: Criterion,
    on_sample: Callable[[int], None] | None = None,
) -> Scores:
    """Score every KV head, ``[layers][KV heads]``; ``on_sample`` gets the index of each sample.

    Raise `ModelError`, after the first sample that shows it, if a score is not finite.
    """
    scores: Scores = ()
    for index, sample in enumerate(batch):
        criterion.begin(sample)
        run_body(model, sample.ids, criterion)
        scores = rounded(criterion.scores().tolist())
        if on_sample is not None:
            on_sample(index)
    return scores


def head_map(
    name: str,
    config: PretrainedConfig,
    method: str,
    kv_scores: Mapping[str, Scores],
    settings: Mapping[str, Any],
    *,
    sparsity: float | None = None,
    threshold: float | None = None,
) -> HeadMap:
    """Build the head map that follows from one kind of KV heads' scores (`by_rule`)."""
    (scores,) = kv_scores.values()
    group = ModelShape.from_config(config).group
    rule, retrieval = by_rule(scores, group, sparsity=sparsity, threshold=threshold)
    return HeadMap.of_model(
        name,
        config,
        method=method,
        settings={**settings, **rule},
        retrieval=retrieval,
        kv_scores=dict(kv_scores),
    )
