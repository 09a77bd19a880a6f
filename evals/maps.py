"""``eval maps``: head maps of several criteria at equal bytes, with two classes and with three.

Two tasks of `razor_dist.jobs` in one folder: fidelity on three kinds of text, and needles. Both ask
methods whose heads and windows `razor_dist.identify.budget` chose within the same bytes, by the
order of each map's own scores. Beside them stand the model's own map as it is served, with its own
bytes; streaming heads alone, whose windows take as much as the others; and ``fidelity``, the upper
bound: heads in the order of how much KL each of them alone takes off streaming heads of short
windows, on the first text. That is the first step of a greedy choice; the further steps would cost
a pass for each head again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import build_config
from razor_dist.documents.corpus import haystack_paragraphs
from razor_dist.evals.fidelity.config import FidelityConfig
from razor_dist.evals.fidelity.model import Scored
from razor_dist.evals.fidelity.task import GROUP, FidelityTask, Text
from razor_dist.evals.grid import GridTask
from razor_dist.evals.methods import FULL_METHOD, Method, shape_of
from razor_dist.evals.needle.config import GridConfig, MapsConfig
from razor_dist.evals.needle.results import NeedleResults
from razor_dist.evals.needle.task import run_here
from razor_dist.evals.one_rank import StreamingPolicy
from razor_dist.evals.report import interval, join, table
from razor_dist.evals.settings import WINDOW, streaming_settings
from razor_dist.evals.texts import Prompter, repeat_passages
from razor_dist.heads.decision import Scores, rounded
from razor_dist.heads.head_map import HeadMap, default_head_map
from razor_dist.identify.budget import Budget, Masses, WindowDecision, budgeted
from razor_dist.models.loader import read_config
from razor_dist.models.registry import config_folder, display_name
from razor_dist.models.shape import ModelShape

UPPER_BOUND: Final = "fidelity"
STREAMING: Final = "streaming"
DEFAULT: Final = "default"  # the model's own map and window
_KIND: Final = "kl"  # of score, in the upper bound's map
_PROMPT: Final = 0.7  # of a text, read before what is compared
_COLUMNS = {
    "map": "{map}",
    "classes": "{classes}",
    "heads": "{heads}",
    "of full": "{part:.1%}",
    "KL: prose": "{prose:.4f}",
    "code": "{code:.4f}",
    "copies": "{copies:.4f}",
    "mean": "{mean:.4f}",
    "above the best": "{above}",
    "worst": "{worst:.4f}",
    "same": "{same:.1%}",
    "worst same": "{worst_same:.1%}",
    "needles": "{needles}",
    "lost": "{lost}",
}
_NOTE = (
    "Head maps at equal bytes of keys and values at {tokens} tokens. KL from full attention's "
    "next-token distribution, in nats, and how often the likeliest token is the same, on the last "
    "{compared} of {tokens} tokens of prose, of code, and of prose that repeats a passage from "
    "{away} tokens before; their mean and the worst of the three. Above the best: of the lowest "
    "mean within these bytes, with the 95 % interval of resampling runs of {group} tokens, both "
    "maps' together; one text of each kind, so it says nothing of other texts. Needles: {places} "
    "documents of {lengths} tokens of {haystack}, {prefill} prefill, found with full attention "
    "{found}; lost are those among them that the map does not find. Heads: those that keep "
    "everything + those of the middle window, with its length, the others have the short one of "
    "{short}. Of full: bytes, by the plan; a head that cannot be paid is not bought, so that maps "
    "differ by up to a head's."
)
_DEFAULT_NOTE = (
    "`{name}` is the model's own map with its own window of {window} tokens, and has its own bytes."
)
Key = tuple[str, float, float]
"""A plan's map, percent of the bytes, and share of the middle class."""
_DEFAULT_KEY: Key = (DEFAULT, 0.0, 0.0)


@dataclass(frozen=True)
class Study:
    """Maps by name, the masses that windows drop, and all that is asked of them."""

    config: MapsConfig
    maps: Mapping[str, HeadMap]
    masses: Masses

    @cached_property
    def shape(self) -> ModelShape:
        return shape_of(self.config, *self.maps.values())

    def budget(self, percent: float, share: float) -> Budget:
        return budget_of(self.config, self.shape, percent, share)

    @cached_property
    def plans(self) -> dict[Key, WindowDecision]:
        found = {}
        for percent in sorted(self.config.budgets):
            for share in (0.0, self.config.middle_share):
                budget = self.budget(percent, share)
                for name, one in self.maps.items():
                    found[name, percent, share] = budgeted(one, budget, self.masses)[1]
            found[STREAMING, percent, 0.0] = _streaming(self.budget(percent, 0))
        if own := _default(self.budget(max(self.config.budgets), 0), self.config.model):
            found[_DEFAULT_KEY] = own
        return found

    @property
    def methods(self) -> list[Method]:
        return [_method(self.config, _name(*key), plan) for key, plan in self.plans.items()]

    def run_in(self, folder: Path) -> list[dict[str, Any]]:
        """Run what the folder lacks; return a row for each plan."""
        fidelity = fidelity_task(self.config, texts_of(self.config), self.methods)
        found = run_here(fidelity, folder / "fidelity")
        grid = GridTask.plan(
            GridConfig(**self.config.model_dump(include=set(GridConfig.model_fields))),
            [FULL_METHOD, *self.methods],
            list(self.maps.values()),
        )
        needles = grid.run_in(folder / "needles")
        return [self._row(key, found, needles) for key in self.plans]

    def _row(
        self,
        key: Key,
        found: Sequence[Mapping[str, Any]],
        needles: NeedleResults,
    ) -> dict[str, Any]:
        name, percent, share = key
        plan, method = self.plans[key], _name(*key)
        results = [one for one in found if one["method"] == method]
        own = {one["text"]: one["all"] for one in results}
        kl, same = ([one[what] for one in own.values()] for what in ("kl", "same"))
        counts = plan.counts
        heads = str(counts[None])
        if plan.middle is not None:
            heads += f" + {counts.get(plan.middle, 0)} of {plan.middle}"
        elif name == STREAMING:
            heads = f"all of {plan.windows[0][0]}"
        return {
            "map": name,
            "percent": percent,
            "classes": 3 if share else 2,
            "heads": heads,
            "windows": [list(row) for row in plan.windows],
            "part": plan.bytes / (plan.budget.heads * plan.budget.tokens),
            "footprint": plan.budget.footprint(plan.windows),
            "mass": plan.mass(self.masses) if name not in (STREAMING, DEFAULT) else None,
            **{text: one["kl"] for text, one in own.items()},
            "groups": [part["kl"] for one in results for part in one["ranges"]],
            "mean": fmean(kl),
            "worst": max(kl),
            "same": fmean(same),
            "worst_same": min(same),
            "needles": needles.found(method),
            "lost": needles.summary(method).lost,
            "gained": needles.summary(method).gained,
            "needles_full": needles.found(FULL_METHOD.name),
        }

    def page(self, rows: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> str:
        prompt = int(_PROMPT * self.config.tokens)
        about = _NOTE.format(
            tokens=self.config.tokens,
            compared=self.config.tokens - prompt - 1,
            away=_away(self.config),
            group=GROUP,
            haystack=haystack_paragraphs(self.config.haystack)[0],
            prefill=self.config.prefill,
            places=len(self.config.places),
            lengths=" and ".join(map(str, self.config.lengths)),
            found=rows[0]["needles_full"],
            short=self.budget(min(self.config.budgets), 0).short,
        )
        took = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
        own = self.plans.get(_DEFAULT_KEY)
        return join(
            f"# Head maps at equal bytes: {display_name(self.config.model)}",
            about,
            _DEFAULT_NOTE.format(name=DEFAULT, window=_window(own)) if own else "",
            *(
                f"Up to {percent:g} % of full attention's bytes, the lowest mean first:\n\n"
                + table(_COLUMNS, _compared(rows, percent), "numbers")
                for percent in sorted(self.config.budgets)
            ),
            f"Seconds that finding each map took here: {took}." if took else "",
        )


def _compared(rows: Sequence[Mapping[str, Any]], percent: float) -> list[dict[str, Any]]:
    """Return a budget's rows and the default's, sorted by mean, each with its gap to the best."""
    own = sorted((r for r in rows if r["percent"] in (percent, 0)), key=lambda r: r["mean"])
    best = next(row for row in own if row["percent"] == percent)
    compared = []
    for row in own:
        pairs = zip(row["groups"], best["groups"], strict=True)
        more = [here - there for here, there in pairs]
        low, high = interval(more, min(more), max(more))
        above = f"{row['mean'] - best['mean']:+.4f} ({low:+.4f} to {high:+.4f})"
        compared.append({**row, "above": "" if row is best else above})
    return compared


def budget_of(config: MapsConfig, shape: ModelShape, percent: float, share: float) -> Budget:
    """Settle ``percent`` of what full attention keeps; a token of a head counts as one byte.

    No middle window holds the passage that is repeated.
    """
    whole = shape.layers * shape.kv_heads * config.tokens
    return Budget.of(
        config,
        shape,
        config.tokens,
        bytes=int(percent / 100 * whole),
        token_bytes=1,
        short=None,
        share=share,
        longest=_away(config) - config.block,
    )


def check_lengths(config: MapsConfig, largest: Budget) -> None:
    """Refuse documents that fit into a window, or are longer than the budgets' ``tokens``."""
    longest = _window(_streaming(largest))
    for length in config.lengths:
        if not longest < length <= config.tokens:
            raise ConfigError(
                f"lengths: documents of {length} tokens, but budgets are of {config.tokens}, and "
                f"windows of up to {longest} hold shorter ones whole; give lengths between these"
            )


def _name(name: str, percent: float, share: float) -> str:
    return name if name == DEFAULT else f"{name} {percent:g} % {3 if share else 2}"


def _method(config: EngineConfig, name: str, plan: WindowDecision) -> Method:
    settings = streaming_settings(config, config.prefill)
    shown = {each: value for each, value in settings.items() if each not in WINDOW[:3]}
    return Method(name, shown, plan.retrieval, plan.windows)


def _streaming(budget: Budget) -> WindowDecision:
    """Plan streaming heads only, with the longest window that fits the budget."""
    window = budget.tokens - 1
    while budget.heads * budget.cost(window) > budget.bytes:
        window -= 1
    shape = budget.shape
    return WindowDecision(budget, ((window,) * shape.kv_heads,) * shape.layers, None)


def _default(budget: Budget, model: str) -> WindowDecision | None:
    """Return the model's own heads with the window of its own settings; None without a map."""
    try:
        own = HeadMap.load(default_head_map(model))
    except HeadMapError:
        return None
    window = StreamingPolicy.of(build_config(EngineConfig, model=model)).window(budget.tokens - 1)
    rows = own.windows or ((window,) * budget.shape.kv_heads,) * budget.shape.layers
    kept = tuple(
        tuple(None if keeps else window for keeps, window in zip(*pair, strict=True))
        for pair in zip(own.retrieval, rows, strict=True)
    )
    return WindowDecision(budget, kept, None)


def _window(plan: WindowDecision) -> int:
    """Return the longest window of a plan, 0 if all heads keep everything."""
    return max((window for row in plan.windows for window in row if window is not None), default=0)


def texts_of(config: MapsConfig) -> tuple[Text, ...]:
    """Prose, code, and prose that repeats a passage from before all middle windows."""
    prompter, prompt = Prompter.of(config), int(_PROMPT * config.tokens)
    _, paragraphs = haystack_paragraphs(config.haystack)
    prose = prompter.encode("\n\n".join(paragraphs))
    code = prompter.encode(Path(argparse.__file__).read_text(encoding="utf-8"))
    begin, _ = prompter.around("", "", chat=False)
    found = {"prose": prose, "code": code, "copies": prose[config.tokens :]}
    texts = []
    for name, ids in found.items():
        if len(ids) < config.tokens:
            raise ConfigError(f"tokens is {config.tokens}, but the text of {name} has {len(ids)}")
        own = [*begin, *ids][: config.tokens]
        if name == "copies":
            count = config.tokens - prompt
            own, _ = repeat_passages(own, (config.tokens,), count, _first(prompt), 0)
        texts.append(Text(name, Scored(tuple(own), prompt)))
    return tuple(texts)


def _first(prompt: int) -> int:
    """Return the first token of the passage that is repeated, which lies behind the sinks."""
    return prompt // 28


def _away(config: MapsConfig) -> int:
    """Return how many tokens before its copy the passage stands."""
    prompt = int(_PROMPT * config.tokens)
    return prompt - _first(prompt)


def fidelity_task(
    config: MapsConfig, texts: Sequence[Text], methods: Sequence[Method]
) -> FidelityTask:
    shared = config.model_dump(include=set(EngineConfig.model_fields) - {"attention", "head_map"})
    compared = config.tokens - int(_PROMPT * config.tokens) - 1
    own = FidelityConfig(**shared, ranges=max(1, compared // GROUP))
    return FidelityTask(own, tuple(texts), tuple(methods))


def upper_bound(config: MapsConfig, folder: Path) -> tuple[HeadMap, float]:
    """Return a map scored by the KL that each head alone removes, and the seconds it took."""
    shape = shape_of(config)
    smallest = budget_of(config, shape, min(config.budgets), 0)
    everywhere = [(i, j) for i in range(shape.layers) for j in range(shape.kv_heads)]
    base = ((smallest.short,) * shape.kv_heads,) * shape.layers
    plans = [WindowDecision(smallest, base, None)]
    for i, j in everywhere:
        row = tuple(None if head == j else window for head, window in enumerate(base[i]))
        plans.append(WindowDecision(smallest, (*base[:i], row, *base[i + 1 :]), None))
    names = ["none", *(f"{i}.{j}" for i, j in everywhere)]
    methods = [_method(config, name, one) for name, one in zip(names, plans, strict=True)]
    task = fidelity_task(config, texts_of(config)[:1], methods)
    none, *alone = run_here(task, folder)
    gains = iter(none["all"]["kl"] - one["all"]["kl"] for one in alone)
    scores: Scores = rounded([[next(gains) for _ in row] for row in base])
    found = HeadMap.of_model(
        display_name(config.model),
        read_config(config_folder(config.model), **config.model_options),
        method=UPPER_BOUND,
        settings={"tokens": config.tokens, "short_window": smallest.short},
        retrieval=tuple(tuple(score > 0 for score in row) for row in scores),
        kv_scores={_KIND: scores},
    )
    return found, sum(one["timing"]["seconds"] for one in (none, *alone))
