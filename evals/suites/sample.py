"""Samples: a document and the questions about it, made to fit a length; and what they draw."""

from __future__ import annotations

import itertools
import random
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from razor_dist.config.errors import ConfigError

# Guesses by interpolation at a sample's length, before the search only halves.
_INTERPOLATIONS = 8

# Questions about one document, at most: with the prefix cache it is read for one of them.
QUESTIONS = 5

Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """A question that follows a document, and what its answer must hold."""

    text: str
    cue: str  # the answer's beginning, which the model goes on from
    answers: tuple[str, ...]  # the task's score says whether all are wanted, or any
    # Characters of the document where each answer is stated; none where it is stated nowhere.
    places: tuple[Span, ...] = ()
    task: str | None = None  # the task that asks it, where all tasks of a suite share a document

    @property
    def answered(self) -> str:
        """The right answer from its beginning on, as it stands before a later question."""
        answers = ", ".join(self.answers)
        return f'{self.cue}{answers}"' if self.cue.endswith('"') else f"{self.cue} {answers}"


@dataclass(frozen=True)
class Sample:
    document: str  # instruction and haystack
    questions: tuple[Question, ...]

    def of_task(self, task: str) -> Sample:
        """Return the sample with what a task asks about a document that others ask about too."""
        own = tuple(asked for asked in self.questions if asked.task in (None, task))
        return replace(self, questions=own)

    def message(self, question: Question) -> str:
        """Return the user's message that asks a question right after the document."""
        return f"{self.document}\n{question.text}"


@dataclass(frozen=True)
class Units:
    """A sample that can be made at any size."""

    build: Callable[[int], Sample]  # from a number of haystack units, always the same for the same
    least: int = 0  # the fewest units that make the task
    most: int = sys.maxsize
    may_be_short: bool = False  # with all units; else a short sample is an error


def fit(units: Units, tokens: Callable[[Sample], int], room: int) -> Sample:
    """Return the longest sample of at most ``room`` tokens, as ``tokens`` counts its prompt's.

    The search takes tokens to grow with the units. Where they do not quite, the sample is a little
    shorter than it might be; it is never longer. Raises `ConfigError` if the smallest sample has
    more, naming its tokens, or if there are no units left before the room is filled.
    """
    made: dict[int, Sample] = {}

    def used(count: int) -> int:
        made.clear()  # at a million tokens samples are large: only the last is kept
        made[count] = units.build(count)
        return tokens(made[count])

    low, below = units.least, used(units.least)
    if below > room:
        raise ConfigError(f"it takes at least {below} tokens of prompt, {room} are left")
    step, tries = 1, 0
    while (above := used(high := min(low + step, units.most))) <= room:
        if high == units.most:
            if units.may_be_short:
                return made[high]
            raise ConfigError(f"its data fill {above} tokens of prompt, not {room}")
        low, below, step = high, above, 2 * step
    while high - low > 1:
        guess = (low + high) // 2
        if tries < _INTERPOLATIONS:  # nearly linear, so this is nearly the answer
            guess = low + (room - below) * (high - low) // (above - below)
            guess = min(max(guess, low + 1), high - 1)
        tries += 1
        if (found := used(guess)) > room:
            high, above = guess, found
        else:
            low, below = guess, found
    return made[low] if low in made else units.build(low)


@dataclass(frozen=True)
class SuiteQuestion:
    """A question about a text in which lines are hidden, and the beginning of its answer."""

    question: str
    cue: str
    answers: Sequence[str]
    # The hidden line that states each answer, by answer; an answer stated nowhere is missing.
    stated: Mapping[str, str] = field(default_factory=dict)
    task: str | None = None  # as `Question.task`

    def about(self, document: str) -> Question:
        places = []
        for answer, line in self.stated.items():
            begin = document.index(line) + line.index(answer)  # the line is there once
            places.append((begin, begin + len(answer)))
        text, cue = f"Question: {self.question}", f"Answer: {self.cue}"
        return Question(text, cue, tuple(self.answers), tuple(places), self.task)


@dataclass(frozen=True)
class HiddenText:
    """A task whose answers are in lines hidden among other lines; a unit is one other line."""

    about: str  # its first lines
    hidden: Sequence[tuple[float, str]]  # each line after a fraction of the others
    others: Iterator[str]
    asked: Sequence[SuiteQuestion]
    separator: str = "\n"
    slots: int = 1  # more than there are other lines: 1 for parts in [0, 1), 0 in [0, 1]

    @property
    def units(self) -> Units:
        filler, placed = Filler(self.others), sorted(self.hidden, key=lambda own: own[0])

        def build(count: int) -> Sample:
            lines = filler.first(count)
            # From the back, so that what is inserted moves no earlier place.
            for part, line in reversed(placed):
                lines.insert(int(part * (count + self.slots)), line)
            document = f"{self.about}\n{self.separator.join(lines)}"
            return Sample(document, tuple(asked.about(document) for asked in self.asked))

        return Units(build)


class Filler:
    """Lines of a stream, read only as far as needed and kept: every build gets the same lines."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self._read = lines, list[str]()

    def first(self, count: int) -> list[str]:
        self._read.extend(itertools.islice(self._lines, max(0, count - len(self._read))))
        return self._read[:count]


def prose(draw: random.Random, sentences: Sequence[str]) -> Iterator[str]:
    """Return the sentences from one that is drawn, over and over."""
    return itertools.islice(itertools.cycle(sentences), draw.randrange(len(sentences)), None)


@lru_cache(maxsize=1)
def single_words() -> tuple[str, ...]:
    from razor_dist.evals.needle.model import needle_words  # imports transformers

    return tuple(sorted(set(needle_words())))


def word_pairs(draw: random.Random) -> Iterator[str]:
    """Yield two words with a hyphen, never the same pair twice: keys that name nothing."""
    return never_twice(lambda: "-".join(draw.sample(single_words(), 2)))


def numbers(draw: random.Random, digits: int) -> Iterator[str]:
    return never_twice(lambda: str(draw.randrange(10 ** (digits - 1), 10**digits)))


def uuids(draw: random.Random) -> Iterator[str]:
    return never_twice(lambda: str(uuid.UUID(int=draw.getrandbits(128), version=4)))


def never_twice(make: Callable[[], str]) -> Iterator[str]:
    seen = set()
    while True:
        text = make()
        if text not in seen:
            seen.add(text)
            yield text
