"""Methods as data: settings of the engine to try, beside those that all methods of a run share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.validation import share_of
from razor_dist.evals.selection import SELECTORS, Selection
from razor_dist.evals.settings import (
    METHOD_SETTINGS,
    SELECTION,
    STREAMING_SETTINGS,
    streaming_settings,
)
from razor_dist.heads.decision import Flags, Windows
from razor_dist.heads.head_map import (
    HeadMap,
    choose,
    default_head_map,
    kv_budget,
    shipped_head_map,
)
from razor_dist.models.loader import model_fingerprint, read_config
from razor_dist.models.registry import config_folder
from razor_dist.models.shape import ModelShape

FULL = "full"  # the method that others are measured against
# The budget of KV heads, by the head map's own scores; else the map's decision is taken.
_PERCENT = "percent"

_SMALL: Mapping[str, Any] = {"window_min": 256, "window_ratio": 8, "block": 64}
_LARGE: Mapping[str, Any] = {"window_min": 512, "window_ratio": 5, "block": 64}
_CONSTANT: Mapping[str, Any] = {"window_min": 512, "window_ratio": None, "block": 64}
_14: Mapping[str, Any] = {"head_map": "smollm2-14-1"}
_28: Mapping[str, Any] = {"head_map": "smollm2"}

METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {"attention": "full"},
    "exact-256": {"prefill": "exact", **_14, **_SMALL},
    "exact-256-nocomp": {"prefill": "exact", "compensation": False, **_14, **_SMALL},
    "local-512c-28": {"prefill": "local", **_28, **_CONSTANT},
    "local-512-28": {"prefill": "local", **_28, **_LARGE},
    "local-256-28": {"prefill": "local", **_28, **_SMALL},
    "local-512c": {"prefill": "local", **_14, **_CONSTANT},
    "local-512": {"prefill": "local", **_14, **_LARGE},
    "local-256": {"prefill": "local", **_14, **_SMALL},
    "streaming-256": {"attention": "streaming", "prefill": "local", **_SMALL},
}
"""Settings of the embedded model by name: 14 % + 1 % of the heads unless the name ends in 28 (28 %
+ 2 %); a window of a fixed length has a c. Head maps are named as `shipped_head_map` names them."""


@dataclass(frozen=True)
class Method:
    """Engine settings to try, beside those that all methods of a grid share."""

    name: str
    settings: Mapping[str, Any]  # a ``head_map`` among them is a name for people
    retrieval: Flags | None = None  # None where ``attention`` is full or streaming, which says it
    windows: Windows | None = None  # of streaming heads that have their own
    selection: Selection | None = None  # of blocks, where not all are read

    @property
    def is_full(self) -> bool:
        return self.shares_prefill and self.settings.get("attention") == "full"

    @property
    def shares_prefill(self) -> bool:
        """True where a document's keys and values are those of full attention."""
        if self.settings.keys() & {"kv_dtype", "retrieval_share"} or self.selection is not None:
            return False
        return self.settings.get("attention") == "full" or self.settings.get("prefill") == "exact"

    @property
    def fingerprint(self) -> str:
        about: list[Any] = [dict(self.settings), self.retrieval, self.windows]
        if self.selection is not None:
            about.append(self.selection.heads)
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


FULL_METHOD = Method(FULL, {"attention": "full"})


def named_method(name: str, model: str) -> Method:
    """Return one of `METHODS`, with its head map's decision.

    ``NAME/N`` is the method whose retrieval heads read the blocks that the slower dimensions give
    at least 1/N of a query's mass (`razor_dist.evals.selection`); beside full attention, these are
    the heads of the model's own map.
    """
    base, _, parts = name.partition("/")
    if base not in METHODS:
        raise ConfigError(f"methods must be of {', '.join(METHODS)}, got {name!r}")
    own = METHODS[base]
    retrieval = None
    if "head_map" in own:
        retrieval = HeadMap.load(shipped_head_map(own["head_map"])).retrieval
    if not parts:
        return Method(name, own, retrieval)
    if own.get("attention") == "streaming":
        raise ConfigError(f"methods: {name}: {base} has no retrieval heads to choose blocks for")
    heads = retrieval or HeadMap.load(default_head_map(model)).retrieval
    selection = selection_of(f"1/{parts}", "slower", heads)
    shown = {**own, "retrieval_share": f"1/{parts}", "selector": "slower"}
    return Method(name, shown, retrieval, selection=selection)


def beside_full(
    config: EngineConfig,
    prefills: Sequence[str],
    own: Mapping[str, tuple[Flags, Mapping[str, Any]]],
) -> list[Method]:
    """Return full attention, and for each prefill streaming and the heads and settings by name."""
    found = [FULL_METHOD]
    for prefill in prefills:
        window = streaming_settings(config, prefill)
        found.append(Method(f"streaming, {prefill}", {"attention": "streaming", **window}))
        found += [
            Method(f"{name}, {prefill}", {**window, **settings}, retrieval)
            for name, (retrieval, settings) in own.items()
        ]
    return found


def shape_of(config: EngineConfig, *head_maps: HeadMap) -> ModelShape:
    """Return the shape of the settings' model; refuse head maps that are of another one."""
    model = read_config(config_folder(config.model), **config.model_options)
    shape = ModelShape.from_config(model)
    for head_map in head_maps:
        head_map.validate(shape, model_fingerprint(model))
    return shape


def methods_of(config: EngineConfig, settings: Mapping[str, Mapping[str, Any]]) -> list[Method]:
    """Return methods by their own settings beside ``config``; refuse one that is wrong, by name."""
    methods = []
    for name, own in settings.items():
        try:
            methods.append(_method(config, name, own))
        except (ConfigError, HeadMapError) as error:
            kind = HeadMapError if isinstance(error, HeadMapError) else ConfigError
            raise kind(f"methods: {name}: {error}") from None
    return methods


def _method(config: EngineConfig, name: str, own: Mapping[str, Any]) -> Method:
    known = (_PERCENT, *METHOD_SETTINGS, *SELECTION)
    if unknown := own.keys() - set(known):
        raise ConfigError(f"{min(unknown)} is no setting of a method; those are {', '.join(known)}")
    shared = config.model_dump(include=set(METHOD_SETTINGS) - {"attention"})
    engine = EngineConfig(
        model=config.model, **shared | {key: own[key] for key in own if key in METHOD_SETTINGS}
    )
    shown: dict[str, Any] = {"attention": engine.attention}
    if engine.kv_dtype != "auto":
        shown["kv_dtype"] = engine.kv_dtype
    if engine.attention != "full":
        shown |= {key: getattr(engine, key) for key in ("prefill", *STREAMING_SETTINGS)}
    selects = own.keys() & set(SELECTION)
    if engine.attention == "streaming" or (engine.attention == "full" and not selects):
        if useless := own.keys() & {"head_map", _PERCENT, *SELECTION}:
            raise ConfigError(f"{min(useless)} is of no use with attention: {engine.attention}")
        return Method(name, shown)
    path = Path(engine.head_map or default_head_map(config.model))
    head_map = HeadMap.load(path)
    shape_of(config, head_map)
    retrieval, windows = head_map.retrieval, head_map.windows
    percent, shown["head_map"] = own.get(_PERCENT), path.name
    if percent is not None:
        if isinstance(percent, bool) or not isinstance(percent, int | float):
            raise ConfigError(f"{_PERCENT} must be a number, got {percent!r}")
        shown["head_map"] = f"{path.name}, {percent:g} %"
        retrieval, windows = choose(head_map, kv_budget(head_map, percent)).retrieval, None
    if not selects:
        return Method(name, shown, retrieval, windows)
    if engine.kv_dtype != "auto":
        raise ConfigError(
            f"retrieval_share reads keys of the model's own dtype, but kv_dtype is "
            f"{engine.kv_dtype}; leave it out"
        )
    selection = selection_of(own.get("retrieval_share"), own.get("selector", "slower"), retrieval)
    shown |= {"retrieval_share": str(own["retrieval_share"]), "selector": selection.selector}
    if engine.attention == "full":  # the map says which heads select
        return Method(name, shown, selection=selection)
    return Method(name, shown, retrieval, windows, selection)


def selection_of(share: Any, selector: Any, heads: Flags) -> Selection:
    """Return a rule; ``share`` is a number below 1 or a fraction such as ``1/32``."""
    found = share_of(share)
    if not found:
        raise ConfigError("retrieval_share is 0, by which nothing is chosen; leave it out")
    if selector not in SELECTORS:
        raise ConfigError(f"selector must be of {', '.join(SELECTORS)}, got {selector!r}")
    return Selection(found, selector, heads)
