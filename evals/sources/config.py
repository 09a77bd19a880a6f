"""Settings of ``eval sources``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from razor_dist.config.errors import ConfigError
from razor_dist.config.sizes import Size
from razor_dist.evals.needle.config import PlacesConfig
from razor_dist.evals.settings import LISTED, HotpotQA, Squad
from razor_dist.evals.suites.config import check_data, question_files
from razor_dist.evals.suites.qa import QA
from razor_dist.evals.suites.ruler import NEEDLES
from razor_dist.evals.suites.tasks import DataFile

GRID, RULER = "grid", "ruler"
# RULER's tasks of which it is known where the answers stand; of those that count words it is not.
_SYNTHETIC = (*NEEDLES, "vt")
PLACED = (*_SYNTHETIC, *QA)


class SourcesConfig(PlacesConfig):
    """Settings of ``eval sources``: the places of ``eval grid``, RULER's tasks, or both; frozen."""

    absent_lengths: Annotated[tuple[Size, ...], LISTED] = Field(
        default=(1500, 2500),
        description="Of the grid's lengths, those that are asked without the needle too.",
    )
    tasks: Annotated[tuple[str, ...], LISTED] = Field(
        default=(GRID,),
        description="grid, and RULER's tasks with known places such as niah_multivalue,vt; "
        "ruler: the 9 of them that need no data.",
    )
    samples: int = Field(default=10, ge=1, description="Of each of RULER's tasks and lengths.")
    squad: Squad = None
    hotpotqa: HotpotQA = None

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for name in self.tasks:
            if name not in (GRID, RULER, *PLACED):
                raise ConfigError(
                    f"tasks: {name!r} is none of {GRID}, {RULER}, and RULER's tasks with known "
                    f"places, {', '.join(PLACED)}"
                )
        check_data(self.task_names, self.squad, self.hotpotqa)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks, the grid first and RULER's in the order of the paper's."""
        named = {*self.tasks, *(_SYNTHETIC if RULER in self.tasks else ())}
        return tuple(name for name in (GRID, *PLACED) if name in named)

    @property
    def files(self) -> Mapping[str, DataFile]:
        """The question tasks' files, by the task."""
        return question_files(self.squad, self.hotpotqa)
