"""Settings of the suites: one class, and what a suite adds to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.baselines.presses import PRESSES, ComparingConfig
from razor_dist.evals.settings import HotpotQA, Names, Prose, Sizes, Squad, setting
from razor_dist.evals.suites.graph import GRAPH
from razor_dist.evals.suites.nonliteral import NONLITERAL
from razor_dist.evals.suites.nth import NTH
from razor_dist.evals.suites.published import (
    PUBLISHED,
    PublishedData,
    published_files,
    published_suite,
)
from razor_dist.evals.suites.qa import QA, READERS
from razor_dist.evals.suites.ruler import RULER
from razor_dist.evals.suites.shared import SHARED, WORDS
from razor_dist.evals.suites.tasks import DataFile, Suite
from razor_dist.evals.suites.world import WORLD

if TYPE_CHECKING:
    from razor_dist.models.shape import ModelShape


def question_files(
    tasks: Collection[str], squad: str | None, hotpotqa: str | None
) -> Mapping[str, DataFile]:
    """Return the files of RULER's question tasks; refuse a task without a file, and vice versa."""
    files = {}
    given = zip(READERS.items(), ("squad", "hotpotqa"), (squad, hotpotqa), strict=True)
    for (task, read), data, path in given:
        if task in tasks and path is None:
            raise ConfigError(f"task {task} needs {data}, the path of its data")
        if task not in tasks and path is not None:
            raise ConfigError(f"{data} is for task {task}, which is not among the tasks")
        if path is not None:
            files[task] = DataFile(path, read)
    return files


class SuiteConfig(ComparingConfig):
    """Settings of a suite, the job's and the engines'; frozen."""

    own_suite: ClassVar[Suite]
    # Every press sees the question as part of the prompt: SnapKV has no second variant here.
    known_presses = tuple(name for name, press in PRESSES.items() if not press.with_question)

    tasks: Names = setting(("all",), "Tasks of the suite, with commas; all: every one.")
    lengths: Sizes = setting((4096,), "Tokens of prompt and answer, such as 4096,8192.")
    samples: int = setting(50, "Samples of each task and length.", ge=1)
    haystack: Prose = "auto"

    @property
    def suite(self) -> Suite:
        return self.own_suite

    @property
    def several(self) -> Mapping[str, Sequence[str]]:
        """Names for several tasks at once."""
        return {"all": tuple(self.suite.tasks)}

    def _check(self) -> None:
        for name in self.task_names:
            if name not in self.suite.tasks:
                raise ConfigError(
                    f"tasks: unknown task {name!r}; tasks are {', '.join(self.suite.tasks)}, or "
                    f"alone {' or '.join(self.several)}"
                )
        if min(self.lengths) < 1:
            raise ConfigError(f"lengths must be at least 1 each, got {list(self.lengths)}")
        for name in self.method_settings:
            self.engine(name)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks, in the order of the suite's."""
        if len(self.tasks) == 1 and self.tasks[0] in self.several:
            return tuple(self.several[self.tasks[0]])
        order = list(self.suite.tasks)
        return tuple(sorted(self.tasks, key=lambda t: order.index(t) if t in order else -1))

    @property
    def files(self) -> Mapping[str, DataFile]:
        return {}

    def count(self, task: str) -> int:
        """Return the samples of a task at each length."""
        return self.samples

    @property
    def shares_prefix(self) -> bool:
        return self.prefix_cache and self.suite.several_questions

    def engine(self, method: str, longest: int | None = None) -> EngineConfig:
        return super().engine(method, longest or max(self.lengths))

    @property
    def in_turns(self) -> bool:
        """True where a sample's questions are turns of one conversation."""
        return False


class RulerConfig(SuiteConfig):
    own_suite = RULER
    tasks: Names = setting(
        ("synthetic",), "Tasks, such as vt,cwe; synthetic: the 11 that need no data; all: 13."
    )
    samples: int = setting(20, "Samples of each task and length.", ge=1)
    squad: Squad = None
    hotpotqa: HotpotQA = None

    @property
    def several(self) -> Mapping[str, Sequence[str]]:
        return {**super().several, "synthetic": [t for t in RULER.tasks if t not in QA]}

    def _check(self) -> None:
        super()._check()
        _ = self.files

    @property
    def files(self) -> Mapping[str, DataFile]:
        return question_files(self.task_names, self.squad, self.hotpotqa)


class SharedConfig(SuiteConfig):
    own_suite = SHARED

    tasks: Names = setting(("all",), "Tasks, with commas; all: but for words, the needle model's.")
    ask: Literal["turns", "requests"] = setting(
        "turns",
        "Questions about one document: turns of a conversation, in which earlier questions are "
        "answered right, or requests that each begin with the document.",
    )

    @property
    def several(self) -> Mapping[str, Sequence[str]]:
        return {"all": [task for task in SHARED.tasks if task != WORDS]}

    def limits(self) -> tuple[ModelShape, int]:
        from razor_dist.evals.needle.model import check_needle_model

        shape, most = super().limits()
        if WORDS in self.task_names:
            check_needle_model(f"task {WORDS}", self.model, shape.vocab_size)
        return shape, most

    @property
    def in_turns(self) -> bool:
        return self.ask == "turns"


class NonliteralConfig(SuiteConfig):
    own_suite = NONLITERAL


class GraphConfig(SuiteConfig):
    own_suite = GRAPH


class WorldConfig(SuiteConfig):
    own_suite = WORLD


class NthConfig(SuiteConfig):
    own_suite = NTH


class PublishedConfig(SuiteConfig):
    data: str = setting(
        ..., "Folder with files of LongBench v2, InfiniteBench, HELMET or L-CiteEval.", min_length=1
    )
    tasks: Names = setting(("all",), "Files in DATA without their suffix, with commas; all.")
    samples: int = setting(50, "Samples of each file, as far as it has.", ge=1)

    @property
    def suite(self) -> Suite:
        names = self.several["all"] if self.tasks == ("all",) else self.tasks
        return published_suite(self.data, tuple(names))

    @property
    def several(self) -> Mapping[str, Sequence[str]]:
        return {"all": tuple(published_files(self.data))}

    @property
    def files(self) -> Mapping[str, DataFile]:
        every = published_files(self.data)
        return {task: every[task] for task in self.task_names}

    def count(self, task: str) -> int:
        content = self.files[task].content
        assert isinstance(content, PublishedData), content
        return min(self.samples, len(content.records))


CONFIGS: Mapping[str, type[SuiteConfig]] = {
    "ruler": RulerConfig,
    "shared": SharedConfig,
    "nonliteral": NonliteralConfig,
    "graph": GraphConfig,
    "world": WorldConfig,
    "nth": NthConfig,
    PUBLISHED: PublishedConfig,
}
GENERATED = (RULER, SHARED, NONLITERAL, GRAPH, WORLD, NTH)
# Titles by name, of all that write results of one form.
SUITES = {suite.name: suite.title for suite in GENERATED} | {PUBLISHED: "Published sets"}
