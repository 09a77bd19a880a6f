"""RazorAttention's probe: score heads by how they look back at repeated tokens (section 3.3).

n random tokens (the paper's K) are repeated R times, after the special tokens that every prompt of
the model begins with, if any. At position i of repetition r = 0..R-1 the token has occurred r times
before, at i - jn for j = 1..r. Of a query head's attention weights at i,

- those at i - jn are on *echo* tokens, identical to the current one;
- those at i - jn + 1 are on *induction* tokens, which followed it then and will follow it now.

**The reading chosen.** The paper scores "attention weight to the echo token" without saying how
several earlier occurrences count. A head's score here is the mean of its weight over all pairs of
a token and an earlier occurrence of it: sum_i sum_j w(i, i - jn) / (n R(R-1)/2). The mean over
tokens of the *summed* weight is R/2 times that, so it ranks heads alike. Their *mean* weight per
occurrence favours the first repetitions; `ProbeScores.per_token` has it, for comparison.

No attention matrix is ever held: the flash kernel gives each query's log-sum-exp, and a weight is
``exp(scale q_i . k_t - lse_i)``, so a layer costs R(R-1) diagonals of at most n weights per head,
evaluated one at a time.

Letters: H query heads, K key-value heads, G = H / K, T = nR tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from razor_dist.config.errors import ConfigError
from razor_dist.heads.decision import Decision, Scores, decide, rounded
from razor_dist.heads.head_map import HeadMap
from razor_dist.identify.criterion import Criterion, Sample, score
from razor_dist.identify.settings import RazorSettings
from razor_dist.kernels.query import Query
from razor_dist.models.loader import dtype_name
from razor_dist.models.shape import ModelShape


@dataclass(frozen=True)
class ProbeScores:
    """Scores of every query head, ``induction`` and ``echo``: ``[layers][query heads]``."""

    tokens: int  # n, the random tokens used
    scores: dict[str, Scores]  # means over (token, earlier occurrence) pairs, which decide
    per_token: dict[str, Scores]  # means over tokens of the mean over occurrences

    def decide(self, settings: RazorSettings, group: int) -> tuple[Decision, Decision]:
        """The decision by `scores`, and the one by `per_token`."""
        percents = (settings.induction_percent, settings.echo_percent)
        return decide(self.scores, *percents, group), decide(self.per_token, *percents, group)


@dataclass
class ProbeContext(Criterion):
    """Measures the weights on earlier occurrences of each token.

    ``on_layer`` is called with the index of each measured layer.
    """

    shape: ModelShape
    tokens: int  # n
    repeats: int  # R
    start: int = 0  # tokens before the first repetition
    on_layer: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        # weight[kind, layer, head, r]: summed weight of repetition r's tokens on all of their r
        # earlier occurrences.
        sizes = (2, self.shape.layers, self.shape.query_heads, self.repeats)
        self._weight = torch.zeros(sizes, dtype=torch.float64)

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        out, lse = query.attend(k, v, causal=True)
        for r in range(1, self.repeats):
            self._weight[:, layer, :, r] = self._repetition(query, k, lse, r).cpu()
        if self.on_layer is not None:
            self.on_layer(layer)
        return out.to(query.q.dtype).flatten(0, 1).transpose(0, 1)

    def _repetition(self, query: Query, k: Tensor, lse_KGT: Tensor, r: int) -> Tensor:
        """Sum the weight of repetition ``r`` on induction and echo tokens, float64 ``[2, H]``."""
        n = self.tokens
        here = slice(self.start + r * n, self.start + (r + 1) * n)
        q = query.q[:, :, here].float() * query.scale
        total = torch.zeros(2, *q.shape[:2], dtype=torch.float64, device=q.device)
        for earlier in range(r):
            for kind, shift in enumerate((1, 0)):  # induction, echo
                start = self.start + earlier * n + shift
                keys = k[:, None, start : start + n].float()
                weights = torch.exp((q * keys).sum(-1) - lse_KGT[:, :, here])
                total[kind] += weights.sum(-1, dtype=torch.float64)
        return total.flatten(1)

    def scores(self) -> Tensor:
        """The largest mean weight of either kind in each KV head's group."""
        n, repeats = self.tokens, self.repeats
        heads = self._weight.sum(-1).amax(0) / (n * repeats * (repeats - 1) // 2)
        return heads.unflatten(-1, (self.shape.kv_heads, -1)).amax(-1)

    def by_query_head(self) -> ProbeScores:
        """Return the scores that decide, once all layers have been measured."""
        n, repeats = self.tokens, self.repeats
        pairs = n * repeats * (repeats - 1) // 2
        occurrences = torch.arange(repeats, dtype=torch.float64).clamp(min=1)
        by_pair = self._weight.sum(-1) / pairs
        by_token = (self._weight / occurrences).sum(-1) / (n * (repeats - 1))
        return ProbeScores(n, _named(by_pair), _named(by_token))


def _named(scores: Tensor) -> dict[str, Scores]:
    return {kind: rounded(scores[i].tolist()) for i, kind in enumerate(("induction", "echo"))}


def probe_input(
    shape: ModelShape, vocabulary: Tensor, settings: RazorSettings, start: Sequence[int] = ()
) -> tuple[int, Tensor]:
    """Draw n random tokens; return n and the prompt: ``start``, then these R times.

    n is at most ``settings.tokens``, the vocabulary, and what the context holds R times. Tokens are
    distinct, so that a token occurs once in each repetition, as the definition assumes.
    """
    room = (shape.max_positions - len(start)) // settings.repeats
    tokens = min(settings.tokens, room, len(vocabulary))
    if tokens < 2:
        raise ConfigError(
            f"repeats is {settings.repeats}, but the context of {shape.max_positions} positions "
            "does not hold that many repetitions of two tokens"
        )
    # Drawn on the CPU, so that a seed gives the same tokens on every device.
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = vocabulary[torch.randperm(len(vocabulary), generator=generator)[:tokens]]
    repeated = chosen.repeat(settings.repeats)
    return tokens, torch.cat([torch.tensor(list(start)).long(), repeated])


def probe(
    model: PreTrainedModel,
    vocabulary: Tensor,
    settings: RazorSettings,
    on_layer: Callable[[int], None] | None = None,
    start: Sequence[int] = (),
) -> ProbeScores:
    """Score every query head in one pass; ``vocabulary`` is that of `plain_vocabulary`."""
    shape = ModelShape.from_config(model.config)
    tokens, ids = probe_input(shape, vocabulary, settings, start)
    context = ProbeContext(shape, tokens, settings.repeats, len(start), on_layer)
    score(model, [Sample(ids, torch.ones(len(ids), dtype=torch.bool))], context)
    return context.by_query_head()


def plain_vocabulary(tokenizer: PreTrainedTokenizerBase | None, config: PretrainedConfig) -> Tensor:
    """Token ids of ordinary text, without special tokens, by tokenizer or config: int64 ``[V]``."""
    size: int = config.vocab_size
    if tokenizer is not None:
        ids = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
        ids -= set(tokenizer.all_special_ids)
    else:
        ids = set(range(size))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(config, name, None)
            ids -= set(value) if isinstance(value, list) else {value}
    return torch.tensor(sorted(i for i in ids if i < size), dtype=torch.int64)


def head_map(
    name: str, model: PreTrainedModel, result: ProbeScores, settings: RazorSettings
) -> HeadMap:
    """Build the head map that follows from a probe's scores, with all settings."""
    decision, _ = result.decide(settings, ModelShape.from_config(model.config).group)
    used = {"tokens": result.tokens, "tokens_requested": settings.tokens}
    return HeadMap.of_model(
        name,
        model.config,
        method="razor",
        settings=asdict(settings) | used | {"dtype": dtype_name(model.dtype)},
        scores=result.scores,
        **decision._asdict(),
    )
