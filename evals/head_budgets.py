"""Head maps against each other: the heads they choose at a budget, and what is found with these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.grid import FULL, FULL_METHOD, Method, streaming_settings
from razor_dist.evals.grid_results import Cell, Score, score_heads
from razor_dist.evals.markdown import markdown
from razor_dist.heads.budget import Choice, choose, kv_budget
from razor_dist.heads.compare import Overlap
from razor_dist.heads.head_map import HeadMap

PERCENTS = (10.0, 15.0, 25.0, 50.0)
"""Of KV heads kept."""
PREFILLS = ("exact", "local")


def streaming(config: EngineConfig, prefill: str) -> Method:
    """No head keeps the whole context."""
    settings = {"attention": "streaming", **streaming_settings(config, prefill)}
    return Method(f"streaming, {prefill}", settings)


def read_maps(paths: Sequence[Path]) -> dict[str, HeadMap]:
    """Head maps by what to call them: their method, or their file if two have the same method.

    Raises
    ------
    ConfigError
        If two files have one name.
    HeadMapError
        If a file is no head map.
    """
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
    """Head maps at budgets.

    Parameters
    ----------
    maps : mapping
        Head maps by name.
    percents : sequence of float
        Budgets, of KV heads.
    config : EngineConfig
        What a streaming head sees.
    prefills : sequence of str
        Of `PREFILLS`.

    Raises
    ------
    ConfigError, HeadMapError
        If a budget is out of range, or a map's scores rank no KV heads.
    """

    maps: Mapping[str, HeadMap]
    percents: Sequence[float]
    config: EngineConfig
    prefills: Sequence[str]

    def __post_init__(self) -> None:
        _ = self.choices

    @cached_property
    def choices(self) -> dict[tuple[str, float], Choice]:
        """What each map keeps at each budget."""
        return {
            (name, percent): choose(head_map, kv_budget(head_map, percent))
            for name, head_map in self.maps.items()
            for percent in sorted(self.percents)
        }

    @property
    def methods(self) -> list[Method]:
        """What to run, the references first."""
        found = [FULL_METHOD]
        for prefill in self.prefills:
            found.append(streaming(self.config, prefill))
            found += [
                Method(
                    _method(name, percent, prefill),
                    streaming_settings(self.config, prefill),
                    choice.retrieval,
                )
                for (name, percent), choice in self.choices.items()
            ]
        return found

    def overlaps(self, percent: float) -> list[tuple[str, str, Overlap, float]]:
        """Each two maps at a budget: their overlap, and the heads in both if they were random."""
        total = sum(map(len, next(iter(self.maps.values())).retrieval))
        found = []
        for a, b in combinations(self.maps, 2):
            first, second = (set(self.choices[name, percent].kept) for name in (a, b))
            chance = len(first) * len(second) / total
            found.append((a, b, Overlap.of(first, second), chance))
        return found

    def report(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Everything as JSON."""
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
            "overlap": [
                {"percent": percent, "a": a, "b": b, "both_by_chance": chance} | asdict(overlap)
                for percent in sorted(self.percents)
                for a, b, overlap, chance in self.overlaps(percent)
            ],
            "scores": {
                method.name: asdict(Score.of(method.name, cells)) for method in self.methods
            },
        }

    def page(self, cells: Sequence[Cell]) -> str:
        """Everything as Markdown tables."""
        parts = []
        lengths = sorted({cell.length for cell in cells})
        total = sum(map(len, next(iter(self.maps.values())).retrieval))
        for prefill in self.prefills:
            rows = [["heads", "KV heads kept", *score_heads(lengths)]]
            rows.append([FULL, f"{total} of {total}", *Score.of(FULL, cells).row(lengths)])
            for (name, percent), choice in self.choices.items():
                score = Score.of(_method(name, percent, prefill), cells)
                kept = f"{len(choice.kept)} of {total}"
                rows.append([f"{name}, {percent:g} %", kept, *score.row(lengths)])
            none = Score.of(f"streaming, {prefill}", cells)
            rows.append(["streaming", f"0 of {total}", *none.row(lengths)])
            parts.append(f"Needles found, {prefill} prefill:\n\n{markdown(rows)}")
        return "\n\n".join([*parts, self._overlap_table(), self._selected(), self._chosen_table()])

    def _overlap_table(self) -> str:
        rows = [["KV heads kept", "maps", "in both", "by chance", "Jaccard"]]
        for percent in sorted(self.percents):
            for a, b, overlap, chance in self.overlaps(percent):
                rows.append(
                    [
                        f"{percent:g} %",
                        f"{a}, {b}",
                        str(overlap.both),
                        f"{chance:.1f}",
                        f"{overlap.jaccard:.2f}",
                    ]
                )
        return f"KV heads in common:\n\n{markdown(rows)}"

    def _selected(self) -> str:
        """What a razor map's budgets come to, in query heads."""
        rows = [["map", "KV heads kept", "induction query heads", "echo query heads"]]
        for (name, percent), choice in self.choices.items():
            if choice.selected:
                head_map = self.maps[name]
                heads = len(head_map.retrieval) * head_map.query_heads
                counts = (choice.selected[kind] for kind in ("induction", "echo"))
                said = (f"{count} ({count / heads:.1%})" for count in counts)
                rows.append([name, f"{len(choice.kept)} ({percent:g} %)", *said])
        title = "Query heads selected to fill each budget, 1 % by echo score, then by induction"
        return f"{title}:\n\n{markdown(rows)}" if len(rows) > 1 else ""

    def _chosen_table(self) -> str:
        percents = sorted(self.percents)
        rows = [["map", *(f"up to {percent:g} %" for percent in percents)]]
        for name in self.maps:
            row, done = [name], 0
            for percent in percents:
                kept = self.choices[name, percent].kept
                row.append(" ".join(f"{layer}.{head}" for layer, head in kept[done:]))
                done = len(kept)
            rows.append(row)
        return f"KV heads in the order chosen, as layer.head:\n\n{markdown(rows)}"

    def plot(self, cells: Sequence[Cell], path: Path) -> None:
        """Draw accuracy against the fraction of KV heads kept, a panel for each prefill."""
        figure = Figure(figsize=(4.6 * len(self.prefills) + 0.6, 4.2), dpi=150)
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained")
        panels = figure.subplots(1, len(self.prefills), sharey=True, squeeze=False)[0]
        for axis, prefill in zip(panels, self.prefills, strict=True):
            for method, style in ((FULL, "--"), (f"streaming, {prefill}", ":")):
                score = Score.of(method, cells)
                if score.accuracy is not None:
                    label = method.removesuffix(f", {prefill}")
                    axis.axhline(score.accuracy, color="0.3", linestyle=style, label=label)
            for index, name in enumerate(self.maps):
                points = [
                    (percent, accuracy)
                    for percent in sorted(self.percents)
                    if (accuracy := Score.of(_method(name, percent, prefill), cells).accuracy)
                    is not None
                ]
                # Equal results lie on each other: marks of several sizes and shapes show them all.
                axis.plot(
                    [percent for percent, _ in points],
                    [accuracy for _, accuracy in points],
                    marker="osD^v"[index % 5],
                    markersize=max(4, 10 - 2 * index),
                    alpha=0.8,
                    label=name,
                )
            axis.set_title(f"{prefill} prefill", fontsize=10)
            axis.set_xlabel("KV heads that keep the whole context, %")
            axis.set_xticks(sorted(self.percents))
            axis.grid(alpha=0.3)
        panels[0].set_ylim(-0.03, 1.03)
        panels[0].set_ylabel(f"needles found, of {Score.of(FULL, cells).total}")
        panels[0].legend(fontsize=9)
        # Fixed metadata: equal results give equal files.
        figure.savefig(path, format="png", metadata={"Software": None})


def _method(name: str, percent: float, prefill: str) -> str:
    return f"{name} {percent:g} %, {prefill}"
