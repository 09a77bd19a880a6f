"""Methods as data: settings of the engine to try, beside those that all methods of a run share."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.validation import share_of
from razor_dist.evals.selection import SELECTORS, Selection
from razor_dist.evals.settings import CHOICES, METHOD_SETTINGS, SELECTION, STREAMING_SETTINGS
from razor_dist.evals.settings import FULL as FULL
from razor_dist.heads.decision import Flags, Windows, decide, flags
from razor_dist.heads.head_map import (
    HeadMap,
    choose,
    default_head_map,
    head_map_file,
    kv_budget,
)
from razor_dist.models.loader import model_fingerprint, read_config
from razor_dist.models.registry import config_folder
from razor_dist.models.shape import ModelShape

_CHOSEN = {"percent": "{:g} %", "induction": "induction {:g} %", "echo": "echo {:g} %"}
_CHOSEN |= {"random": "random {}"}


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
    def kept(self) -> str:
        """The number of KV heads that keep the whole context, or all or none, as text."""
        if self.retrieval is None:
            return "all" if self.settings["attention"] == "full" else "none"
        return str(sum(map(sum, self.retrieval)))

    @property
    def fingerprint(self) -> str:
        about: list[Any] = [dict(self.settings), self.retrieval, self.windows]
        if self.selection is not None:
            about.append(self.selection.heads)
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


FULL_METHOD = Method(FULL, {"attention": "full"})


def shape_of(config: EngineConfig, *head_maps: HeadMap) -> ModelShape:
    """Return the shape of the settings' model; refuse head maps that are of another one."""
    model = read_config(config_folder(config.model), **config.model_options)
    shape = ModelShape.from_config(model)
    for head_map in head_maps:
        head_map.validate(shape, model_fingerprint(model))
    return shape


def check_lengths(config: EngineConfig, shape: ModelShape, longest: int, beside: int) -> None:
    """Raise `ConfigError` if a document and ``beside`` tokens are longer than the context.

    ``beside`` is room for the question and its answer; 0 if ``longest`` counts them.
    """
    most = min(config.max_model_len or shape.max_positions, shape.max_positions)
    if longest + beside > most:
        room = " of prompt and answer"
        if beside:
            room = f", {beside} of them for the question and the answer"
        raise ConfigError(
            f"lengths: {longest} is beyond {config.model}, which holds {most} tokens{room}"
        )


def methods_of(
    config: EngineConfig, settings: Mapping[str, Mapping[str, Any]], *, as_written: bool = False
) -> list[Method]:
    """Return methods by their own settings beside ``config``; refuse one that is wrong, by name.

    A `Method` has all of its settings, or ``as_written`` its own and those of ``config`` that are
    not the defaults.
    """
    methods = []
    for name, own in settings.items():
        try:
            methods.append(_method(config, name, own, as_written=as_written))
        except (ConfigError, HeadMapError) as error:
            kind = HeadMapError if isinstance(error, HeadMapError) else ConfigError
            raise kind(f"methods: {name}: {error}") from None
    return methods


def _method(config: EngineConfig, name: str, own: Mapping[str, Any], *, as_written: bool) -> Method:
    known = (*METHOD_SETTINGS, *CHOICES, *SELECTION)
    if unknown := own.keys() - set(known):
        raise ConfigError(f"{min(unknown)} is no setting of a method; those are {', '.join(known)}")
    shared = config.model_dump(include=set(METHOD_SETTINGS) - {"attention"})
    engine = EngineConfig(
        model=config.model, **shared | {key: own[key] for key in own if key in METHOD_SETTINGS}
    )
    shown = _written(config, engine, own) if as_written else _whole(engine)
    selects = own.keys() & set(SELECTION)
    if engine.attention == "streaming" or (engine.attention == "full" and not selects):
        if useless := own.keys() & {"head_map", *CHOICES, *SELECTION}:
            raise ConfigError(f"{min(useless)} is of no use with attention: {engine.attention}")
        return Method(name, shown)
    path = head_map_file(engine.head_map or str(default_head_map(config.model)))
    head_map = HeadMap.load(path)
    shape_of(config, head_map)
    retrieval, windows = _heads(head_map, own)
    if not as_written:
        chosen = (_CHOSEN[key].format(own[key]) for key in CHOICES if key in own)
        shown["head_map"] = ", ".join((path.name, *chosen))
    if not selects:
        return Method(name, shown, retrieval, windows)
    if engine.kv_dtype != "auto":
        raise ConfigError(
            f"retrieval_share reads keys of the model's own dtype, but kv_dtype is "
            f"{engine.kv_dtype}; leave it out"
        )
    if "retrieval_share" not in own:
        raise ConfigError("selector needs retrieval_share")
    selection = selection_of(own["retrieval_share"], own.get("selector", "slower"), retrieval)
    shown |= {"retrieval_share": str(own["retrieval_share"]), "selector": selection.selector}
    if engine.attention == "full":  # the map says which heads select
        return Method(name, shown, selection=selection)
    return Method(name, shown, retrieval, windows, selection)


def _whole(engine: EngineConfig) -> dict[str, Any]:
    shown: dict[str, Any] = {"attention": engine.attention}
    if engine.kv_dtype != "auto":
        shown["kv_dtype"] = engine.kv_dtype
    if engine.attention != "full":
        shown |= {key: getattr(engine, key) for key in ("prefill", *STREAMING_SETTINGS)}
    return shown


def _written(config: EngineConfig, engine: EngineConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    # Which heads were chosen, a `Method` says itself.
    chosen = {"head_map", *CHOICES} if own.keys() & set(CHOICES) else ()
    shown = {key: value for key, value in own.items() if key not in chosen}
    if shown.get("head_map"):
        shown["head_map"] = Path(shown["head_map"]).stem  # its folder decides nothing
    if engine.attention != "full":
        for key in ("prefill", *STREAMING_SETTINGS):
            if (value := getattr(config, key)) != EngineConfig.model_fields[key].default:
                shown.setdefault(key, value)
    return shown


def _heads(head_map: HeadMap, own: Mapping[str, Any]) -> tuple[Flags, Windows | None]:
    """Return the retrieval heads and windows of a map, or the heads that `CHOICES` choose.

    ``percent`` takes a share of the KV heads by the map's scores; ``induction`` and ``echo`` take
    percent of the query heads by RazorAttention's scores. ``random``, a seed, draws as many KV
    heads as the other choices keep, else as the map keeps.
    """
    for key in CHOICES:
        if isinstance(own.get(key), bool) or not isinstance(own.get(key, 0), int | float):
            raise ConfigError(f"{key} must be a number, got {own[key]!r}")
    retrieval = head_map.retrieval
    windows = None if own.keys() & set(CHOICES) else head_map.windows
    if "percent" in own:
        retrieval = choose(head_map, kv_budget(head_map, own["percent"])).retrieval
    if own.keys() & {"induction", "echo"}:
        if "percent" in own:
            raise ConfigError("give percent, or induction and echo, not both")
        if not head_map.scores.keys() >= {"induction", "echo"}:
            raise HeadMapError(
                f"induction and echo are RazorAttention's, but a map of method "
                f"{head_map.method!r} has no such scores; make one with: razor-dist identify razor"
            )
        percents = own.get("induction", 0), own.get("echo", 0)
        retrieval = decide(head_map.scores, *percents, head_map.group).retrieval
    if "random" in own:
        layers, heads = len(retrieval), len(retrieval[0])
        every = list(itertools.product(range(layers), range(heads)))
        drawn = random.Random(own["random"]).sample(every, sum(map(sum, retrieval)))
        retrieval = flags(drawn, layers, heads)
    return retrieval, windows


def selection_of(share: Any, selector: Any, heads: Flags) -> Selection:
    """Return a rule; ``share`` is a number below 1 or a fraction such as ``1/32``."""
    found = share_of(share)
    if not found:
        raise ConfigError("retrieval_share is 0, by which nothing is chosen; leave it out")
    if selector not in SELECTORS:
        raise ConfigError(f"selector must be of {', '.join(SELECTORS)}, got {selector!r}")
    return Selection(found, selector, heads)
