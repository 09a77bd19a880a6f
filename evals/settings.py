"""What the settings of evaluations share; imported for ``--help``, so without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationInfo, WrapValidator

from razor_dist.config.schema import EngineConfig
from razor_dist.config.validation import SettingError

# What decides what a streaming head keeps.
WINDOW = ("window_min", "window_ratio", "window_max", "sink_tokens", "block")
STREAMING_SETTINGS = (*WINDOW, "compensation")
# In which a method may differ from the others: what a head sees, and in which dtype it is kept.
METHOD_SETTINGS = ("attention", "head_map", "prefill", "kv_dtype", *STREAMING_SETTINGS)


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
