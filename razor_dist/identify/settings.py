"""Settings of the methods that find retrieval heads, checked where they are made.

Each field's `Doc` is also the help of its flag in ``razor-dist identify``, which takes the defaults
from here too; so nothing here imports torch. Defaults are the papers': RazorAttention's Table 2,
and section 3.1 of DuoAttention. Settings that are wrong raise `SettingError`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import Doc

from razor_dist.config.validation import STRICT, explained
from razor_dist.heads.decision import check_rule

MOST_PASSKEYS = 10
Bound = Literal["paper", "strict"]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
AtLeastTwo = Annotated[int, Field(ge=2)]
Percent = Annotated[float, Field(ge=0, le=100)]
Share = Field(ge=0, le=1)
Seed = Annotated[int, Field(ge=0, lt=2**63), Doc("Of random tokens, passkeys and needles.")]
Sinks = Annotated[Natural, Doc("First tokens that a cut head sees.")]
Recent = Annotated[Count, Doc("Recent tokens that a cut head sees, its own among them.")]
Sparsity = Annotated[
    float | None,
    Share,
    Doc(
        "Fraction of KV heads to make streaming heads, 0 to 1. [default: 0.5, or 0.75 without "
        "grouped heads]"
    ),
]


@explained()
@dataclass(frozen=True, config=STRICT)
class RazorSettings:
    induction_percent: Annotated[
        Percent, Doc("Query heads to choose by induction score, in percent of all.")
    ] = 14.0
    echo_percent: Annotated[
        Percent, Doc("Query heads to choose by echo score, in percent of all.")
    ] = 1.0
    tokens: Annotated[
        AtLeastTwo, Doc("Random tokens; fewer if the model's context or vocabulary is short.")
    ] = 2500
    repeats: Annotated[int, Doc("Times that they stand in the prompt.")] = 4
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ValueError(
                f"repeats must be at least 2, got {self.repeats}: tokens that occur once have no "
                "earlier occurrence to attend to"
            )


@explained()
@dataclass(frozen=True, config=STRICT)
class PasskeySettings:
    """Settings of the passkey samples; `Passkeys` raises ``min_tokens`` until passkeys fit."""

    passkeys: Annotated[
        int, Field(ge=1, le=MOST_PASSKEYS), Doc("Passkeys hidden in a sample, at most ten.")
    ] = 10
    words: Annotated[Count, Doc("Words of a passkey.")] = 32
    min_tokens: Annotated[Count, Doc("Shortest sample.")] = 1000
    max_tokens: Annotated[Count, Doc("Longest sample.")] = 32_000
    lengths: Annotated[Count, Doc("Different lengths of samples, evenly spaced.")] = 50
    seed: Seed = 0


@explained()
@dataclass(frozen=True, config=STRICT)
class DuoSettings:
    sinks: Sinks = 128
    recent: Recent = 256
    steps: Annotated[Count, Doc("Training steps, one sample each.")] = 2000
    learning_rate: Annotated[float, Field(gt=0, le=1), Doc("The highest learning rate.")] = 0.02
    l1: Annotated[float, Field(ge=0), Doc("Weight of the gates' mean, which draws them to 0.")] = (
        0.05
    )
    zero_stage: Annotated[int, Doc("3 shards the frozen weights over the ranks, 0 does not.")] = 0
    sparsity: Sparsity = None
    threshold: Annotated[
        float | None,
        Share,
        Doc("Instead: keep the KV heads whose gate is at least this, 0 to 1."),
    ] = None

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 3):
            raise ValueError(f"zero_stage must be 0 or 3, got {self.zero_stage}")
        check_rule(self.sparsity, self.threshold)


@explained()
@dataclass(frozen=True, config=STRICT)
class OnTheFlySettings:
    """Settings of the measurement without training."""

    sparsity: Sparsity = None
    sinks: Sinks = 128
    recent: Recent = 256
    samples: Annotated[Count, Doc("Samples to measure, one forward pass each.")] = 4


@explained()
@dataclass(frozen=True, config=STRICT)
class KVzipSettings:
    """Settings of KVzip's head scores; the default sparsity keeps 0.6 of the cache, as there."""

    sparsity: Annotated[
        float, Share, Doc("Fraction of KV heads to make streaming heads, 0 to 1.")
    ] = 0.4
    samples: Annotated[Count, Doc("Texts to repeat, one forward pass each.")] = 5
    tokens: Annotated[AtLeastTwo, Doc("Tokens of a text.")] = 2000
    recent: Annotated[
        Natural,
        Doc("Last tokens of a text to leave out: heads that see only near tokens reach them."),
    ] = 0
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.recent >= self.tokens:
            raise ValueError(
                f"recent must be below tokens, got {self.recent} of {self.tokens}: nothing of a "
                "text would be left"
            )


@explained()
@dataclass(frozen=True, config=STRICT)
class ReachSettings:
    """Settings of the reach of mean queries; the length is kvpress's."""

    sparsity: Sparsity = None
    samples: Annotated[Count, Doc("Texts to measure, one forward pass each.")] = 10
    tokens: Annotated[AtLeastTwo, Doc("Tokens of a text.")] = 2000
    length: Annotated[AtLeastTwo, Doc("Places over which attention of the means is spread.")] = 500
    seed: Seed = 0


@explained()
@dataclass(frozen=True, config=STRICT)
class ScopeSettings:
    epsilon: Annotated[
        float, Field(gt=0, lt=1), Doc("Attention weights up to this are neglected.")
    ] = 0.001
    bound: Annotated[
        Bound, Doc("The scope of RazorAttention's Theorem 1, or one that no input can exceed.")
    ] = "paper"
    context_tokens: Annotated[
        int | None,
        Field(ge=1),
        Doc("Heads that see as many tokens keep everything. [default: the model's context]"),
    ] = None
