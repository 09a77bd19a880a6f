"""Settings of the needle test, with the names of the package needlehaystack where it has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import Size
from razor_dist.config.validation import check_percent
from razor_dist.evals.baselines.presses import ComparingConfig
from razor_dist.evals.needle.presets import PRESETS, Preset
from razor_dist.evals.settings import (
    BUILT_IN,
    LISTED,
    NAMED,
    Depths,
    Lengths,
    Methods,
    Prose,
    refuse_of_methods,
    setting,
    settings_by_name,
    shipped_methods,
)

GRID_METHODS = "grid_smollm2"  # the file in ``configs`` of what `eval grid` compares
Place = tuple[int, int, int]  # length, depth and which needle
# Given by a list or by its ends, and not by both; names of the latter begin so.
_RANGES = {
    "context_lengths": "context_lengths_",
    "document_depth_percents": "document_depth_percent_",
}


class NeedleConfig(ComparingConfig):
    """The needle test's settings, the job's and the engines'; frozen."""

    max_num_seqs: int = setting(
        2, "Sequences at once: the document, and questions asked of it.", ge=2
    )
    duo_head_map: str | None = setting(
        None, "Path of the head map of the method duo.", min_length=1
    )
    preset: Literal["number", "duoattention", "razorattention", "words"] = setting(
        "number", "What is hidden and how it is asked and scored."
    )
    query: Literal["after", "before", "middle"] = setting(
        "after", "Where the question stands: after the document, before it, at the needle."
    )
    haystack: str | None = setting(
        None,
        "essays, reference, noise, auto, a folder of .txt files; none: the preset's.",
        min_length=1,
    )
    context_lengths: Annotated[tuple[Size, ...] | None, LISTED] = setting(
        None, "Tokens of prompt and answer; none: from min to max."
    )
    context_lengths_min: Size = setting(1000, "The shortest.", ge=1)
    context_lengths_max: Size | None = setting(
        None, "The longest; none: all that the model holds.", ge=1
    )
    context_lengths_num_intervals: int | None = setting(
        None, "How many lengths; none: the preset's number.", ge=1
    )
    document_depth_percents: Annotated[tuple[float, ...] | None, LISTED] = setting(
        None, "Percent of the document before the needle; none: min to max."
    )
    document_depth_percent_min: float = setting(0, "The least.", ge=0, le=100)
    document_depth_percent_max: float = setting(100, "The most.", ge=0, le=100)
    document_depth_percent_intervals: int | None = setting(
        None, "How many depths; none: the preset's number.", ge=1
    )
    document_depth_percent_interval_type: Literal["linear", "sigmoid"] = setting(
        "linear", "Evenly spread, or crowded towards both ends."
    )
    needles: int = setting(1, "Needles in a document, each asked for by itself.", ge=1)
    share_depths: bool = setting(
        False, "Hide the needles of all depths in one document, read once."
    )
    repeats: int = setting(1, "Other documents of the same kind.", ge=1)

    @property
    def known(self) -> Mapping[str, Mapping[str, Any]]:
        return {**super().known, "duo": {"attention": "razor", "head_map": self.duo_head_map}}

    def _check(self) -> None:
        for name, stem in _RANGES.items():
            ends = sorted(end for end in self.model_fields_set if end.startswith(stem))
            if getattr(self, name) is not None and ends:
                raise ConfigError(f"give either {name} or {ends[0]}, not both")
        if min(lengths := self.context_lengths or (1,)) < 1:
            raise ConfigError(f"context_lengths must be at least 1 each, got {list(lengths)}")
        for percent in self.document_depth_percents or ():
            check_percent("document_depth_percents", percent)
        low, high = self.document_depth_percent_min, self.document_depth_percent_max
        if low > high:
            raise ConfigError(
                f"document_depth_percent_min is {low:g}, above document_depth_percent_max, {high:g}"
            )
        methods = self.method_settings
        maps = [
            own.get("head_map", self.head_map)
            for own in methods.values()
            if "press" not in own and own.get("attention", "razor") == "razor"
        ]
        for name, own in methods.items():
            if name.partition("/")[0] == "duo" and own.get("head_map", "") is None:
                raise ConfigError(f"the method {name} needs duo_head_map, the path of its head map")
        if self.presses and self.kv_budget is None:
            maps.append(self.head_map)
        for name, whose in (("duo_head_map", "duo"), ("head_map", "razor")):
            if (path := getattr(self, name)) is not None and path not in maps:
                raise ConfigError(
                    f"{name} is for the method {whose}, but methods are {list(methods)}"
                )
        for name in methods:
            self.engine(name, 1)  # which may refuse
        self._check_preset()

    def _check_preset(self) -> None:
        settings = self.settings
        if self.query not in settings.layouts:
            raise ConfigError(
                f"query is {self.query}, but preset {self.preset} asks only "
                f"{' or '.join(settings.layouts)} the document"
            )
        if self.haystack is not None and not settings.haystack:
            raise ConfigError(f"haystack is of no use: preset {self.preset} makes its own text")
        together = self.needles * (len(self.depths) if self.share_depths else 1)
        if together > settings.most_needles:
            raise ConfigError(
                f"preset {self.preset} can hide {settings.most_needles} in a document, not "
                f"{together} (needles: {self.needles}, share_depths: {self.share_depths})"
            )

    @property
    def settings(self) -> Preset:
        return PRESETS[self.preset]

    @property
    def depths(self) -> tuple[float, ...]:
        """The percents of a document before the needle, ascending."""
        if self.document_depth_percents is not None:
            return tuple(sorted(self.document_depth_percents))
        count = self.document_depth_percent_intervals or self.settings.depths
        even = spread(self.document_depth_percent_min, self.document_depth_percent_max, count)
        linear = self.document_depth_percent_interval_type == "linear"
        return tuple(sorted({float(round(d)) if linear else sigmoid(d) for d in even}))

    def lengths(self, most: int) -> tuple[int, ...]:
        """Return the tokens of prompt and answer, ascending; refuse more than ``most``."""
        name = "context_lengths_max"
        if self.context_lengths is not None:
            name, found = "context_lengths", tuple(sorted(self.context_lengths))
        else:
            count = self.context_lengths_num_intervals or self.settings.lengths
            last = self.context_lengths_max or most
            if self.context_lengths_min > last:
                raise ConfigError(
                    f"context_lengths_min is {self.context_lengths_min}, above the longest, {last}"
                )
            found = tuple(sorted(set(map(round, spread(self.context_lengths_min, last, count)))))
        if found[-1] > most:
            raise ConfigError(
                f"{name} is {found[-1]}, but {self.model} holds {most} tokens of prompt and answer"
            )
        return found


class GridConfig(EngineConfig):
    """Settings of a grid: the engine's, and of documents with one needle each; frozen."""

    group: ClassVar[str] = "Documents"

    lengths: Lengths = (2500, 5000)
    depths: Depths = (10, 30, 50, 70, 90)
    needles: int = setting(2, "Documents of each length and depth, each another.", ge=1)
    haystack: Prose = "auto"
    seed: int = setting(0, "Of the documents.", ge=0)

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if min(self.lengths) < 1:
            raise ConfigError(f"lengths must be numbers of tokens, got {list(self.lengths)}")
        for depth in self.depths:
            check_percent("depths", depth)

    @property
    def places(self) -> list[Place]:
        return sorted(itertools.product(self.lengths, self.depths, range(self.needles)))


class PlacesConfig(GridConfig):
    """Settings of a grid of 50 places; frozen."""

    lengths: Lengths = (1500, 2500, 4000, 5000, 7000)
    depths: Depths = (0, 25, 50, 75, 100)
    haystack: Prose = "essays"


class NeedleGridConfig(PlacesConfig):
    methods: Methods = setting(
        ("all",),
        f"What to compare: names in configs/{GRID_METHODS}.yaml, or all: every one; {NAMED}.",
    )
    preset: Literal["number", "words"] = setting(
        "number", "What is hidden; words: the needle model's, in its own text."
    )
    percents: Annotated[tuple[float, ...] | None, LISTED] = setting(
        None,
        "Percents of KV heads that each head map among the methods keeps, by its scores; none: "
        "its own.",
    )

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        refuse_of_methods(self)
        methods = self.method_settings
        if self.percents and not any(name.endswith(".json") for name in self.methods):
            raise ConfigError(
                f"percents is for methods that are paths of head maps, but methods are "
                f"{list(methods)}"
            )
        if self.head_map is not None and all(
            "head_map" in own
            or own.get("attention") == "streaming"
            or (own.get("attention") == "full" and "retrieval_share" not in own)
            for own in methods.values()
        ):
            raise ConfigError(
                f"head_map is for methods without one of their own, but methods are {list(methods)}"
            )

    @property
    def method_settings(self) -> Mapping[str, Mapping[str, Any]]:
        shipped = shipped_methods(GRID_METHODS)
        if isinstance(self.methods, Mapping):
            return self.methods
        named = (shipped if name == "all" else (name,) for name in self.methods)
        names = tuple(dict.fromkeys(itertools.chain.from_iterable(named)))
        found: dict[str, Mapping[str, Any]] = {}
        for name, own in settings_by_name(names, {**BUILT_IN, **shipped}).items():
            at = () if name in names else self.percents or ()  # a head map's name is its stem
            found |= {f"{name} {percent:g} %": {**own, "percent": percent} for percent in at}
            if not at:
                found[name] = own
        return found


class MapsConfig(GridConfig):
    """Settings of ``eval maps``; frozen. Documents with needles are as long as the texts."""

    lengths: Lengths = (2400,)
    depths: Depths = (5, 10, 20, 30, 40)  # beyond the windows of streaming heads alone, too
    needles: int = setting(2, "Documents of each length and depth.", ge=1)
    tokens: Size = setting(2560, "Of each text, and of the budgets.", ge=200)
    budgets: Annotated[tuple[float, ...], LISTED] = setting(
        (30, 40, 55), "Bytes, in percent of full attention's."
    )
    middle_share: float = setting(
        0.5, "Of the bytes beyond short windows, the part of the middle class.", gt=0, lt=1
    )


def spread(first: float, last: float, count: int) -> list[float]:
    """Return ``count`` numbers at equal distances; the first alone if there is one."""
    steps = max(1, count - 1)
    return [first + (last - first) * step / steps for step in range(count)]


def sigmoid(percent: float) -> float:
    """Return needlehaystack's logistic spacing: the ends stay, the rest is drawn towards them."""
    if percent in (0, 100):
        return float(percent)
    return round(100 / (1 + math.exp(-0.1 * (percent - 50))), 3)
