"""Gathers settings from the command line, the environment and YAML files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig, ServerConfig
from razor_dist.config.validation import SettingError, is_optional, unknown
from razor_dist.jobs.config import JobConfig

ENV_PREFIX = "RAZOR_"
# Variables with our prefix that one of our processes sets for another; they are no settings.
INTERNAL_ENV = frozenset({"RAZOR_RENDEZVOUS"})

Config = TypeVar("Config", bound=EngineConfig)


class Setting(NamedTuple):
    """A value and the place it was found in, as the user would name that place."""

    value: Any
    source: str


Settings = dict[str, Setting]


def load_config(
    cls: type[Config],
    cli: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    yaml_path: str | os.PathLike[str] | None = None,
    *,
    implied: Mapping[str, Setting] | None = None,
) -> Config:
    """Merge all sources of settings and validate the result.

    Parameters
    ----------
    cls : type
        `EngineConfig` or `ServerConfig`.
    cli : mapping, optional
        Flags by field name; ``None`` means that a flag was not given, ``"none"`` sets an optional
        setting to none.
    env : mapping, optional
        The environment, usually ``os.environ``; only ``RAZOR_*`` is looked at.
    yaml_path : path, optional
        The user's YAML file: a mapping of settings.
    implied : mapping, optional
        Settings that follow from the surroundings (torchrun's world size); weaker than what the
        user said, stronger than the model's shipped defaults.

    Raises
    ------
    ConfigError
        If a name is unknown, a value wrong, or the YAML file unreadable.
    """
    given = {name: value for name, value in (cli or {}).items() if value is not None}
    layers = [
        dict(implied or {}),
        _from_yaml(cls, Path(yaml_path)) if yaml_path is not None else {},
        _from_env(cls, env or {}),
        _named(cls, given, lambda name: f"--{name.replace('_', '-')}"),
    ]
    return _build(cls, layers)


def build_config(cls: type[Config], **values: Any) -> Config:
    """The configuration for keyword arguments, over the defaults shipped for the model.

    Unlike `load_config` this looks at no environment, and ``None`` is a value like any other.

    Raises
    ------
    ConfigError
        As `load_config`.
    """
    return _build(cls, [{name: Setting(value, "") for name, value in values.items()}])


def _build(cls: type[Config], layers: Iterable[Settings]) -> Config:
    settings: Settings = {}
    for layer in layers:
        settings |= layer
    default = Setting(cls.model_fields["model"].default, "default")
    settings = _shipped(cls, settings.get("model", default).value) | settings
    try:
        return cls(**{name: setting.value for name, setting in settings.items()})
    except SettingError as error:
        source = settings[error.name].source
        suffix = f" (from {source})" if source else ""
        raise ConfigError(f"{error}{suffix}") from None


def _shipped(cls: type[Config], model: Any) -> Settings:
    """The defaults shipped for a model; none for a folder or a hub id."""
    if not isinstance(model, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", model):
        return {}
    file = resources.files("razor_dist.configs") / "models" / f"{model}.yaml"
    if not file.is_file():
        return {}
    return _from_text(cls, file.read_text(), f"configs/models/{model}.yaml")


def _from_yaml(cls: type[Config], path: Path) -> Settings:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the file {path} (--config): {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the file {path} (--config) is not UTF-8 text") from None
    return _from_text(cls, text, str(path))


def _from_text(cls: type[Config], text: str, source: str) -> Settings:
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{source} is not valid YAML: {problem}") from None
    if values is None:  # an empty file, or comments only
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must hold a mapping of settings, not {values!r}")
    return _named(cls, {str(name): value for name, value in values.items()}, lambda _: source)


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, where YAML libraries drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _from_env(cls: type[Config], env: Mapping[str, str]) -> Settings:
    values = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in env.items()
        if name.startswith(ENV_PREFIX) and name not in INTERNAL_ENV
    }
    for name in values:
        # All commands share one environment, so each one's settings are known everywhere.
        fields = {**cls.model_fields, **ServerConfig.model_fields, **JobConfig.model_fields}
        if name not in fields:
            known = [ENV_PREFIX + field.upper() for field in fields]
            raise ConfigError(unknown(ENV_PREFIX + name.upper(), known, "environment variable"))
    mine = {name: value for name, value in values.items() if name in cls.model_fields}
    return _named(cls, mine, lambda name: ENV_PREFIX + name.upper())


def _named(cls: type[Config], values: Mapping[str, Any], source: Callable[[str], str]) -> Settings:
    """Check the names, and read "none" as ``None`` where a setting may be none."""
    settings = {}
    for name, value in values.items():
        if name not in cls.model_fields:
            raise ConfigError(f"{unknown(name, cls.model_fields)} (in {source(name)})")
        is_none = isinstance(value, str) and value.lower() == "none"
        if is_none and is_optional(cls.model_fields[name]):
            value = None
        settings[name] = Setting(value, source(name))
    return settings
