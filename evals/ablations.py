"""RazorAttention's ablations: what retrieval heads, echo heads and compensation each contribute."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from razor_dist.config.errors import HeadMapError
from razor_dist.config.ranges import check_least
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.grid import FULL, FULL_METHOD, Method, streaming_settings
from razor_dist.evals.grid_results import Cell, Score
from razor_dist.evals.head_budgets import streaming
from razor_dist.evals.markdown import markdown
from razor_dist.heads.decision import Flags, decide, flags
from razor_dist.heads.head_map import HeadMap

INDUCTION = (5.0, 8.0, 11.0, 14.0)
"""Table 4's percentages of induction heads."""


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes
    ----------
    name : str
    source : str
        Where the paper has it.
    retrieval : tuple
    compensation : bool
    """

    name: str
    source: str
    retrieval: Flags
    compensation: bool = True

    @property
    def kept(self) -> int:
        """KV heads that keep the whole context."""
        return sum(map(sum, self.retrieval))


@dataclass(frozen=True)
class Ablations:
    """The paper's ablations on one model.

    Parameters
    ----------
    head_map : HeadMap
        With induction and echo scores.
    config : EngineConfig
        What a streaming head sees.
    prefills : sequence of str
        ``exact``, ``local`` or both.
    seeds : int
        Draws of random heads.

    Raises
    ------
    ConfigError
        If there is no draw.
    HeadMapError
        If the map is not RazorAttention's.
    """

    head_map: HeadMap
    config: EngineConfig
    prefills: Sequence[str]
    seeds: int = 3

    def __post_init__(self) -> None:
        check_least(self, seeds=1)
        if not self.head_map.scores.keys() >= {"induction", "echo"}:
            raise HeadMapError(
                f"the ablations are of RazorAttention's heads, but this map of method "
                f"{self.head_map.method!r} has no induction and echo scores; make one with: "
                "razor-dist identify MODEL --method razor --out razor.json"
            )

    def _razor(self, induction: float, echo: float) -> Flags:
        return decide(self.head_map.scores, induction, echo, self.head_map.group).retrieval

    @property
    def _random(self) -> list[Variant]:
        """As many KV heads as 14 % + 1 % keep, drawn from all.

        Not as many query heads: drawn at random these would promote far more groups, and a
        comparison is of equal memory.
        """
        rows = self.head_map.retrieval
        everywhere = [(layer, head) for layer, row in enumerate(rows) for head in range(len(row))]
        count = sum(map(sum, self._razor(14, 1)))
        return [
            Variant(
                f"random heads, draw {seed + 1}",
                "Table 1",
                flags(random.Random(seed).sample(everywhere, count), len(rows), len(rows[0])),
            )
            for seed in range(self.seeds)
        ]

    @property
    def variants(self) -> list[Variant]:
        """All that keep some heads, in the order of the table."""
        whole = self._razor(14, 1)
        return [
            *self._random,
            *(
                Variant(f"{percent:g} % induction + 1 % echo", "Table 4", self._razor(percent, 1))
                for percent in INDUCTION
            ),
            Variant("14 % induction, no echo heads", "Figure 7", self._razor(14, 0)),
            Variant("14 % + 1 %, no compensation", "Figure 8", whole, compensation=False),
        ]

    @property
    def methods(self) -> list[Method]:
        """What to run."""
        found = [FULL_METHOD]
        for prefill in self.prefills:
            found.append(streaming(self.config, prefill))
            found += [
                Method(
                    _method(variant.name, prefill),
                    streaming_settings(self.config, prefill)
                    | {"compensation": variant.compensation},
                    variant.retrieval,
                )
                for variant in self.variants
            ]
        return found

    def report(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Everything as JSON."""
        return {
            "variants": [asdict(variant) | {"kept": variant.kept} for variant in self.variants],
            "scores": {
                method.name: asdict(Score.of(method.name, cells)) for method in self.methods
            },
        }

    def page(self, cells: Sequence[Cell]) -> str:
        """One Markdown table: for each prefill the needles found, lost and gained."""
        total = sum(map(len, self.head_map.retrieval))
        head = ["heads that keep the whole context", "in the paper", "KV heads"]
        head += [
            f"{prefill}: {what}"
            for prefill in self.prefills
            for what in ("found", "lost", "gained")
        ]
        rows = [head, ["all (full attention)", "", str(total), *self._counts(cells, FULL)]]
        rows.append(["none", "Table 1", "0", *self._counts(cells, "streaming")])
        for variant in self.variants:
            counts = self._counts(cells, variant.name)
            rows.append([variant.name, variant.source, str(variant.kept), *counts])
            if variant == self._random[-1]:
                names = [one.name for one in self._random]
                mean = self._counts(cells, *names)
                rows.append(["random heads, mean", variant.source, str(variant.kept), *mean])
        return markdown(rows)

    def _counts(self, cells: Sequence[Cell], *names: str) -> list[str]:
        """Found, lost and gained with each prefill; the mean over several variants."""
        columns = []
        for prefill in self.prefills:
            scores = [Score.of(_method(name, prefill), cells) for name in names]
            done = [score for score in scores if score.total]
            found, lost, gained = (
                f"{statistics.fmean(getattr(score, count) for score in done):.{len(names) > 1:d}f}"
                if done
                else "-"
                for count in ("right", "lost", "gained")
            )
            columns += [f"{found}/{done[0].total}" if done else "-", lost, gained]
        return columns


def _method(name: str, prefill: str) -> str:
    return name if name == FULL else f"{name}, {prefill}"
