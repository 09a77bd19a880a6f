"""The methods that the settings of ``eval fidelity`` name, with their head maps' decisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.fidelity.config import SETTINGS, FidelityConfig
from razor_dist.evals.needle.config import STREAMING_SETTINGS
from razor_dist.evals.needle.replay import Method
from razor_dist.heads.head_map import HeadMap, choose, default_head_map, kv_budget
from razor_dist.models.loader import model_fingerprint, read_config
from razor_dist.models.registry import config_folder
from razor_dist.models.shape import ModelShape

# The budget of KV heads, by the head map's own scores; else the map's decision is taken.
_PERCENT = "percent"


def methods_of(config: FidelityConfig) -> list[Method]:
    """Return the methods; refuse one that is wrong by its name."""
    methods = []
    for name, own in config.method_settings.items():
        try:
            methods.append(_method(config, name, own))
        except (ConfigError, HeadMapError) as error:
            kind = HeadMapError if isinstance(error, HeadMapError) else ConfigError
            raise kind(f"methods: {name}: {error}") from None
    return methods


def _method(config: FidelityConfig, name: str, own: Mapping[str, Any]) -> Method:
    known = (_PERCENT, *SETTINGS)
    percent = own.get(_PERCENT)
    if unknown := own.keys() - set(known):
        raise ConfigError(f"{min(unknown)} is no setting of a method; those are {', '.join(known)}")
    shared = config.model_dump(include=set(SETTINGS) - {"attention"})
    engine = EngineConfig(
        model=config.model, **shared | {key: own[key] for key in own if key != _PERCENT}
    )
    shown: dict[str, Any] = {"attention": engine.attention}
    if engine.kv_dtype != "auto":
        shown["kv_dtype"] = engine.kv_dtype
    if engine.attention != "full":
        shown |= {key: getattr(engine, key) for key in ("prefill", *STREAMING_SETTINGS)}
    if engine.attention != "razor":
        if useless := own.keys() & {"head_map", _PERCENT}:
            raise ConfigError(f"{min(useless)} is of no use with attention: {engine.attention}")
        return Method(name, shown)
    path = Path(engine.head_map or default_head_map(config.model))
    head_map = HeadMap.load(path)
    model = read_config(config_folder(config.model), trust_remote_code=config.trust_remote_code)
    head_map.validate(ModelShape.from_config(model), model_fingerprint(model))
    if percent is None:
        shown["head_map"] = path.name
        return Method(name, shown, head_map.retrieval, head_map.windows)
    if isinstance(percent, bool) or not isinstance(percent, int | float):
        raise ConfigError(f"{_PERCENT} must be a number, got {percent!r}")
    shown["head_map"] = f"{path.name}, {percent:g} %"
    return Method(name, shown, choose(head_map, kv_budget(head_map, percent)).retrieval)
