"""Settings of RULER."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import Size
from razor_dist.evals.baselines.presses import PRESSES, ComparingConfig
from razor_dist.evals.ruler.tasks import QUESTION_TASKS, TASKS
from razor_dist.evals.settings import (
    LISTED,
    HotpotQA,
    Methods,
    Prose,
    Squad,
    settings_by_name,
)

_BUILT_IN = ("full", "razor", "streaming")
# RULER's question is a part of its prompt, so every press sees it: one SnapKV is enough.
_PRESSES = tuple(name for name, press in PRESSES.items() if not press.with_question)
_KNOWN = {name: {"attention": name} for name in _BUILT_IN}
_KNOWN |= {name: {"press": name} for name in _PRESSES}


def check_data(tasks: Collection[str], squad: str | None, hotpotqa: str | None) -> None:
    """Refuse a question task without its data's path, and a path without its task."""
    given = zip(QUESTION_TASKS, ("squad", "hotpotqa"), (squad, hotpotqa), strict=True)
    for name, data, path in given:
        if (name in tasks) != (path is not None):
            raise ConfigError(
                f"task {name} needs {data}, the path of its data"
                if name in tasks
                else f"{data} is for task {name}, which is not among the tasks"
            )


class RulerConfig(ComparingConfig):
    """RULER's settings, the job's and the engines'; frozen."""

    tasks: Annotated[tuple[str, ...], LISTED] = Field(
        default=("synthetic",),
        description="Tasks, such as vt,cwe; synthetic: the 11 that need no data; all: 13.",
    )
    lengths: Annotated[tuple[Size, ...], LISTED] = Field(
        default=(4096,), description="Tokens of prompt and answer, such as 4096,8192."
    )
    samples: int = Field(default=20, ge=1, description="Samples of each task and length.")
    methods: Methods = Field(
        default=_BUILT_IN,
        description="What to compare: full, razor, streaming; by kvpress: h2o, snapkv, tova, "
        "pyramidkv, expected-attention; in YAML a mapping of names to engine settings.",
    )
    haystack: Prose = "auto"
    squad: Squad = None
    hotpotqa: HotpotQA = None

    def _check(self) -> None:
        for name in self.task_names:
            if name not in TASKS:
                raise ConfigError(
                    f"tasks: unknown task {name!r}; tasks are {', '.join(TASKS)}, and "
                    "synthetic and all by themselves"
                )
        check_data(self.task_names, self.squad, self.hotpotqa)
        if min(self.lengths) < 1:
            raise ConfigError(f"lengths must be at least 1 each, got {list(self.lengths)}")
        for name in self.method_settings:
            self.engine(name)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks, in the order of the paper's."""
        if self.tasks == ("all",):
            return TASKS
        if self.tasks == ("synthetic",):
            return tuple(task for task in TASKS if task not in QUESTION_TASKS)
        return tuple(sorted(self.tasks, key=lambda t: TASKS.index(t) if t in TASKS else -1))

    @property
    def method_settings(self) -> Mapping[str, Mapping[str, Any]]:
        return settings_by_name(self.methods, _KNOWN)

    @property
    def presses(self) -> list[str]:
        return [str(own["press"]) for own in self.method_settings.values() if "press" in own]

    def engine(self, method: str) -> EngineConfig:
        """Return the settings of a method's engine; refuse one that is unknown or wrong."""
        own = self.method_settings[method]
        press = own.get("press")
        if press is not None and press not in _PRESSES:
            raise ConfigError(
                f"methods: {method}: press must be one of {', '.join(_PRESSES)}, got {press!r}"
            )
        known = {"press", *EngineConfig.model_fields}
        if unknown := sorted(own.keys() - known | own.keys() & {"model"}):
            raise ConfigError(
                f"methods: {method} sets {unknown[0]}, which is "
                + ("the same for all methods" if unknown[0] == "model" else "not an engine setting")
            )
        try:
            return self._engine(own, max(self.lengths))
        except ConfigError as error:
            raise ConfigError(f"methods: {method}: {error}") from None
