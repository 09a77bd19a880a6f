"""Every rank, as rank 0 has them carry out its plans."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor

from razor_dist.cache.accounting import Ints
from razor_dist.config.errors import EngineError
from razor_dist.engine.rank_stats import RankStats
from razor_dist.engine.runner import ModelRunner
from razor_dist.protocol.step_plan import Op, StepPlan


class AllRanks:
    """Sends plans to the other ranks and carries them out by ``runner``, rank 0's own."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.kept: tuple[int, ...] = ()  # `StepPlan.kept` of the next plan

    def run(self, plan: StepPlan) -> Tensor | None:
        plan, self.kept = replace(plan, kept=self.kept), ()
        plan.send(self.runner.comm)
        return self.runner.execute(plan)

    def run_all(self, plans: Sequence[StepPlan]) -> None:
        for plan in plans:
            self.run(plan)

    def stats(self, free: Ints) -> list[RankStats]:
        """Every rank's counters; `EngineError` unless each has ``free`` what rank 0 counts for it.

        All ranks answer, so none waits for a plan too long, and a stuck one is found: a broadcast
        alone succeeds while the other end is stopped.
        """
        table = self.run(StepPlan(Op.STATS))
        assert table is not None
        found = [RankStats.of(row) for row in table.tolist()]
        for rank, (stats, ours) in enumerate(zip(found, free.T.tolist(), strict=True)):
            if self.runner.caches.scratch is None:
                ours[-1] = 0  # no head needs the scratch pages that exact prefill may have
            if list(stats.free) != ours:
                raise EngineError(
                    f"rank {rank} has {list(stats.free)} pages and places free and rank 0 counts "
                    f"{ours}: a defect of razor_dist; please report it"
                )
        return found
