"""What finding heads costs: the probe, the probe with attention matrices, and gate training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.evals.bench import machine
from razor_dist.evals.identify_cost import Cost, CostSettings, Work, refuse_alibi
from razor_dist.evals.timing import Say

Measure = Callable[[CostSettings], "Cost | str"]


@dataclass(frozen=True)
class CostResults:
    """All that was measured.

    Attributes
    ----------
    settings : CostSettings
    costs : dict
        By work: what it took, or why it failed.
    """

    settings: CostSettings
    costs: dict[Work, Cost | str]

    @property
    def difference(self) -> float | None:
        """The largest difference of a score between the probe and the matrices; None without both.

        Relative to the largest score: they are to be the same numbers.
        """
        both = [self.costs.get(work) for work in ("probe", "materialised")]
        found = [cost.scores for cost in both if isinstance(cost, Cost)]
        if len(found) < 2:
            return None
        one, other = (
            [score for rows in scores.values() for row in rows for score in row] for scores in found
        )
        largest = max(one) or 1.0  # random weights may score 0 everywhere
        return max(abs(a - b) for a, b in zip(one, other, strict=True)) / largest

    def as_json(self) -> dict[str, Any]:
        """Everything but the scores, the machine included."""
        costs: dict[str, Any] = {}
        for work, cost in self.costs.items():
            costs[work] = {"failed": cost} if isinstance(cost, str) else asdict(cost)
            costs[work].pop("scores", None)
        settings = asdict(self.settings)
        del settings["work"]
        return {
            "machine": machine(),
            "settings": settings,
            "costs": costs,
            "largest_difference_of_scores": self.difference,
        }


def run(
    settings: CostSettings, works: Sequence[Work], say: Say, measure: Measure | None = None
) -> CostResults:
    """Measure each work in a process of its own.

    Parameters
    ----------
    settings : CostSettings
        Of all of them; its own ``work`` is not looked at.
    works : sequence of str
    say : callable
        Told of each as it ends.
    measure : callable, optional
        In place of a new process.

    Raises
    ------
    ConfigError
        If the model is biased by distance (ALiBi), or if none could be measured; the message is
        then the first's.
    ModelError
        If there is no such model.
    """
    refuse_alibi(settings)
    costs: dict[Work, Cost | str] = {}
    for work in works:
        cost = (measure or in_process)(replace(settings, work=work))
        costs[work] = cost
        say(f"{work}: " + (f"failed: {cost}" if isinstance(cost, str) else f"{cost.seconds:.1f} s"))
    first = next(iter(costs.values()))
    if all(isinstance(cost, str) for cost in costs.values()):
        raise ConfigError(str(first))
    return CostResults(settings, costs)


def in_process(settings: CostSettings) -> Cost | str:
    """Measure in a new process; a sentence if that fails, such as for lack of memory."""
    command = [sys.executable, "-m", "razor_dist.evals.identify_cost", json.dumps(asdict(settings))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        killed = f"ended by signal {-done.returncode}" if done.returncode < 0 else ""
        return killed or (said[-1] if said else f"exit code {done.returncode}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))
