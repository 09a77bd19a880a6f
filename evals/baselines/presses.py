"""kvpress's methods: their names in our evaluations, and the settings of a model that runs one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.extras import install_command
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.evals.settings import (
    BUILT_IN,
    CHOICES,
    NAMED,
    SELECTION,
    Methods,
    refuse_attention,
    setting,
    settings_by_name,
)
from razor_dist.heads.head_map import head_map_file
from razor_dist.jobs.task import ExternalEngineConfig

if TYPE_CHECKING:
    from razor_dist.models.shape import ModelShape

KVPRESS = "0.5.5"  # the release that was read and tested
INSTALL = f"{install_command('baselines')} && pip install --no-deps kvpress=={KVPRESS}"
# What it knows, by transformers' names; Gemma 3 only as a model of text and pictures.
_MODEL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
# What it imports beside what razor_dist needs itself: the extra.
_IMPORTS = ("cachetools", "datasets", "fire", "requests")


class Press(NamedTuple):
    name: str  # of its class there
    attention: Literal["sdpa", "eager"] = "sdpa"  # transformers'; eager returns its weights
    with_question: bool = False  # shown the question before it drops anything of the document


PRESSES: Mapping[str, Press] = {
    "h2o": Press("ObservedAttentionPress", attention="eager"),
    "snapkv": Press("SnapKVPress"),
    "snapkv-query-aware": Press("SnapKVPress", with_question=True),
    "tova": Press("TOVAPress"),
    "pyramidkv": Press("PyramidKVPress"),
    "expected-attention": Press("ExpectedAttentionPress"),
}
"""By the name of the method; settings within a press are kvpress's own."""


class BaselineConfig(ExternalEngineConfig):
    """Settings of transformers' own model with a press; build it with `of`. Frozen."""

    opens: str = Field("razor_dist.evals.baselines.model:PressedModel", exclude=True)

    press: str  # of `PRESSES`
    # Part of full attention's keys and values that it keeps; None: as many bytes as razor.
    kv_budget: float | None

    @classmethod
    def of(cls, press: str, engine: Mapping[str, Any], kv_budget: float | None) -> BaselineConfig:
        """Take the place of an engine of such settings; refuse one that is for our engine alone."""
        ours_alone: dict[str, str | int] = {"weights": "replicated", "weight_dtype": "auto"}
        ours_alone |= {"kv_dtype": "auto", "retrieval_share": 0}
        for name, needed in ours_alone.items():
            if engine[name] != needed:
                raise ConfigError(
                    f"{name} is {engine[name]}, but the method {press} runs on transformers' own "
                    f"model, which knows {needed} only"
                )
        own = {"attention": "razor"} if kv_budget is None else {"attention": "full"}
        head_map = engine["head_map"] if kv_budget is None else None
        # One rank, which holds all: what razor keeps on it is the budget.
        shared = {**engine, **own, "head_map": head_map, "world_size": 1}
        return cls(**shared, press=press, kv_budget=kv_budget)


class ComparingConfig(JobConfig):
    """Settings of a job that compares our methods with kvpress's; frozen."""

    known_presses: ClassVar[tuple[str, ...]] = tuple(PRESSES)

    methods: Methods = setting(
        ("full", "razor", "streaming"),
        f"What to compare: {NAMED}; by kvpress: {', '.join(PRESSES)}; snapkv-query-aware and duo "
        "(--duo-head-map) in eval needle alone.",
    )
    seed: int = setting(0, "Of the documents.", ge=0, lt=2**63)
    kv_budget: float | None = setting(
        None, "Part of full attention's KV that kvpress's keep; none: razor's bytes.", gt=0, le=1
    )

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        refuse_attention(self)
        if self.kv_budget is not None and not self.presses:
            raise ConfigError("kv_budget is for kvpress's methods, of which there is none")
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Refuse settings that do not fit each other."""

    @property
    def known(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of the methods that have a name of their own."""
        return {**BUILT_IN, **{name: {"press": name} for name in self.known_presses}}

    @property
    def method_settings(self) -> Mapping[str, Mapping[str, Any]]:
        return settings_by_name(self.methods, self.known)

    @property
    def presses(self) -> list[str]:
        return [str(own["press"]) for own in self.method_settings.values() if "press" in own]

    @property
    def shares_prefix(self) -> bool:
        """True where prompts take what they share from the prefix cache."""
        return False

    def engine(self, method: str, longest: int) -> EngineConfig:
        """Return the settings of a method's engine, for prompts of up to ``longest`` tokens.

        Raises `ConfigError` for settings that are unknown or wrong, with the method's name.
        """
        own = dict(self.method_settings[method])
        try:
            press = own.pop("press", None)
            if press not in (None, *self.known_presses):
                known = ", ".join(self.known_presses)
                raise ConfigError(f"press must be one of {known}, got {press!r}")
            if "model" in own:
                raise ConfigError("model is the same for all methods")
            if unknown := sorted(own.keys() - EngineConfig.model_fields.keys()):
                grids = unknown[0] in (*CHOICES, *SELECTION)
                where = "; it is for eval grid and eval fidelity" if grids else ""
                raise ConfigError(f"{unknown[0]} is not an engine setting{where}")
            shared = self.model_dump(include=set(EngineConfig.model_fields))
            # No method takes memory for other prompts.
            shared |= {"max_model_len": longest, "prefix_cache": self.shares_prefix}
            if press is not None or own.get("attention", "razor") != "razor":
                shared["retrieval_share"] = 0.0  # what razor is compared with reads all
            shared |= own
            if isinstance(shared["head_map"], str):
                shared["head_map"] = str(head_map_file(shared["head_map"]))
            if press is None:
                return EngineConfig(**shared)
            return BaselineConfig.of(press, shared, self.kv_budget)
        except ConfigError as error:
            raise ConfigError(f"methods: {method}: {error}") from None

    def refuse_shares(self, shape: ModelShape, longest: int) -> None:
        """Refuse a method whose heads cannot choose blocks of keys, before others are asked."""
        from razor_dist.models.shape import share_refusal

        for name in self.method_settings:
            if reason := share_refusal(self.engine(name, longest), shape):
                raise ConfigError(f"methods: {name}: retrieval_share {reason}; leave it out")

    def limits(self) -> tuple[ModelShape, int]:
        """Return the model's shape, and the tokens of prompt and answer that it may have."""
        from razor_dist.models.loader import read_config
        from razor_dist.models.registry import config_folder
        from razor_dist.models.shape import ModelShape

        model = read_config(config_folder(self.model), **self.model_options)
        check_installed(self.presses)
        if self.presses and model.model_type not in _MODEL_TYPES:
            raise ModelError(
                f"the method {self.presses[0]} is kvpress's, which knows models of type "
                f"{', '.join(_MODEL_TYPES)}; {self.model} is of type {model.model_type!r}"
            )
        shape = ModelShape.from_config(model)
        return shape, min(self.max_model_len or shape.max_positions, shape.max_positions)


def check_installed(methods: Collection[str]) -> None:
    """Raise `ConfigError`, with the command, unless what presses need is installed."""
    needing = [method for method in methods if method in PRESSES]
    if not needing:
        return
    command = f"install the extra baselines: {INSTALL}"
    try:
        found = version("kvpress")
    except PackageNotFoundError:
        found = "not"
    if found != KVPRESS:
        raise ConfigError(
            f"the method {needing[0]} is kvpress's, of which release {KVPRESS} is needed and "
            f"{found} installed; {command}"
        )
    missing = [name for name in _IMPORTS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the method {needing[0]} is kvpress's, which needs {', '.join(missing)}; {command}"
        )
