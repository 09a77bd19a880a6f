"""Settings of ``eval sources`` and ``eval citations``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import field_validator

from razor_dist.config.errors import ConfigError
from razor_dist.config.sizes import Size
from razor_dist.evals.needle.config import PlacesConfig
from razor_dist.evals.settings import LISTED, HotpotQA, Names, Squad, setting
from razor_dist.evals.suites import ruler
from razor_dist.evals.suites.config import question_files
from razor_dist.evals.suites.nonliteral import NONLITERAL
from razor_dist.evals.suites.qa import QA
from razor_dist.evals.suites.tasks import DataFile, Suite
from razor_dist.heads.head_map import head_map_file

GRID, RULER = "grid", "ruler"
# RULER's tasks of which it is known where the answers stand; of those that count words it is not.
_SYNTHETIC = (*ruler.NEEDLES, "vt")
# Suites by their tasks with known places.
SUITE_OF: Mapping[str, Suite] = dict.fromkeys((*_SYNTHETIC, *QA), ruler.RULER) | dict.fromkeys(
    NONLITERAL.tasks, NONLITERAL
)
PLACED = tuple(SUITE_OF)


class AbsentConfig(PlacesConfig):
    """Settings of a grid of which some documents are asked without their needle, too; frozen."""

    absent_lengths: Annotated[tuple[Size, ...] | None, LISTED] = setting(
        (1500, 2500),
        "Of the grid's lengths, those that are asked without the needle too; none: no length.",
    )

    @field_validator("head_map")
    @classmethod
    def _file(cls, name: str | None) -> str | None:
        return name and str(head_map_file(name))

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        others = set(self.absent_lengths or ()) - set(self.lengths)
        if others and "absent_lengths" in self.model_fields_set:
            raise ConfigError(
                f"absent_lengths: {min(others)} is none of lengths, "
                f"{', '.join(map(str, self.lengths))}"
            )


class CitationsConfig(AbsentConfig):
    kinds: Annotated[tuple[Literal["text", "pdf", "mixed"], ...], LISTED] = setting(
        ("text", "pdf", "mixed"),
        "How documents are sent; mixed: one of several, with CJK, emoji and CRLF, of the shortest "
        "length alone.",
    )


class SourcesConfig(AbsentConfig):
    """Settings of ``eval sources``: the places of ``eval grid``, suites' tasks, or both; frozen."""

    tasks: Names = setting(
        (GRID,),
        "grid, RULER's tasks with known places such as niah_multivalue,vt, and those of eval "
        "nonliteral; ruler: RULER's 9 that need no data.",
    )
    samples: int = setting(10, "Of each of these tasks and lengths.", ge=1)
    squad: Squad = None
    hotpotqa: HotpotQA = None

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for name in self.tasks:
            if name not in (GRID, RULER, *PLACED):
                raise ConfigError(
                    f"tasks: {name!r} is none of {GRID}, {RULER}, and the tasks with known "
                    f"places, {', '.join(PLACED)}"
                )
        _ = self.files

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks, the grid first and RULER's in the order of the paper's."""
        named = {*self.tasks, *(_SYNTHETIC if RULER in self.tasks else ())}
        return tuple(name for name in (GRID, *PLACED) if name in named)

    @property
    def files(self) -> Mapping[str, DataFile]:
        return question_files(self.task_names, self.squad, self.hotpotqa)
