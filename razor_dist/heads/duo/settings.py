"""Settings of DuoAttention's training, and what a continued run must share with its beginning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PretrainedConfig

from razor_dist.config.errors import ConfigError
from razor_dist.config.ranges import check_fraction, check_least
from razor_dist.heads.passkeys import PasskeySettings
from razor_dist.models.loader import model_fingerprint


@dataclass(frozen=True)
class DuoSettings:
    """Settings of the training; the defaults are the paper's (section 3.1).

    Attributes
    ----------
    sinks, recent : int
        What streaming attention sees while training.
    steps : int
        Each on one sample.
    learning_rate : float
        The highest, see `schedule`.
    l1 : float
        Lambda, the weight of the gates' mean.
    zero_stage : int
        0: every rank holds all weights. 3: each holds a share.
    sparsity, threshold : float, optional
        How the gates decide, see `duo_pattern.head_map`; not both.
    """

    sinks: int = 128
    recent: int = 256
    steps: int = 2000
    learning_rate: float = 0.02
    l1: float = 0.05
    zero_stage: int = 0
    sparsity: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        check_least(self, sinks=0, recent=1, steps=1)
        if not 0 < self.learning_rate <= 1:
            raise ConfigError(f"learning_rate must be above 0, up to 1, got {self.learning_rate}")
        if not self.l1 >= 0:
            raise ConfigError(f"l1 must be at least 0, got {self.l1}")
        if self.zero_stage not in (0, 3):
            raise ConfigError(f"zero_stage must be 0 or 3, got {self.zero_stage}")
        if self.sparsity is not None and self.threshold is not None:
            raise ConfigError("give sparsity or threshold, not both: each decides alone")
        for name in ("sparsity", "threshold"):
            value = getattr(self, name)
            if value is not None:
                check_fraction(name, value)


def run_settings(
    config: PretrainedConfig, settings: DuoSettings, passkeys: PasskeySettings, haystack: str
) -> dict[str, Any]:
    """What must be equal in a run and in the one that continues it.

    The number of ranks and `zero_stage` are not in it: they change where numbers are, not which.
    Nor is how the gates decide, when all is done.
    """
    training = asdict(settings)
    del training["zero_stage"], training["sparsity"], training["threshold"]
    return {
        "model": model_fingerprint(config),
        **training,
        **{f"passkeys.{key}": value for key, value in asdict(passkeys).items()},
        "haystack": haystack,
    }
