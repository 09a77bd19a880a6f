"""Tasks and suites as data, how answers count, and what samples are made of."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

from razor_dist.config.errors import ConfigError
from razor_dist.evals.suites.sample import Sample, Units, fit

NUMBER_NAMES = "zero one two three four five six seven eight nine ten".split()  # noqa: SIM905
_NUMBERS = {name: str(number) for number, name in enumerate(NUMBER_NAMES)}
_UNPRINTABLE = re.compile(r"[\x00-\x1f]")

Score = Callable[[str, Sequence[str]], float]  # from 0 to 1, of an answer and what is wanted


class Questions(Protocol):
    """A data set of which samples are made."""

    def units(self, making: Making) -> Units: ...


class DataFile(NamedTuple):
    """A file of a data set, and how it is read."""

    path: str
    read: Callable[[Path], Questions]

    @property
    def content(self) -> Questions:
        """The questions of the file, which is read once."""
        return _content(self)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(Path(self.path).read_bytes()).hexdigest()[:12]


@lru_cache(maxsize=16)
def _content(file: DataFile) -> Questions:
    return file.read(Path(file.path))


@dataclass(frozen=True)
class Material:
    """Sentences of prose, and the data of the tasks that read some."""

    essay: Sequence[str]
    questions: Mapping[str, Questions] = field(default_factory=dict)


@dataclass(frozen=True)
class Making:
    """The random draws and the length, answer included, from which a sample is made."""

    draw: random.Random
    length: int  # tokens
    number: int
    material: Material


def _plain(text: str) -> str:
    return _UNPRINTABLE.sub("\n", text).lower()


def all_of(answer: str, wanted: Sequence[str]) -> float:
    """Return the part of the wanted strings that an answer contains: RULER's string_match_all.

    Case does not count, control characters are line breaks, and a string may stand anywhere.
    """
    said = _plain(answer)
    return sum(text.lower() in said for text in wanted) / len(wanted)


def any_of(answer: str, wanted: Sequence[str]) -> float:
    """Return 1 if an answer contains any wanted string: RULER's string_match_part."""
    said = _plain(answer)
    return float(any(text.lower() in said for text in wanted))


def first_word(answer: str, wanted: Sequence[str]) -> float:
    """Return 1 if an answer's first word, number or hyphenated string is a wanted one.

    Case does not count, nor does an article before it; a number up to ten may be a word.
    """
    words = re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*", answer.lower())
    found = next((word for word in words if word not in ("the", "a", "an")), "")
    return float(not {found, _NUMBERS.get(found, found)}.isdisjoint(map(str.lower, wanted)))


def words_from_start(answer: str, wanted: Sequence[str]) -> float:
    """Return the part of a wanted text's words that an answer repeats from its beginning on."""
    said, text = (re.findall(r"\w+", x.lower()) for x in (answer, wanted[0]))
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, text, strict=False))
    return sum(1 for _ in same) / len(text)


@dataclass(frozen=True)
class Task:
    """A kind of question."""

    units: Callable[[Making], Units] | None  # None: those of the task's file of questions
    answer_tokens: int  # generated for each answer; they count as part of a sample's length
    score: Score = all_of
    stop: tuple[str, ...] = ()  # texts after which the score reads nothing


@dataclass(frozen=True)
class Suite:
    name: str  # of the command, and ``kind`` in the settings of a folder of results
    title: str
    tasks: Mapping[str, Task]
    several_questions: bool = False  # about one document
    one_document: bool = False  # of a number, for all tasks; their answers have as many tokens
    version: int = 1  # raised when the same settings would give other samples or scores

    def sample(
        self,
        task: str,
        length: int,
        number: int,
        seed: int,
        material: Material,
        tokens: Callable[[Sample], int],
    ) -> Sample:
        """Make a sample of a number; the same number and seed give the same sample.

        Where all tasks ask about one document it is fitted to all their questions, which the sample
        has, so that each task reads it in the same tokens; `Sample.of_task` has a task's own.
        ``length`` is of the longest prompt, whose tokens ``tokens`` counts, and its answer
        together. Raises `ConfigError` as `fit`.
        """
        own = self.tasks[task]
        of_task = "" if self.one_document else f"{task}:"
        draw = random.Random(f"{seed}:{of_task}{length}:{number}")
        try:
            make = own.units or material.questions[task].units
            units = make(Making(draw, length, number, material))
            return fit(units, tokens, length - own.answer_tokens)
        except ConfigError as error:
            raise ConfigError(
                f"{task} cannot be made at length {length}: {error} "
                f"({own.answer_tokens} more are for the answer)"
            ) from None
