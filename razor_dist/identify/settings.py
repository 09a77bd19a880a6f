"""Settings of the methods that find retrieval heads, checked where they are made.

Each field's `Doc` is also the help of its flag in ``razor-dist identify``, which takes the defaults
from here too; so nothing here imports torch. Defaults are the papers': RazorAttention's Table 2,
and section 3.1 of DuoAttention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typing_extensions import Doc

from razor_dist.config.errors import ConfigError
from razor_dist.config.validation import check_least, check_percent, check_seed
from razor_dist.heads.decision import check_rule

MOST_PASSKEYS = 10
Bound = Literal["paper", "strict"]
Seed = Annotated[int, Doc("Of random tokens, passkeys and needles.")]
Sinks = Annotated[int, Doc("First tokens that a cut head sees.")]
Recent = Annotated[int, Doc("Recent tokens that a cut head sees, its own among them.")]
Sparsity = Annotated[
    float | None,
    Doc(
        "Fraction of KV heads to make streaming heads, 0 to 1. [default: 0.5, or 0.75 without "
        "grouped heads]"
    ),
]


@dataclass(frozen=True)
class RazorSettings:
    induction_percent: Annotated[
        float, Doc("Query heads to choose by induction score, in percent of all.")
    ] = 14.0
    echo_percent: Annotated[
        float, Doc("Query heads to choose by echo score, in percent of all.")
    ] = 1.0
    tokens: Annotated[
        int, Doc("Random tokens; fewer if the model's context or vocabulary is short.")
    ] = 2500
    repeats: Annotated[int, Doc("Times that they stand in the prompt.")] = 4
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_percent("induction", self.induction_percent)
        check_percent("echo", self.echo_percent)
        check_seed(self.seed)
        check_least(self, tokens=2)
        if self.repeats < 2:
            raise ConfigError(
                f"repeats must be at least 2, got {self.repeats}: tokens that occur once have no "
                "earlier occurrence to attend to"
            )


@dataclass(frozen=True)
class PasskeySettings:
    """Settings of the passkey samples; `Passkeys` raises ``min_tokens`` to what passkeys take."""

    passkeys: Annotated[int, Doc("Passkeys hidden in a sample, at most ten.")] = 10
    words: Annotated[int, Doc("Words of a passkey.")] = 32
    min_tokens: Annotated[int, Doc("Shortest sample.")] = 1000
    max_tokens: Annotated[int, Doc("Longest sample.")] = 32_000
    lengths: Annotated[int, Doc("Different lengths of samples, evenly spaced.")] = 50
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not 1 <= self.passkeys <= MOST_PASSKEYS:
            raise ConfigError(f"passkeys must be from 1 to {MOST_PASSKEYS}, got {self.passkeys}")
        check_least(self, words=1, min_tokens=1, max_tokens=1, lengths=1)
        check_seed(self.seed)


@dataclass(frozen=True)
class DuoSettings:
    sinks: Sinks = 128
    recent: Recent = 256
    steps: Annotated[int, Doc("Training steps, one sample each.")] = 2000
    learning_rate: Annotated[float, Doc("The highest learning rate.")] = 0.02
    l1: Annotated[float, Doc("Weight of the gates' mean, which draws them to 0.")] = 0.05
    zero_stage: Annotated[int, Doc("3 shards the frozen weights over the ranks, 0 does not.")] = 0
    sparsity: Sparsity = None
    threshold: Annotated[
        float | None, Doc("Instead: keep the KV heads whose gate is at least this, 0 to 1.")
    ] = None

    def __post_init__(self) -> None:
        check_least(self, sinks=0, recent=1, steps=1)
        if not 0 < self.learning_rate <= 1:
            raise ConfigError(f"learning_rate must be above 0, up to 1, got {self.learning_rate}")
        if not self.l1 >= 0:
            raise ConfigError(f"l1 must be at least 0, got {self.l1}")
        if self.zero_stage not in (0, 3):
            raise ConfigError(f"zero_stage must be 0 or 3, got {self.zero_stage}")
        check_rule(self.sparsity, self.threshold)


@dataclass(frozen=True)
class OnTheFlySettings:
    """Settings of the measurement without training."""

    sparsity: Sparsity = None
    sinks: Sinks = 128
    recent: Recent = 256
    samples: Annotated[int, Doc("Samples to measure, one forward pass each.")] = 4

    def __post_init__(self) -> None:
        check_rule(self.sparsity)
        check_least(self, sinks=0, recent=1, samples=1)


@dataclass(frozen=True)
class KVzipSettings:
    """Settings of KVzip's head scores; the sparsity is that of its authors, 0.6 of the cache."""

    sparsity: Annotated[float, Doc("Fraction of KV heads to make streaming heads, 0 to 1.")] = 0.4
    samples: Annotated[int, Doc("Texts to repeat, one forward pass each.")] = 5
    tokens: Annotated[int, Doc("Tokens of a text.")] = 2000
    recent: Annotated[
        int, Doc("Last tokens of a text to leave out: heads that see only near tokens reach them.")
    ] = 0
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_rule(self.sparsity)
        check_least(self, samples=1, tokens=2, recent=0)
        check_seed(self.seed)
        if self.recent >= self.tokens:
            raise ConfigError(
                f"recent must be below tokens, got {self.recent} of {self.tokens}: nothing of a "
                "text would be left"
            )


@dataclass(frozen=True)
class ReachSettings:
    """Settings of the reach of mean queries; the length is kvpress's."""

    sparsity: Sparsity = None
    samples: Annotated[int, Doc("Texts to measure, one forward pass each.")] = 10
    tokens: Annotated[int, Doc("Tokens of a text.")] = 2000
    length: Annotated[int, Doc("Places over which attention of the means is spread.")] = 500
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_rule(self.sparsity)
        check_least(self, samples=1, tokens=2, length=2)
        check_seed(self.seed)


@dataclass(frozen=True)
class ScopeSettings:
    epsilon: Annotated[float, Doc("Attention weights up to this are neglected.")] = 0.001
    bound: Annotated[
        Bound, Doc("The scope of RazorAttention's Theorem 1, or one that no input can exceed.")
    ] = "paper"
    context_tokens: Annotated[
        int | None,
        Doc("Heads that see as many tokens keep everything. [default: the model's context]"),
    ] = None

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ConfigError(f"epsilon must be above 0 and below 1, got {self.epsilon}")
        if self.bound not in ("paper", "strict"):
            raise ConfigError(f"bound must be paper or strict, got {self.bound!r}")
        check_least(self, context_tokens=1)
