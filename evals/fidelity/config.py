"""Settings of ``eval fidelity``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.config.sizes import Size
from razor_dist.evals.settings import (
    LISTED,
    METHOD_SETTINGS,
    NAMED,
    Methods,
    refuse_of_methods,
    setting,
    settings_by_name,
)
from razor_dist.jobs.task import ExternalEngineConfig


class FidelityConfig(JobConfig):
    """Settings of the texts and the methods, the job's and the engines'; frozen."""

    methods: Methods = setting(
        ("razor", "no-compensation", "streaming"), f"What to compare with full attention: {NAMED}."
    )
    tokens: Size | None = setting(
        None, "Of each text; none: all that it has and the model holds.", ge=3
    )
    prompt_tokens: Size | None = setting(
        None, "Of these, read before the first that is compared; none: half.", ge=1
    )
    ranges: int = setting(6, "Ranges of positions in the report.", ge=1)
    repeat_at: Annotated[tuple[Size, ...] | None, LISTED] = setting(
        None,
        "Before each of these lengths a passage from far before stands again, so that copying is "
        "measured beside the text; the report's ranges are then text and copies.",
    )
    repeat_tokens: Size = setting(256, "Of each passage that is repeated.", ge=2)
    steps: Literal["prefill", "decode"] = setting(
        "prefill",
        "What is compared is read in chunks (prefill), or one token at a time, as answers are "
        "(decode).",
    )

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        refuse_of_methods(self)
        if self.world_size != 1:
            raise ConfigError(
                f"world_size is {self.world_size}, but eval fidelity compares in one process; "
                "leave it out"
            )
        if self.tokens and self.prompt_tokens and self.prompt_tokens > self.tokens - 2:
            raise ConfigError(
                f"prompt_tokens is {self.prompt_tokens}, but of {self.tokens} tokens 2 at least "
                "must follow the prompt"
            )
        if self.repeat_at:
            if list(self.repeat_at) != sorted(self.repeat_at):
                raise ConfigError(f"repeat_at must be ascending, got {list(self.repeat_at)}")
            if self.tokens is not None:
                raise ConfigError("tokens is the last of repeat_at; leave it out")
            last, count = self.repeat_at[-1], self.repeat_tokens
            if self.prompt_tokens and self.prompt_tokens > last - count:
                raise ConfigError(
                    f"prompt_tokens is {self.prompt_tokens}, but the prompt must end before the "
                    f"last copy, of {count} tokens (repeat_tokens) up to {last} (repeat_at)"
                )
        _ = self.method_settings

    @property
    def engine(self) -> ExternalEngineConfig:
        """The engine that full attention and all methods run in."""
        own = self.model_dump(include=set(EngineConfig.model_fields) - set(METHOD_SETTINGS))
        own |= {"attention": "full", "seed": None}
        return ExternalEngineConfig(opens="razor_dist.evals.fidelity.model:FidelityModel", **own)

    @property
    def method_settings(self) -> Mapping[str, Mapping[str, Any]]:
        return settings_by_name(self.methods)
