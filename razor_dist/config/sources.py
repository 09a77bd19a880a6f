"""Gathers settings from the command line, the environment and YAML files.

A setting is looked up on the command line, then in the environment (``RAZOR_<FIELD>``), then in
the user's YAML file, then in the defaults shipped for the model (``configs/models/<name>.yaml``),
and last in the class.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import RENAMED, EngineConfig, JobConfig, ServerConfig
from razor_dist.config.validation import SettingError, is_optional, unknown

ENV_PREFIX = "RAZOR_"
# Variables with our prefix that are no settings: the ranks' meeting place, which our processes set,
# the switch of `razor_dist.kernels.compiled`, and Kubernetes' variables about a Service whose name
# begins with razor, such as RAZOR_PORT=tcp://... for a Service called razor.
_NO_SETTINGS = re.compile(
    r"RAZOR_((RENDEZVOUS|DIST_CPU_KERNELS)=|"
    r"([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)|PORT_\d+_|PORT=[a-z]+://))"
)

Config = TypeVar("Config", bound=EngineConfig)
_log = logging.getLogger(__name__)


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
    also: Collection[str] = (),
) -> Config:
    """Merge all sources of settings; raise `ConfigError` if one is wrong, unknown or unreadable.

    In ``cli``, which holds flags by field name, ``None`` means that a flag was not given, and
    ``"none"`` sets an optional setting to none and empties a list. Of ``env`` only ``RAZOR_*`` is
    read. Settings of other commands are ignored in ``env``; in the file they are ignored with a
    warning, except the names in ``also``. ``implied`` settings come from the launcher (torchrun's
    world size): they override the model's shipped defaults, and the user's settings override them.
    """
    settings = dict(implied or {})
    if yaml_path is not None:
        file = str(yaml_path)
        values = read_mapping(_config_text(file), file)
        settings |= _from_mapping(cls, values, file)
        if others := values.keys() - {*cls.model_fields, *RENAMED, *also}:
            names = ", ".join(sorted(others))
            _log.warning("%s: settings of other commands are passed over: %s", file, names)
    settings |= _from_env(cls, env or {})
    given = {name: value for name, value in (cli or {}).items() if value is not None}
    return _build(cls, settings | _named(cls, given, lambda n: f"--{n.replace('_', '-')}"))


def build_config(cls: type[Config], **values: Any) -> Config:
    """Return the configuration for keyword arguments, over the defaults shipped for the model.

    Unlike `load_config` this looks at no environment, and ``None`` is a value like any other, which
    ``"none"`` means here too.
    """
    return _build(cls, _named(cls, values, lambda name: ""))


def _build(cls: type[Config], settings: Settings) -> Config:
    model = settings["model"].value if "model" in settings else cls.model_fields["model"].default
    # A shipped model's name, not a folder or a hub id.
    if isinstance(model, str) and re.fullmatch(r"[A-Za-z0-9][\w.-]*", model):
        file = resources.files("razor_dist.configs") / "models" / f"{model}.yaml"
        if file.is_file():
            source = f"configs/models/{model}.yaml"
            settings = _from_mapping(cls, read_mapping(file.read_text(), source), source) | settings
    try:
        return cls(**{name: _value(cls, name, given.value) for name, given in settings.items()})
    except SettingError as error:
        raise ConfigError(f"{error}{_origins(error, settings)}") from None


def _origins(error: SettingError, settings: Settings) -> str:
    """Name the sources of the wrong settings; empty for keyword arguments."""
    defaults = Setting(None, "the defaults")
    found = [(name, settings.get(name, defaults).source) for name in error.names]
    alone = len(found) == 1
    said = [f"from {at}" if alone else f"{name} from {at}" for name, at in found if at]
    return f" ({', '.join(said)})" if said else ""


def _config_text(name: str) -> str:
    """Return the text of a YAML file, or of the shipped file of that name.

    ``configs/`` and ``.yaml`` are optional in a shipped file's name, which works in any folder:
    an installed wheel has no ``configs`` folder beside it.
    """
    if not os.path.exists(Path(name).expanduser()):  # also of a name that is too long
        files = (resources.files("razor_dist.configs")).iterdir()
        shipped = {Path(file.name).stem: file for file in files if file.name.endswith(".yaml")}
        wanted = name.removeprefix("configs/").removesuffix(".yaml")
        if wanted in shipped:
            return shipped[wanted].read_text(encoding="utf-8")
        if "/" not in name:
            raise ConfigError(f"--config: no such file; {unknown(wanted, shipped, 'shipped file')}")
    return read_text(Path(name), "the file")


@cache
def shipped_names() -> frozenset[str]:
    """Return the settings that a shipped model file gives a default of its own."""
    files = (resources.files("razor_dist.configs") / "models").iterdir()
    return frozenset(name for file in files for name in yaml.safe_load(file.read_text()))


def _of_commands(cls: type[Config]) -> set[str]:
    """Return the settings of ``cls`` and of all commands, which share an environment and files."""
    return {*cls.model_fields, *ServerConfig.model_fields, *JobConfig.model_fields}


def _from_mapping(cls: type[Config], values: Mapping[str, Any], source: str) -> Settings:
    known = _of_commands(cls)
    for given in values:
        if RENAMED.get(given, given) not in known:
            raise ConfigError(f"{unknown(given, known)}{_in(source)}")
    mine = {name: v for name, v in values.items() if RENAMED.get(name, name) in cls.model_fields}
    return _named(cls, mine, lambda _: source)


def read_mapping(text: str, source: str) -> dict[str, Any]:
    """Read YAML text, named ``source``; `ConfigError` unless it is a mapping of unique keys."""
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{source} is not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply for a mapping of settings") from None
    if values is None:  # an empty file, or comments only
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must hold a mapping of settings, not {values!r}")
    return {str(name): value for name, value in values.items()}


def read_text(path: Path, what: str) -> str:
    """Read a file that the user names; raise `ConfigError` if it is unreadable or not UTF-8."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} is not UTF-8 text") from None


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, where YAML libraries drop the first.

    An integer that begins with 0 is decimal, and ``1:30`` is text, as in YAML 1.2, in flags and in
    variables: PyYAML reads YAML 1.1, where ``010`` is 8 and ``1:30`` is 90.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            problem = f"{twice[0]!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag.endswith((":int", ":float")) and ":" in node.value:
            return str(node.value)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # a date such as 2024-99-99
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r} cannot be read as {kind}: {error}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        is_decimal = re.fullmatch(r"[-+]?0[0-7_]+", node.value)
        return int(node.value.replace("_", "")) if is_decimal else super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _from_env(cls: type[Config], env: Mapping[str, str]) -> Settings:
    known, mine = _of_commands(cls), {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or _NO_SETTINGS.match(f"{variable}={value}"):
            continue
        given = variable.removeprefix(ENV_PREFIX).lower()
        name = RENAMED.get(given, given)
        if name not in known:
            variables = [ENV_PREFIX + field.upper() for field in known]
            raise ConfigError(unknown(variable, variables, "environment variable"))
        if name in cls.model_fields:
            mine[given] = value
    return _named(cls, mine, lambda name: ENV_PREFIX + name.upper())


def _named(cls: type[Config], values: Mapping[str, Any], source: Callable[[str], str]) -> Settings:
    """Return settings with their source; `ConfigError` for unknown names and names given twice."""
    settings = {}
    for given, value in values.items():
        name = _current(given)
        if name not in cls.model_fields:
            raise ConfigError(f"{unknown(name, cls.model_fields)}{_in(source(given))}")
        same = [one for one in values if RENAMED.get(one, one) == name]
        if len(same) > 1:
            problem = f"{' and '.join(same)} are the same setting; give one of them"
            raise ConfigError(f"{problem}{_in(source(given))}")
        settings[name] = Setting(value, source(given))
    return settings


def _in(source: str) -> str:
    return f" (in {source})" if source else ""


def _value(cls: type[Config], name: str, value: Any) -> Any:
    """Read "none" as None for an optional setting, as () for a list that is empty by default."""
    field = cls.model_fields.get(name)
    if field is None or not isinstance(value, str) or value.lower() != "none":
        return value
    # --help shows an empty list as none.
    return None if is_optional(field) else () if field.default == () else value


def _current(name: str) -> str:
    if name in RENAMED:
        _log.warning("%s is deprecated: the setting is named %s now", name, RENAMED[name])
    return RENAMED.get(name, name)
