"""kvpress's methods: their names in our evaluations, and the settings of a model that runs one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import JobConfig
from razor_dist.jobs.task import ExternalEngineConfig

if TYPE_CHECKING:
    from razor_dist.evals.baselines.client import PressLLM

KVPRESS = "0.5.5"
"""The release that was read and tested."""
INSTALL = f"pip install 'razor-dist[baselines]' && pip install --no-deps kvpress=={KVPRESS}"
# What it knows, by transformers' names; Gemma 3 only as a model of text and pictures.
_MODEL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
# What it imports beside what razor_dist needs itself: the extra.
_IMPORTS = ("cachetools", "datasets", "fire", "requests")


class Press(NamedTuple):
    """A method of kvpress.

    `name` is its class there, `attention` the one of transformers that it needs: ``eager`` returns
    its weights. `with_question`: it is shown the question before it drops anything, where that is
    asked after the document.
    """

    name: str
    attention: Literal["sdpa", "eager"] = "sdpa"
    with_question: bool = False


PRESSES: Mapping[str, Press] = MappingProxyType(
    {
        "h2o": Press("ObservedAttentionPress", attention="eager"),
        "snapkv": Press("SnapKVPress"),
        "snapkv-query-aware": Press("SnapKVPress", with_question=True),
        "tova": Press("TOVAPress"),
        "pyramidkv": Press("PyramidKVPress"),
        "expected-attention": Press("ExpectedAttentionPress"),
    }
)
"""By the name of the method; settings within a press are kvpress's own."""


class BaselineConfig(ExternalEngineConfig):
    """Settings of transformers' own model with a press; build it with `of`. Frozen.

    Attributes
    ----------
    press : str
        Of `PRESSES`.
    kv_budget : float or None
        Part of full attention's keys and values that it keeps; None: as many bytes as razor by the
        engine's settings.
    """

    press: str
    kv_budget: float | None

    @classmethod
    def of(cls, press: str, engine: Mapping[str, Any], kv_budget: float | None) -> BaselineConfig:
        """For a method, in the place of an engine of such settings.

        Raises
        ------
        ConfigError
            If one of them is for our engine alone.
        """
        for name, needed in (("weights", "replicated"), ("kv_dtype", "auto")):
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

    def open(self) -> PressLLM:
        """See `ExternalEngineConfig`."""
        from razor_dist.evals.baselines.client import PressLLM

        return PressLLM(self)


class ComparingConfig(JobConfig):
    """Settings of a job that compares our methods with kvpress's; frozen."""

    kv_budget: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Part of full attention's KV that kvpress's keep; none: razor's bytes.",
    )


def check_presses(methods: Collection[str], model: str, model_type: str) -> None:
    """Check that the presses among ``methods`` can run, before anything else does.

    Raises
    ------
    ConfigError
        If what they need is not installed; the message has the command.
    ModelError
        If kvpress does not know such models.
    """
    check_installed(methods)
    needing = [method for method in methods if method in PRESSES]
    if needing and model_type not in _MODEL_TYPES:
        raise ModelError(
            f"the method {needing[0]} is kvpress's, which knows models of type "
            f"{', '.join(_MODEL_TYPES)}; {model} is of type {model_type!r}"
        )


def check_installed(methods: Collection[str]) -> None:
    """Check that what the presses among ``methods`` need is installed.

    Raises
    ------
    ConfigError
        If it is not, with the command that installs it.
    """
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
