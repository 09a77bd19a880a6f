"""Studies of heads on a grid of needles: head maps at equal budgets, RazorAttention's ablations."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.validation import check_least
from razor_dist.evals.methods import FULL, Method, beside_full
from razor_dist.evals.needle.results import NeedleResults, score_heads
from razor_dist.evals.report import join, markdown, save_picture, section
from razor_dist.heads.compare import Overlap
from razor_dist.heads.decision import Flags, decide, flags
from razor_dist.heads.head_map import Choice, HeadMap, choose, kv_budget

INDUCTION = (5.0, 8.0, 11.0, 14.0)  # Table 4's percentages of heads


def _summaries(methods: Sequence[Method], results: NeedleResults) -> dict[str, Any]:
    return {method.name: asdict(results.summary(method.name)) for method in methods}


def read_maps(paths: Sequence[Path]) -> dict[str, HeadMap]:
    """Read head maps, named by their method, or by their file if two have the same method."""
    maps = [(path, HeadMap.load(path)) for path in paths]
    methods = [head_map.method for _, head_map in maps]
    named = {
        head_map.method if methods.count(head_map.method) == 1 else path.stem: head_map
        for path, head_map in maps
    }
    if len(named) < len(maps):
        raise ConfigError("two head maps have the same file name; rename one")
    return named


@dataclass(frozen=True)
class HeadMapComparison:
    """Head maps at budgets, in percent of the KV heads; the window is that of the config."""

    maps: Mapping[str, HeadMap]  # by name
    percents: Sequence[float]
    config: EngineConfig
    prefills: Sequence[str]  # exact, local or both

    def __post_init__(self) -> None:
        _ = self.choices

    @cached_property
    def choices(self) -> dict[tuple[str, float], Choice]:
        return {
            (name, percent): choose(head_map, kv_budget(head_map, percent))
            for name, head_map in self.maps.items()
            for percent in sorted(self.percents)
        }

    @property
    def methods(self) -> list[Method]:
        own: dict[str, tuple[Flags, Mapping[str, Any]]] = {
            f"{name} {percent:g} %": (choice.retrieval, {})
            for (name, percent), choice in self.choices.items()
        }
        return beside_full(self.config, self.prefills, own)

    @property
    def _kv_heads(self) -> int:
        return sum(map(len, next(iter(self.maps.values())).retrieval))

    def overlaps(self) -> list[dict[str, Any]]:
        """Return the overlap of each two maps at each budget, and that of random heads."""
        found = []
        for percent in sorted(self.percents):
            for a, b in combinations(self.maps, 2):
                first, second = (set(self.choices[name, percent].kept) for name in (a, b))
                chance = len(first) * len(second) / self._kv_heads
                about = {"percent": percent, "a": a, "b": b, "both_by_chance": chance}
                found.append(about | asdict(Overlap.of(first, second)))
        return found

    def report(self, results: NeedleResults) -> dict[str, Any]:
        return {
            "chosen": [
                {
                    "map": name,
                    "percent": percent,
                    "kv_heads": [list(pair) for pair in choice.kept],
                    "selected_query_heads": choice.selected,
                }
                for (name, percent), choice in self.choices.items()
            ],
            "overlap": self.overlaps(),
            "scores": _summaries(self.methods, results),
        }

    def page(self, results: NeedleResults) -> str:
        shared = [["KV heads kept", "maps", "in both", "by chance", "Jaccard"]]
        form = ("{percent:g} %", "{a}, {b}", "{both}", "{both_by_chance:.1f}", "{jaccard:.2f}")
        shared += [[cell.format(**found) for cell in form] for found in self.overlaps()]
        selected = [["map", "KV heads kept", "induction query heads", "echo query heads"]]
        for (name, percent), choice in self.choices.items():
            if choice.selected:
                heads = len(self.maps[name].retrieval) * self.maps[name].query_heads
                counts = (choice.selected[kind] for kind in ("induction", "echo"))
                said = (f"{count} ({count / heads:.1%})" for count in counts)
                selected.append([name, f"{len(choice.kept)} ({percent:g} %)", *said])
        return join(
            *(self._found(prefill, results) for prefill in self.prefills),
            f"KV heads in common:\n\n{markdown(shared)}",
            section(
                "Query heads selected to fill each budget, 1 % by echo score, then by induction:",
                selected,
            ),
            f"KV heads in the order chosen, as layer.head:\n\n{self._chosen()}",
        )

    def _found(self, prefill: str, results: NeedleResults) -> str:
        lengths = sorted({cell.length for cell in results.cells})
        lines = [("full", FULL, self._kv_heads)]
        lines += [
            (f"{name}, {percent:g} %", _method(name, percent, prefill), len(choice.kept))
            for (name, percent), choice in self.choices.items()
        ]
        lines.append(("streaming", f"streaming, {prefill}", 0))
        rows = [
            [title, f"{kept} of {self._kv_heads}", *results.row(method, lengths)]
            for title, method, kept in lines
        ]
        head = ["heads", "KV heads kept", *score_heads(lengths)]
        return section(f"Needles found, {prefill} prefill:", [head, *rows])

    def _chosen(self) -> str:
        percents = sorted(self.percents)
        rows = [["map", *(f"up to {percent:g} %" for percent in percents)]]
        for name in self.maps:
            row, done = [name], 0
            for percent in percents:
                kept = self.choices[name, percent].kept
                row.append(" ".join(f"{layer}.{head}" for layer, head in kept[done:]))
                done = len(kept)
            rows.append(row)
        return markdown(rows)

    def plot(self, results: NeedleResults, path: Path) -> None:
        """Draw accuracy against the fraction of KV heads kept, a panel for each prefill."""
        percents, size = sorted(self.percents), (4.6 * len(self.prefills) + 0.6, 4.2)
        figure = Figure(size, dpi=150, layout="constrained")
        panels = figure.subplots(1, len(self.prefills), sharey=True, squeeze=False)[0]
        for axis, prefill in zip(panels, self.prefills, strict=True):
            for method, style in ((FULL, "--"), (f"streaming, {prefill}", ":")):
                score = results.summary(method).score
                if score is not None:
                    label = method.removesuffix(f", {prefill}")
                    axis.axhline(score, color="0.3", linestyle=style, label=label)
            for index, name in enumerate(self.maps):
                methods = [_method(name, percent, prefill) for percent in percents]
                scores = [results.summary(method).score for method in methods]
                # Equal results lie on each other: marks of several sizes and shapes show them all.
                axis.plot(
                    percents,
                    np.array(scores, dtype=float),  # NaN, which is not drawn, for None
                    marker="osD^v"[index % 5],
                    markersize=max(4, 10 - 2 * index),
                    alpha=0.8,
                    label=name,
                )
            axis.set_title(f"{prefill} prefill", fontsize=10)
            axis.set_xlabel("KV heads that keep the whole context, %")
            axis.set_xticks(percents)
            axis.grid(alpha=0.3)
        panels[0].set_ylim(-0.03, 1.03)
        panels[0].set_ylabel(f"share found of {results.summary(FULL).cells} needles")
        panels[0].legend(fontsize=9)
        save_picture(figure, path)


def _method(name: str, percent: float, prefill: str) -> str:
    return f"{name} {percent:g} %, {prefill}"


@dataclass(frozen=True)
class Variant:
    """One row of the ablations; its source is the paper's table or figure."""

    name: str
    source: str
    retrieval: Flags
    compensation: bool = True

    @property
    def kept(self) -> int:
        return sum(map(sum, self.retrieval))


@dataclass(frozen=True)
class Ablations:
    head_map: HeadMap  # RazorAttention's, with induction and echo scores
    config: EngineConfig
    prefills: Sequence[str]
    seeds: int = 3  # draws of random heads

    def __post_init__(self) -> None:
        check_least(self, seeds=1)
        if not self.head_map.scores.keys() >= {"induction", "echo"}:
            raise HeadMapError(
                f"the ablations are of RazorAttention's heads, but this map of method "
                f"{self.head_map.method!r} has no induction and echo scores; make one with: "
                "razor-dist identify razor MODEL --out razor.json"
            )

    def _razor(self, induction: float, echo: float) -> Flags:
        return decide(self.head_map.scores, induction, echo, self.head_map.group).retrieval

    @cached_property
    def variants(self) -> list[Variant]:
        """All that keep some heads, in the order of the table.

        Random draws are of as many KV heads as 14 % + 1 % keep. Not of as many query heads: drawn
        at random these would promote far more groups, and a comparison is of equal memory.
        """
        rows, whole = self.head_map.retrieval, self._razor(14, 1)
        everywhere = [(layer, head) for layer, row in enumerate(rows) for head in range(len(row))]
        found = []
        for seed in range(self.seeds):
            chosen = random.Random(seed).sample(everywhere, sum(map(sum, whole)))
            heads = flags(chosen, len(rows), len(rows[0]))
            found.append(Variant(f"random heads, draw {seed + 1}", "Table 1", heads))
        for percent in INDUCTION:
            name = f"{percent:g} % induction + 1 % echo"
            found.append(Variant(name, "Table 4", self._razor(percent, 1)))
        return [
            *found,
            Variant("14 % induction, no echo heads", "Figure 7", self._razor(14, 0)),
            Variant("14 % + 1 %, no compensation", "Figure 8", whole, compensation=False),
        ]

    @property
    def methods(self) -> list[Method]:
        own = {v.name: (v.retrieval, {"compensation": v.compensation}) for v in self.variants}
        return beside_full(self.config, self.prefills, own)

    def report(self, results: NeedleResults) -> dict[str, Any]:
        return {
            "variants": [asdict(variant) | {"kept": variant.kept} for variant in self.variants],
            "scores": _summaries(self.methods, results),
        }

    def page(self, results: NeedleResults) -> str:
        """Return one Markdown table: for each prefill the needles found, lost and gained."""
        total = sum(map(len, self.head_map.retrieval))
        head = ["heads that keep the whole context", "in the paper", "KV heads"]
        head += [f"{p}: {what}" for p in self.prefills for what in ("found", "lost", "gained")]
        rows = [head, ["all (full attention)", "", str(total), *self._counts(results, FULL)]]
        rows.append(["none", "Table 1", "0", *self._counts(results, "streaming")])
        draws = [variant.name for variant in self.variants[: self.seeds]]
        for variant in self.variants:
            about = [variant.source, str(variant.kept)]
            rows.append([variant.name, *about, *self._counts(results, variant.name)])
            if variant.name == draws[-1]:
                rows.append(["random heads, mean", *about, *self._counts(results, *draws)])
        return markdown(rows)

    def _counts(self, results: NeedleResults, *names: str) -> list[str]:
        """Return found, lost and gained with each prefill; the mean over several variants."""
        columns = []
        digits = int(len(names) > 1)
        for prefill in self.prefills:
            methods = [name if name == FULL else f"{name}, {prefill}" for name in names]
            done = [found for found in map(results.summary, methods) if found.cells]
            if not done:
                columns += ["-"] * 3
                continue
            right = statistics.fmean((found.score or 0) * found.cells for found in done)
            lost = statistics.fmean(found.lost for found in done)
            gained = statistics.fmean(found.gained for found in done)
            columns.append(f"{right:.{digits}f}/{done[0].cells}")
            columns += [f"{lost:.{digits}f}", f"{gained:.{digits}f}"]
        return columns
