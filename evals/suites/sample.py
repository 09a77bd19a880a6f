"""Samples: a document and the questions about it, made to fit a length; and what they draw."""

from __future__ import annotations

import itertools
import random
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from razor_dist.config.errors import ConfigError

# Guesses by interpolation at a sample's length, before the search only halves.
_INTERPOLATIONS = 8

Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """A question that follows a document, and what its answer must hold."""

    text: str
    cue: str  # the answer's beginning, which the model goes on from
    answers: tuple[str, ...]  # the task's score says whether all are wanted, or any
    # Characters of the document where each answer is stated; none where it is stated nowhere.
    places: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Sample:
    document: str  # instruction and haystack
    questions: tuple[Question, ...]

    @classmethod
    def asking(
        cls, text: str, cue: str, answers: Sequence[str], places: Sequence[Span] = ()
    ) -> Sample:
        """Split a text before its last line that begins with ``Question``, the only one asked."""
        document, mark, rest = text.rpartition("\nQuestion")
        return cls(document, (Question(mark[1:] + rest, cue, tuple(answers), tuple(places)),))

    def message(self, question: Question) -> str:
        """Return the user's message that asks a question right after the document."""
        return f"{self.document}\n{question.text}"


@dataclass(frozen=True)
class Units:
    """A sample that can be made at any size."""

    build: Callable[[int], Sample]  # from a number of haystack units, always the same for the same
    least: int = 0  # the fewest units that make the task
    most: int = sys.maxsize
    may_be_short: bool = False  # with all units; else a sample that does not fill its length fails


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


def places_of(text: str, statements: Mapping[str, str]) -> tuple[Span, ...]:
    """Return where answers stand, each in its statement, which is in the text once."""
    begins = [text.index(said) + said.index(answer) for answer, said in statements.items()]
    return tuple((begin, begin + len(own)) for begin, own in zip(begins, statements, strict=True))


def among(lines: Sequence[str], hidden: Sequence[tuple[float, str]]) -> list[str]:
    """Put lines among others, each after its part of them, in [0, 1); equal parts keep order."""
    found = list(lines)
    # From the back, so that what is inserted moves no earlier place.
    for part, line in sorted(hidden, key=lambda own: own[0])[::-1]:
        found.insert(int(part * (len(lines) + 1)), line)
    return found


class Filler:
    """Lines of a stream that is read as far as the largest sample needs; builds agree on them."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self._read = lines, list[str]()

    def first(self, count: int) -> list[str]:
        self._read.extend(itertools.islice(self._lines, max(0, count - len(self._read))))
        return self._read[:count]


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
